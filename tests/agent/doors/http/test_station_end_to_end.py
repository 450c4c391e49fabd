"""The station as a person has it: `coserve serve` over a line, Debian's Chromium, and the commands beside them."""

import statistics
import sys
import time

import httpx
import pytest
from playwright.sync_api import expect

from tests.agent.doors.http.station_line import DemoStation, FakeStation, Watched, make_demo
from tests.waiting import until

HOSTILE = "<img src=x onerror=alert(1)>"
NG_WITHIN_S, BACK_WITHIN_S = 2.0, 5.0
BOARDS = 3
expect.set_options(timeout=20_000)


@pytest.fixture
def fakes(tmp_path, forks):
    with FakeStation(tmp_path / "line", forks) as station:
        yield station


@pytest.fixture
def demo(tmp_path, forks, made_once):
    with DemoStation(tmp_path / "line", forks, made_once("demo", make_demo) / "demo") as station:
        yield station


@pytest.fixture
def watch(browser):
    contexts = []

    def opened(station):
        contexts.append(browser.new_context(viewport={"width": 1024, "height": 768}, reduced_motion="reduce"))
        return Watched(contexts[-1].new_page(), station.url)

    yield opened
    for context in contexts:
        context.close()


@pytest.fixture
def report(capsys):
    def write(what):
        with capsys.disabled():
            sys.stdout.write(f"\nstation: {what}\n")

    return write


def ng_seen_after_s(station, watched, serial):
    """Seconds from a board's commit until the page showed it as NG."""
    station.make_board(serial)
    committed_at = station.committed_at(serial)
    until(lambda: serial in watched.noted()["ng"])
    return watched.noted()["ng"][serial] / 1000 - committed_at


def pages_of(station, expert):
    number = httpx.get(f"{station.url}/api/boards").json()["boards"][0]["number"]
    return ("/", "/review", f"/board/{number}", f"/expert/{expert}", "/engine", "/texts", "/line")


def looked_at(watched, paths):
    """Opens every page; each says that the line judges, and none still waits for an answer."""
    for path in paths:
        page = watched.go(path)
        expect(page.locator(".judging b")).to_have_text("JUDGING")
        expect(page.get_by_text("asking the agent…")).to_have_count(0)
        expect(page.locator("main [role=alert]")).to_have_count(0)


def reviewed(watched):
    """Signs in by the page, and calls the newest NG a false call."""
    page = watched.go()
    page.get_by_role("button", name="sign in").click()
    page.get_by_label("token").fill("anna-secret-token")
    page.get_by_label("token").press("Enter")
    expect(page.get_by_role("button", name="signed in as anna, role operate")).to_be_visible()
    page.get_by_role("button", name="False call").click()
    expect(page.locator(".case").get_by_role("status")).to_contain_text("false call by anna")


def test_ng_board_appears_and_is_reviewed_exported_and_compared(fakes, watch, report):
    watched = watch(fakes)
    watched.go()
    until(lambda: watched.noted()["interactiveMs"])
    report(f"interactive {watched.noted()['interactiveMs']:.0f} ms after navigation")
    report(f"NG on the page {ng_seen_after_s(fakes, watched, 'SN-1'):.2f} s after its commit")
    reviewed(watched)
    looked_at(watched, pages_of(fakes, fakes.EXPERT))
    export = fakes.printed("review", "export", fakes.file, fakes.folder / "data")
    assert (export["reviews"], export["crops"]) == (1, {"c0/ok": 1})
    fakes.shadow_has_judged()
    (row,) = fakes.printed("experts", "compare", fakes.file, fakes.EXPERT)["reviewed"]
    assert (row["before"]["images"], row["before"]["false_calls"]["count"]) == (1, 1)
    assert row["after"]["false_calls"]["count"] == 0
    assert (watched.wrong, watched.elsewhere) == ([], [])


def test_hostile_file_name_is_text_on_every_page(fakes, watch):
    watched = watch(fakes)
    watched.sign_in()
    fakes.make_board(HOSTILE, ref="<script>alert(2)<script>")
    fakes.committed_at(HOSTILE)
    for path in pages_of(fakes, fakes.EXPERT):
        page = watched.go(path)
        expect(page.get_by_text("asking the agent…")).to_have_count(0)
        if path == "/review" or path.startswith("/board"):
            expect(page.locator("#station")).to_contain_text(HOSTILE)
        assert page.locator("img[src=x], #station script").count() == 0
    assert (watched.wrong, watched.elsewhere) == ([], [])


@pytest.mark.slow
def test_page_finds_the_successor_of_a_killed_agent(fakes, watch, report):
    watched = watch(fakes)
    page = watched.go()
    expect(page.locator(".line")).to_have_text("test")
    page.evaluate("window.isOld = true")
    fakes.make_board("SN-1")
    fakes.committed_at("SN-1")
    fakes.stop()
    expect(page.locator(".judging b")).to_have_text("NO ANSWER")
    fakes.start()
    ready_s = time.monotonic()
    expect(page.locator(".judging b")).to_have_text("IDLE")
    report(f"the page shows the next agent {time.monotonic() - ready_s:.2f} s after READY, wanted {BACK_WITHIN_S:g}")
    expect(page.locator(".tile.NG")).to_contain_text("SN-1")
    assert page.evaluate("isOld")


@pytest.mark.slow
def test_demo_line_works_on_the_pages_from_board_to_comparison(demo, watch, report):
    watched = watch(demo)
    watched.go()
    until(lambda: watched.noted()["interactiveMs"])
    seen_s = [ng_seen_after_s(demo, watched, f"SN-{number}") for number in range(BOARDS)]
    again = watch(demo)
    again.go()
    until(lambda: again.noted()["interactiveMs"])
    report(
        f"demo line: interactive {again.noted()['interactiveMs']:.0f} ms after navigation; NG on the page "
        f"{', '.join(f'{each:.2f}' for each in seen_s)} s after its commit, wanted {NG_WITHIN_S:g}"
    )
    assert statistics.median(seen_s) <= NG_WITHIN_S
    reviewed(watched)
    cases = httpx.get(f"{demo.url}/api/results", params={"verdict": "NG", "expert": demo.EXPERT}).json()["results"]
    (label, *_) = [case["label"] for case in cases if case["experts"] == [demo.EXPERT]]  # no detector's
    page = watched.go(f"/review?verdict=NG&expert={demo.EXPERT}&label={label}")
    page.get_by_role("button", name="False call").click()
    expect(page.locator(".case").get_by_role("status")).to_contain_text("false call by anna")
    looked_at(watched, pages_of(demo, demo.EXPERT))
    export = demo.printed("review", "export", demo.file, demo.folder / "data")
    assert export["reviews"] in (1, 2)  # the newest NG may be this expert's
    assert sum(export["crops"].values()) == export["reviews"]
    (row,) = demo.printed("experts", "compare", demo.file, demo.EXPERT, "--over", "reviewed")["reviewed"]
    assert (row["before"]["images"], row["before"]["false_calls"]["count"]) == (1, 1)
    assert row["before"] == row["after"]  # the shadow has the same weights
    assert (watched.wrong, watched.elsewhere) == ([], [])
