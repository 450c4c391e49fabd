"""The pages in a browser, over a station of plain records: what they show, what keys do, and when they say nothing."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import expect

from agent.doors.http.pages import files
from tests.agent.doors.http.pages.conftest import DESK, KIOSK, PHONE
from tests.agent.doors.http.pages.contract import document_of
from tests.agent.doors.http.pages.plain_station import HOSTILE
from tests.waiting import until

FOLDER = Path(files.__file__).parent
PATHS = ("/", "/review", "/board/170", "/board/169", "/expert/cls/capacitor", "/engine", "/texts", "/line")
MOST_BYTES = 60_000
LEAST_TOUCH = 44
HOSTILE_SHOWN = HOSTILE.replace("\u202e", "\ufffd")  # which would turn the text after it around
SMALL_TARGETS = """() => [...document.querySelectorAll('main button, main .tile, nav a, nav button, dialog button')]
  .filter((node) => node.offsetParent && Math.min(node.offsetWidth, node.offsetHeight) < 44)
  .map((node) => node.outerHTML.slice(0, 90))"""


def case(page):
    return page.locator(".case")


def reviews(station):
    return {seq: each.review.finding for seq, each in station.results.items() if each.review}


def answered_with(page, change):
    """The station's next states come with other headers, or other JSON."""

    def answer(route):
        fetched = route.fetch(headers=route.request.headers | {"if-none-match": ""})
        headers, told = dict(fetched.headers), fetched.json()
        change(headers, told)
        route.fulfill(status=200, headers=headers, json=told)

    page.route("**/api/state", answer)


class TestFiles:
    def test_page_files_are_small_together(self):
        assert sum((FOLDER / name).stat().st_size for name in files.FILES) <= MOST_BYTES

    def test_page_scripts_never_make_markup_of_text(self):
        module = (FOLDER / "station.js").read_text("utf-8")
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|DOMParser", module
        )

    def test_page_files_have_nothing_inline_or_from_elsewhere(self):
        document = (FOLDER / "index.html").read_text("utf-8")
        assert not re.search(r"<style|style=| on\w+=|<script(?![^>]* src=)", document)
        addresses = re.findall(
            r"https?://[^\"' )]+", "".join((FOLDER / name).read_text("utf-8") for name in files.FILES)
        )
        assert set(addresses) == {"http://www.w3.org/2000/svg"}  # a name, which nothing fetches


class TestEachPage:
    @pytest.mark.parametrize("opened", ["busy", "hostile"], indirect=True)
    def test_page_shows_text_as_text_asks_only_its_origin_and_logs_no_error(self, opened):
        for path in PATHS:
            page = opened.go(path)
            expect(page.locator(".judging b")).to_have_text("JUDGING")
            expect(page.get_by_text("asking the agent…")).to_have_count(0)
            if opened.station.kind == "hostile":
                assert HOSTILE_SHOWN in page.locator("#station").inner_text()
                assert "\u202e" not in page.locator("#station").inner_text()
        assert page.locator("img[src=x]").count() == 0
        assert opened.wrong == []
        assert opened.elsewhere() == []

    def test_unproven_verdict_is_marked_in_each_list(self, opened):
        page = opened.go("/review")
        shown = page.locator("tbody tr").first
        is_unproven = max(opened.station.results) % 2 == 1
        expect(shown.get_by_text("unproven")).to_have_count(int(is_unproven))
        expect(page.locator("tbody tr").nth(1).get_by_text("unproven")).to_have_count(int(not is_unproven))
        page.locator("tbody tr", has_text="unproven").first.click()
        expect(page.locator(".case .what").get_by_text("unproven")).to_have_count(1)
        expect(page.locator(".case .chain").get_by_text("unproven")).to_have_count(1)

    @pytest.mark.slow
    def test_page_shows_any_document_that_the_contract_allows(self, opened):
        def answer(asked):
            document = document_of(asked.request.url.removeprefix(opened.served.url), pick)
            asked.fulfill(status=404) if document is None else asked.fulfill(json=document)

        opened.page.route("**/api/**", answer)
        for number, path in enumerate(PATHS * 3):
            pick = random.Random(number)
            page = opened.go(path)
            page.keyboard.press("w")
            expect(page.get_by_text("asking the agent…")).to_have_count(0)
            assert not re.search(r"undefined|NaN|\[object|This page failed", page.locator("#station").inner_text())
        assert [each for each in opened.wrong if "404" not in each] == []

    @pytest.mark.parametrize(
        "opened",
        ["busy", *(pytest.param(each, marks=pytest.mark.slow) for each in ("failing", "empty"))],
        indirect=True,
    )
    def test_page_fits_a_kiosk_and_a_phone(self, opened):
        page = opened.go("/")
        for width, height in (KIOSK, DESK):
            page.set_viewport_size({"width": width, "height": height})
            expect(page.locator(".side")).to_be_visible()
            root = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
            assert (root[0] <= width, root[1] <= height) == (True, True)
        page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
        for path in PATHS if opened.station.kind == "busy" else ("/",):
            opened.go(path)
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE[0], path
            assert page.evaluate(SMALL_TARGETS) == [], path

    @pytest.mark.slow
    def test_choice_of_dark_or_light_is_kept(self, opened):
        page = opened.go("/")
        page.get_by_label("dark or light").click()
        expect(page.locator("html")).to_have_attribute("data-theme", "dark")
        opened.go("/engine")
        expect(page.locator("html")).to_have_attribute("data-theme", "dark")


class TestStation:
    @pytest.mark.parametrize("opened", ["failing"], indirect=True)
    def test_station_page_shows_a_failure_and_its_reason_first(self, opened):
        page = opened.go("/")
        expect(page.locator(".judging")).to_have_text(re.compile("FAILING.*the disk is full"))
        expect(page.get_by_role("alert").first).to_contain_text("camera belt is OFFLINE")
        page.locator("summary").click()
        expect(page.locator(".alarms li")).to_have_count(2)
        expect(page.locator(".takt")).to_contain_text("too slow")
        expect(page.locator(".rows .bad").first).to_contain_text("OFFLINE")

    @pytest.mark.slow
    def test_new_board_moves_no_other_node(self, opened):
        page = opened.go("/")
        expect(page.locator(".tile")).to_have_count(24)
        page.evaluate("document.querySelectorAll('.tile')[3].isKnown = true")
        now = opened.station.now
        newest = replace(now.boards[1], number=171, serial="SN-NEW")
        opened.station.now = replace(now, boards=(newest, *now.boards[1:]))
        expect(page.locator(".tile").first).to_contain_text("SN-NEW")
        assert page.evaluate("[...document.querySelectorAll('.tile')].findIndex((tile) => tile.isKnown)") == 3

    @pytest.mark.slow
    def test_unchanged_state_is_not_sent_again(self, opened):
        statuses = []
        opened.page.on(
            "response", lambda answer: statuses.append(answer.status) if answer.url.endswith("state") else None
        )
        opened.go("/")
        opened.page.wait_for_event("response", lambda answer: answer.status == 304)
        assert statuses[0] == 200

    @pytest.mark.slow
    def test_link_to_another_page_is_in_the_history(self, opened):
        page = opened.go("/")
        page.locator(".tile").nth(2).click()
        expect(page.locator("main h1")).to_have_text("SN-2026-007309")
        page.go_back()
        expect(page.locator(".tiles")).to_be_visible()
        page.keyboard.press("ArrowRight")
        case(page).get_by_role("link", name="board SN-2026-007309").click()
        expect(page).to_have_url(re.compile("/board/169$"))


class TestReviews:
    def test_keys_go_through_cases_and_review_them(self, opened):
        page = opened.go("/")
        newest, second = [each.seq for each in opened.station.now.cases[:2]]
        expect(case(page)).to_contain_text("1/12")
        page.keyboard.press("ArrowRight")
        expect(case(page)).to_contain_text("2/12")
        page.keyboard.press("f")
        expect(case(page).get_by_role("status")).to_contain_text("false call by anna")
        assert reviews(opened.station) == {second: "false_call"}
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("w")
        expect(case(page)).to_contain_text("waited 0.10 s in the group")
        page.keyboard.press("a")
        expect(case(page).get_by_role("status")).to_contain_text("agreed by anna")
        assert reviews(opened.station) == {second: "false_call", newest: "agree"}
        page.get_by_role("button", name="Undo").click()
        expect(page.get_by_label("reason")).to_be_visible()
        assert reviews(opened.station) == {second: "false_call"}
        assert opened.wrong == []

    @pytest.mark.slow
    def test_review_carries_label_and_reason_and_typing_there_reviews_nothing(self, opened):
        page = opened.go("/")
        page.get_by_label("label", exact=True).fill("lifted lead")
        page.get_by_label("reason", exact=True).press_sequentially("fair fa")
        page.get_by_role("button", name="Agree").click()
        expect(case(page).get_by_role("status")).to_contain_text("lifted lead · fair fa")
        assert list(reviews(opened.station).values()) == ["agree"]

    def test_case_that_has_just_changed_takes_no_review(self, opened):
        opened.page.clock.install()
        page = opened.go("/")
        expect(page.locator(".choice").first).to_be_visible()
        page.clock.run_for(1000)
        now, newest = opened.station.now, replace(opened.station.results[59], seq=61, label="just come")
        opened.station.results[61] = newest
        opened.station.now = replace(now, cases=(newest, *now.cases)[:12])
        until(lambda: page.clock.run_for(100) or "just come" in case(page).inner_text())
        page.keyboard.press("a")
        expect(page.locator(".message")).to_contain_text("The case has just changed")
        assert reviews(opened.station) == {}
        page.clock.run_for(1000)
        page.keyboard.press("a")
        expect(case(page).get_by_role("status")).to_contain_text("agreed")

    def test_case_stays_three_seconds_while_newer_ones_arrive(self, opened):
        opened.page.clock.install(time=0)
        page = opened.go("/")
        expect(page.locator(".choice").first).to_be_visible()
        page.clock.pause_at(3_600_000)
        now, first = opened.station.now, opened.station.results[59]

        def come(*numbers):
            for number in numbers:
                opened.station.results[number] = replace(first, seq=number, label=f"defect {number}")
            cases = [opened.station.results[number] for number in reversed(numbers)]
            opened.station.now = replace(now, cases=(*cases, *now.cases)[:12])
            until(lambda: page.wait_for_timeout(10) or not opened.under_way)
            with page.expect_response("**/api/state"):
                page.clock.run_for(1000)
            expect(page.get_by_role("button", name=f"defect {numbers[-1]}")).to_be_visible()

        come(61)
        expect(case(page)).to_contain_text("defect 61")
        come(*range(61, 80))  # the first of them is none of the twelve newest any more
        assert "defect 61" in case(page).inner_text()
        page.clock.run_for(3000)
        expect(case(page)).to_contain_text("defect 79")
        page.get_by_label("reason", exact=True).fill("glare")
        come(*range(80, 99))
        page.clock.run_for(4000)
        assert "defect 79" in case(page).inner_text()  # a person is at it
        expect(page.get_by_label("reason", exact=True)).to_have_value("glare")
        page.get_by_role("button", name="newer case").click()
        expect(case(page)).to_contain_text("defect 88")
        page.get_by_role("button", name="newer", exact=False).first.click()
        page.keyboard.press("Escape")
        expect(case(page)).to_contain_text("defect 98")

    def test_token_is_asked_for_once_it_is_needed(self, opened):
        opened.page.context.clear_cookies()
        page = opened.go("/")
        page.get_by_role("button", name="False call").click()
        token = page.get_by_label("token")
        expect(token).to_be_focused()
        page.get_by_role("button", name="Close").click()  # then it is not done
        page.get_by_role("button", name="Agree").click()
        token.fill("wrong")
        token.press("Enter")
        expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("this is no token of the line file")
        token.fill("anna-secret")
        token.press("Enter")
        expect(page.get_by_role("button", name="signed in as anna, role admin")).to_be_visible()
        expect(case(page).get_by_role("status")).to_contain_text("agreed by anna")
        assert list(reviews(opened.station).values()) == ["agree"]

    def test_page_shows_nothing_of_the_line_after_the_token_was_withdrawn(self, opened):
        opened.page.clock.install()
        page = opened.go("/")
        expect(page.locator(".judging b")).to_have_text("JUDGING")
        refusal = {"error": {"reason": "UNAUTHENTICATED", "message": "send a token", "field": None}}
        page.route("**/api/state", lambda asked: asked.fulfill(status=401, json=refusal))
        page.clock.run_for(1000)
        expect(page.get_by_label("token")).to_be_focused()
        expect(page.locator(".judging b")).to_have_text("SIGN IN")
        expect(page.locator(".tile")).to_have_count(0)
        page.get_by_role("button", name="Close").click()
        with page.expect_response("**/api/state"):
            page.clock.run_for(3000)
        expect(page.get_by_role("dialog")).to_have_count(0)
        page.unroute("**/api/state")
        until(lambda: page.clock.run_for(1000) or page.locator(".judging b").inner_text() == "JUDGING")

    @pytest.mark.slow
    def test_review_of_a_list_goes_on_to_the_next_case(self, opened):
        page = opened.go("/review?verdict=UNKNOWN")
        rows = page.locator("tr[aria-selected]")
        expect(rows).to_have_count(10)
        expect(case(page)).to_contain_text("1/10")
        rows.nth(1).click()
        page.keyboard.press("n")
        expect(rows.nth(1)).to_contain_text("decided")
        page.get_by_label("verdict", exact=True).select_option("NG")
        expect(page).to_have_url(re.compile("verdict=NG"))
        expect(rows.first).to_contain_text("NG")

    def test_board_is_reworked_and_a_line_file_checked_on_the_page(self, opened):
        page = opened.go("/board/170")
        page.locator(".part.NG").first.click()
        expect(case(page)).to_have_class(re.compile("NG"))
        page.get_by_role("button", name="Open a new run").click()
        expect(page.locator(".message")).to_contain_text("SN-2026-007310 opens a new run")
        opened.go("/line")
        page.get_by_role("button", name="Check this text").click()
        page.get_by_role("button", name="line 2").click()
        expect(page.get_by_label("text of the line file")).to_be_focused()
        page.get_by_role("button", name="Reload the file").click()
        expect(page.get_by_text("The line serves this file.")).to_be_visible()


class TestMissingAnswers:
    def test_data_older_than_5_s_is_never_shown_as_current(self, opened):
        opened.page.clock.install()
        page = opened.go("/")
        expect(page.locator(".data")).to_have_text("data 1 s old")
        page.route("**/api/**", lambda route: route.abort())
        page.clock.run_for(6500)
        expect(page.locator(".data")).to_have_text(re.compile(r"no answer for [67] s: reconnecting"))
        expect(page.locator(".judging b")).to_have_text("NO ANSWER")
        expect(page).to_have_title(re.compile("^NO ANSWER"))
        page.unroute("**/api/**")
        until(lambda: page.clock.run_for(1000) or page.locator(".judging b").inner_text() == "JUDGING")

    def test_answer_with_an_old_state_is_shown_with_the_age_of_the_state(self, opened):
        page = opened.go("/")
        expect(page.locator(".judging b")).to_have_text("JUDGING")
        answered_with(page, lambda headers, told: headers.update(age="30"))
        expect(page.locator(".data")).to_have_text(re.compile(r"no answer for 3\d s: reconnecting"))
        expect(page.locator(".judging b")).to_have_text("NO ANSWER")

    @pytest.mark.slow
    def test_failing_page_shows_its_failure_and_nothing_as_current(self, opened):
        page = opened.go("/")
        expect(page.locator(".judging b")).to_have_text("JUDGING")
        answered_with(page, lambda headers, told: told["state"].pop("shift"))
        expect(page.locator("header")).to_contain_text("This page failed")
        expect(page.locator(".judging")).to_have_count(0)

    @pytest.mark.slow
    def test_hanging_request_of_a_page_times_out_and_is_not_doubled(self, opened):
        opened.page.clock.install()
        page = opened.go("/")
        expect(page.locator(".judging b")).to_have_text("JUDGING")
        held = []
        page.route("**/api/state", lambda route: held.append(route))
        page.clock.run_for(3900)
        until(lambda: page.wait_for_timeout(10) or held)
        assert len(held) == 1
        until(lambda: page.clock.run_for(500) or len(held) == 2)

    def test_restarted_agent_is_found_and_another_version_reloads_the_page(self, opened):
        page = opened.go("/")
        expect(page.locator(".judging b")).to_have_text("JUDGING")
        page.evaluate("window.isOld = true")
        opened.served.stop()
        now = opened.station.now
        opened.station.now = replace(now, line="again")
        opened.served.start()
        expect(page.locator(".line")).to_have_text("again")
        assert page.evaluate("window.isOld") is True
        with page.expect_event("load"):
            opened.station.now = replace(now, version="0.3.0")
        expect(page.locator(".judging b")).to_have_text("JUDGING")

    @pytest.mark.slow
    def test_page_does_not_grow_with_updates(self, opened):
        opened.page.clock.install()
        page = opened.go("/")
        session = page.context.new_cdp_session(page)

        def held():
            session.send("HeapProfiler.collectGarbage")
            return session.send("Memory.getDOMCounters")

        expect(page.get_by_role("button", name="heat map")).to_be_visible()

        def update(times):
            for turn in range(times):
                opened.station.now = replace(opened.station.now, config_sha256=f"{turn:064}")
                page.clock.run_for(1000)

        update(30)
        before = held()
        update(200)
        after = held()
        assert after["nodes"] <= before["nodes"] + 20
        assert after["jsEventListeners"] <= before["jsEventListeners"] + 60  # some are collected later
