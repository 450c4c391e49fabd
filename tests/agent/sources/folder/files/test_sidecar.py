"""Sidecars under a virtual clock: board, component and ref stand in a file beside the image."""

import json
import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.faults.errors import SidecarUnfinished
from agent.sources.folder.files.inbox import Inbox
from agent.sources.folder.files.sidecar import LARGEST_BYTES, fields_in
from agent.sources.folder.watch import SourceState
from experts.expert import Verdict
from tests.agent.sources.folder.lines import IMAGES, PNG, Line, LiveLine, identity, identity_of, printed_by_another_user
from tests.waiting import until

SAID = {"board": "B1", "component": "r", "ref": "R7"}
B1 = identity("B1", "r", "R7", "main")


@pytest.fixture
def line(tmp_path):
    return sidecar_line(tmp_path / "inbox")


def sidecar_line(root, **config):
    return Line(root, identity="sidecar", **config)


def arrive(line, stem="x", **changes):
    line.write(f"{stem}.png")
    say(line, f"{stem}.json", **changes)
    line.run(5)


def say(line, name="x.json", **changes):
    said = {key: value for key, value in {**SAID, **changes}.items() if value is not None}
    (line.root / name).write_text(json.dumps(said))


def arrived_identities(line):
    return [identity_of(one.subject) for one in line.arrivals]


@pytest.mark.parametrize("ready", ["auto", "rename", "marker", "stable"])
@pytest.mark.parametrize("is_sidecar_first", [True, False])
def test_image_and_sidecar_may_come_in_either_order(tmp_path, ready, is_sidecar_first):
    line = sidecar_line(tmp_path / "inbox", ready=ready)
    steps = [lambda: say(line), lambda: (line.root / "x.png").write_bytes(PNG)]
    for step in steps if is_sidecar_first else reversed(steps):
        assert line.arrivals == []
        step()
        line.run(30)
    assert (arrived_identities(line), line.refusals) == ([B1], [])
    assert line.arrivals[0].file.path.read_bytes() == PNG


@pytest.mark.parametrize("ending", ["JSON", "Json", "json"])
def test_ending_of_a_sidecar_may_have_any_case(line, ending):
    line.write("X.PNG")
    say(line, f"X.{ending}")
    line.run(5)
    line.settle()
    assert (arrived_identities(line), line.files()) == ([B1], {"done/2026-05-01/X.PNG", "done/2026-05-01/X.json"})


@pytest.mark.parametrize("verdict", list(Verdict))
@pytest.mark.parametrize("after", ["move", "delete", "keep"])
def test_sidecar_stays_with_its_image(tmp_path, after, verdict):
    line = sidecar_line(tmp_path / "inbox", after=after)
    (line.root / "sub").mkdir()
    arrive(line, "sub/x")
    line.source.verdict_committed(line.arrivals[0].subject, verdict, "why")
    line.run(5)
    shelf = {Verdict.OK: "done/2026-05-01/sub/", Verdict.NG: "ng/2026-05-01/sub/", Verdict.UNKNOWN: "failed/sub/"}
    left = {f"{shelf[verdict]}x.png", f"{shelf[verdict]}x.json"} if after != "keep" else {"sub/x.png", "sub/x.json"}
    if verdict is Verdict.UNKNOWN and after != "keep":
        left.add("failed/sub/x.png.error.json")
        error = json.loads((line.root / "failed/sub/x.png.error.json").read_text())
        said = (error["file"], error["reason"], error["key"])
        assert said == ("sub/x.png", "why", line.arrivals[0].subject.key)
    assert line.files() == (set() if after == "delete" and verdict is not Verdict.UNKNOWN else left)
    line.run(200)
    assert (len(line.arrivals), line.refusals) == (1, [])


def test_image_without_its_sidecar_is_refused_after_a_while_with_the_reason(line):
    line.write("x.png")
    line.run(59)
    assert line.refusals == []
    line.run(5)
    assert line.refused == {"x.png": "its sidecar x.json is missing"}
    assert line.files() == {"failed/x.png", "failed/x.png.error.json"}
    assert line.refusals[0].subject.board is None


WRONG = {
    '{"board": "B1", "component": "r"}': "its sidecar {}.json gives no ref",
    '{"board": "", "component": "r", "ref": "R7"}': "its sidecar {}.json gives no board",
    '{"board": "B1", "ref": "R7"}': "its sidecar {}.json gives no component",
    '{"board": 7, "component": "r", "ref": "R7"}': "its sidecar {}.json gives no text as board",
    '{"board": null, "component": "r", "ref": "R7"}': "its sidecar {}.json gives no text as board",
    '{"board": "B1", "component": "r", "ref": ["R7"]}': "its sidecar {}.json gives no text as ref",
    '{"board": "B\\n1", "component": "r", "ref": "R7"}': "its sidecar {}.json gives a board that is not printable",
    '{"board": "\\ud800", "component": "r", "ref": "R7"}': "its sidecar {}.json gives a board that is not printable",
    '{"board": "' + 256 * "B" + '", "component": "r", "ref": "R7"}': "its sidecar {}.json gives a board that is not",
    '{"board": "B1", "board": "B2", "component": "r", "ref": "R7"}': "its sidecar {}.json says a key twice",
    '{"bord": "B1", "component": "r", "ref": "R7"}': "its sidecar {}.json says 'bord', which is unknown - did you me",
    '{"board": "B1", "component": "z", "ref": "R7"}': "no route for the component 'z'",
    '{"board": "B1", "component": "r", "ref": "R7", "type": "other"}': "no board type 'other'",
    '["B1", "r", "R7"]': "its sidecar {}.json is not {{",
    "[" * 50_000: "its sidecar {}.json is nested too deeply",
    " " * (LARGEST_BYTES + 1): "its sidecar {}.json has more than 65536 bytes",
}


NO_JSON = (b"", b"board=B1", b'{"board": "B1"', b"{}\x00\x00", b"\xff\xfe\x00", b"\xc3\x28")


def test_wrong_sidecar_is_refused_with_its_reason_and_never_guessed(line):
    for number, content in enumerate(WRONG):
        line.write(f"{number}.png")
        (line.root / f"{number}.json").write_text(content)
    line.write("good.png")
    say(line, "good.json", ref="R8")
    line.run(5)
    assert [one.subject.ref for one in line.arrivals] == ["R8"]
    for number, reason in enumerate(WRONG.values()):
        assert line.refused[f"{number}.png"].startswith(reason.format(number))
        failed = f"failed/{number}"
        assert {f"{failed}.png", f"{failed}.json", f"{failed}.png.error.json"} <= line.files()


def test_sidecar_that_is_no_json_is_refused_once_it_has_settled(line):
    for number, content in enumerate(NO_JSON):
        line.write(f"{number}.png")
        (line.root / f"{number}.json").write_bytes(content)
    line.run(58)
    assert line.refusals == []
    line.run(5)
    for number in range(len(NO_JSON)):
        assert line.refused[f"{number}.png"].startswith(f"its sidecar {number}.json is not JSON")
    assert [name.startswith("failed/") for name in line.files()] == [True] * (3 * len(NO_JSON))


def test_link_folder_or_pipe_is_no_sidecar(line, tmp_path):
    (tmp_path / "secret.json").write_text(json.dumps(SAID))
    (line.root / "link.json").symlink_to(tmp_path / "secret.json")
    (line.root / "folder.json").mkdir()
    os.mkfifo(line.root / "pipe.json")
    line.write("link.png", "folder.png", "pipe.png")
    line.run(5)
    names = ("link", "folder", "pipe")
    assert line.refused == {f"{name}.png": f"its sidecar {name}.json is not a regular file" for name in names}
    assert (tmp_path / "secret.json").exists()


@given(st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
def test_any_bytes_are_a_sidecar_or_unfinished_or_wrong(content):
    try:
        said = fields_in(content)
    except (ValueError, SidecarUnfinished):
        return
    assert all(isinstance(value, str) for value in said.values())


@given(st.dictionaries(st.sampled_from(sorted(SAID)), st.text(min_size=1, max_size=20), min_size=1))
def test_truncated_sidecar_is_unfinished(said):
    content = json.dumps(said).encode()
    for end in range(len(content)):
        with pytest.raises(SidecarUnfinished):
            fields_in(content[:end])


@pytest.mark.parametrize(
    ("suffix", "reason"),
    [("json", "its sidecar x.json cannot be read (Permission denied)"), ("png", "not permitted to read it")],
)
def test_unreadable_image_or_sidecar_is_waited_for_and_logged(suffix, reason):
    steps = f"""
        for name in ("x", "y"):
            line.write(name + ".png")
            (line.root / (name + ".json")).write_text({json.dumps(SAID)!r})
            (line.root / (name + ".{suffix}")).chmod(0)
        line.run(50)
        print(line.offered, line.refused)
        (line.root / "y.{suffix}").chmod(0o600)
        line.run(20)
        print(line.offered, line.refused, line.source.status().alarm, sorted(os.listdir(line.root / "failed")))
        """
    assert printed_by_another_user(steps, identity="sidecar") == [
        "[] {}", f"['y.png'] {{'x.png': {reason!r}}} None ['x.json', 'x.png', 'x.png.error.json']"
    ]  # fmt: skip


def test_sidecar_that_contradicts_a_constant_or_lacks_a_type_is_refused(line):
    line.name_by(replace(line.naming, component="c", board_types=("top", "bottom")))
    for name, component, board_type in (("a", None, "top"), ("b", "c", "bottom"), ("c", "r", "top"), ("d", "c", None)):
        arrive(line, name, component=component, type=board_type)
    assert arrived_identities(line) == [identity("B1", "c", "R7", board_type) for board_type in ("top", "bottom")]
    assert line.refused == {
        "c.png": "its sidecar c.json says component 'r', but all images here are 'c'",
        "d.png": "its sidecar d.json gives no board type",
    }


def test_refused_image_with_a_good_sidecar_belongs_to_its_board(line):
    (line.root / "x.png").write_bytes(PNG[:-20])
    say(line)
    line.run(70)
    (refusal,) = line.refusals
    assert (identity_of(refusal.subject), refusal.reason) == (B1, "truncated: the end of the image is missing")
    assert line.files() == {"failed/x.png", "failed/x.json", "failed/x.png.error.json"}


def test_second_image_of_one_sidecar_is_refused(line):
    for suffix in ("png", "jpg"):
        (line.root / f"x.{suffix}").write_bytes(IMAGES[suffix])
    say(line)
    line.run(70)
    assert (len(line.arrivals), list(line.refused.values())) == (1, ["its sidecar x.json is missing"])


def test_new_image_of_a_name_does_not_use_the_earlier_sidecar(line):
    arrive(line)
    line.write("x.png")
    line.run(20)
    assert arrived_identities(line) == [B1]
    say(line, board="B2")
    line.run(5)
    assert [one.subject.board for one in line.arrivals] == ["B1", "B2"]
    line.settle()
    shelf = line.root / "done" / "2026-05-01"
    boards = {path.stem: json.loads(path.read_text())["board"] for path in shelf.glob("*.json")}
    assert boards.keys() == {path.stem for path in shelf.glob("*.png")}
    assert sorted(boards.values()) == ["B1", "B2"]


def test_kept_image_overwritten_in_place_does_not_use_the_earlier_sidecar(tmp_path):
    line = sidecar_line(tmp_path / "inbox", after="keep")
    image, other = line.root / "x.bmp", bytearray(IMAGES["bmp"])
    other[-1] ^= 1

    def write(content):
        with image.open("r+b" if image.exists() else "wb") as file:
            file.write(content)
        os.utime(image, (5, 5))

    write(IMAGES["bmp"])
    say(line)
    line.run(20)
    image.chmod(0o600)  # the same bytes: offered again, and the line knows them
    line.run(70)
    assert (arrived_identities(line), line.refused) == ([B1, B1], {})
    write(other)
    line.run(70)
    assert line.refused == {"x.bmp": "its sidecar x.json is the earlier image's: write it again"}
    write(IMAGES["bmp"])
    say(line, board="B2")
    line.run(20)
    assert [one.subject.board for one in line.arrivals] == ["B1", "B1", "B2"]


def test_kept_image_that_is_replaced_waits_for_its_own_sidecar(tmp_path):
    line = sidecar_line(tmp_path / "inbox", after="keep")
    arrive(line)
    (line.root / "x.png").write_bytes(PNG + b"")
    os.utime(line.root / "x.png", (5, 5))
    line.run(20)
    assert arrived_identities(line) == [B1]
    say(line, board="B2")
    line.run(5)
    assert [one.subject.board for one in line.arrivals] == ["B1", "B2"]
    (line.root / "x.png").write_bytes(IMAGES["jpg"])
    line.run(70)
    assert line.refused == {"x.png": "its sidecar x.json is the earlier image's: write it again"}


def test_sidecar_rewritten_during_the_claim_of_its_image_is_read_again(line, monkeypatch):
    claim = Inbox.claim

    def rewriting(inbox, *arguments):
        if not line.arrivals and json.loads((line.root / "x.json").read_text())["board"] == "B1":
            say(line, board="B22")
        return claim(inbox, *arguments)

    monkeypatch.setattr(Inbox, "claim", rewriting)
    line.write("x.png")
    say(line)
    line.run(9)
    assert [one.subject.board for one in line.arrivals] == ["B22"]
    assert len([name for name in line.files() if name.startswith(".work/")]) == 2


@pytest.mark.parametrize("length", [10, 240, 250])
def test_claimed_image_keeps_its_own_sidecar_after_a_crash(line, length):
    stem = (length - 4) * "x"
    arrive(line, stem)
    arrive(line, "y", ref="R8")
    say(line, f"{stem}.json", board="B2")
    again = sidecar_line(line.root)
    again.run(1)
    known, found = ({one.subject.key: one.subject.board for one in each.arrivals} for each in (line, again))
    assert (len(found), found, set(found.values())) == (2, known, {"B1"})
    again.settle(Verdict.NG)
    put_away = {f"ng/2026-05-01/{name}.{suffix}" for name in (stem, "y") for suffix in ("png", "json")}
    assert again.files() == put_away | {f"{stem}.json"}


def test_crash_between_the_claims_of_image_and_sidecar_is_repaired(line):
    line.write("x.png")
    say(line)
    inbox = Inbox(line.root, "demo", has_sidecars=True)
    inbox.claim("x.png", inbox.look("x.png").sighting)
    line.run(1)
    assert arrived_identities(line) == [B1]


@pytest.mark.parametrize("is_taken", [False, True])
@pytest.mark.parametrize("is_linked", [False, True])
def test_crash_while_image_and_sidecar_are_put_away_is_repaired(line, is_taken, is_linked):
    shelf = line.root / "done" / "2026-05-01"
    shelf.mkdir(parents=True)
    if is_taken:
        (shelf / "x.png").write_bytes(b"another")
        (shelf / "x.json").write_bytes(b"another's")
    arrive(line)
    (arrival,) = line.arrivals
    (sidecar,) = (line.root / ".work" / "demo").glob(".*.json")
    target = shelf / (f"x~{arrival.subject.key.rpartition('@')[2]}.json" if is_taken else "x.json")
    os.link(sidecar, target)
    if not is_linked:
        sidecar.unlink()
    again = sidecar_line(line.root)
    again.run(1)
    judged = again.arrivals[0] if is_linked else again.refusals[0]
    assert judged.subject.key == arrival.subject.key  # by which its stored verdict is found
    again.source.verdict_committed(judged.subject, Verdict.OK, None)
    again.run(5)
    if is_linked:
        expected = {f"done/2026-05-01/{target.name}", f"done/2026-05-01/{target.stem}.png"}
        taken = {"done/2026-05-01/x.png", "done/2026-05-01/x.json"} if is_taken else set()
        assert again.files() == expected | taken


def test_withdrawn_image_goes_back_with_its_sidecar(line):
    arrive(line)
    line.arrivals[0].file.path.write_bytes(PNG + PNG)
    line.source._image_changed(line.arrivals[0])
    line.run(5)
    assert arrived_identities(line) == [B1, B1]
    assert line.arrivals[1].file.sighting.size_bytes == 2 * len(PNG)


def test_sidecar_that_arrives_offers_its_image_without_a_rescan(tmp_path):
    with LiveLine(tmp_path / "inbox", identity="sidecar", settle_ms=20, poll_s=3600) as service:
        until(lambda: service.source._watch.state is SourceState.ONLINE)
        if service.source._watch.is_polled:
            pytest.skip("this filesystem tells no changes")
        for number in range(2):
            if number:
                say(service, "1.json")
            service.write(f"{number}.PNG")
            if not number:
                until(lambda: service.source.status().waiting == 1)
                say(service, "0.json")
            service.source.verdict_committed(service.next().subject, Verdict.OK, None)
        until(lambda: service.source.held == 0)
    assert service.files() == {
        f"done/2026-05-01/{number}.{suffix}" for number in range(2) for suffix in ("PNG", "json")
    }
