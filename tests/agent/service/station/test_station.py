"""The station of a running line over HTTP: its state, stored rows, pictures, and what a person changes."""

import http.client
import io
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import datetime

import numpy as np
import pytest
from PIL import Image

from agent.doors.desk import TextOrder
from agent.faults.errors import OrderRefused
from agent.records.verdict import AnomalyScore, KeptMap, Step
from agent.service.station import pictures as pictures_module
from agent.service.station.pictures import Pictures
from experts.expert import AnomalyMap, Verdict
from experts.llm.serving.generation import GREEDY
from experts.thresholds.map_pictures import map_png
from tests.agent.service.fake_line import PATIENCE_S, FakeLine, asked, picture
from tests.agent.service.language_models import Held
from tests.lines import order as order_of
from tests.lines import result
from tests.waiting import until

PROMOTED = {"expert": "cls/f0", "sha256": "0" * 64}
TOKENS = {"watcher": "read", "operator": "operate", "master": "admin"}


class Web:
    """A caller of `/api` of a served line. ``who``: whose token is sent."""

    def __init__(self, service, who=None):
        self.host, _, self.port = service.web.addresses[0].rpartition(":")
        self.who = who

    def connection(self):
        return http.client.HTTPConnection(self.host, int(self.port), timeout=PATIENCE_S)

    def __call__(self, path, body=None, method=None, **headers):
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if self.who is not None:
            headers["authorization"] = f"Bearer secret-of-{self.who}"
        if body is not None:
            headers["content-type"] = "application/json"
        with closing(self.connection()) as caller:
            sent = None if body is None else json.dumps(body)
            caller.request(method or ("GET" if body is None else "POST"), path, sent, headers)
            answer = caller.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()

    def json(self, path, body=None, status=200, **options):
        found, _, content = self(path, body, **options)
        assert found == status, content
        return json.loads(content)

    def error(self, path, body=None, status=400, **options):
        return self.json(path, body, status, **options)["error"]


def with_door(line):
    for name in TOKENS:
        (line.folder / name).write_text(f"secret-of-{name}")
    tokens = {name: {"role": role, "file": f"./{name}"} for name, role in TOKENS.items()}
    line.document["api"] = {"http": "127.0.0.1:0", "grpc": [], "tokens": tokens}
    return line


@pytest.fixture
def line(line):
    return with_door(line)


@pytest.fixture(scope="module")
def busy(tmp_path_factory):
    """A line that judged: S1 from a folder, whole and NG; B2 by a caller, still open; a frame F1 of a whole board."""
    line = with_door(FakeLine(tmp_path_factory.mktemp("busy")))
    line.watch()
    line.fake(0, label="bad")
    line.document["records"] = {"images": "all"}
    with line.served() as service:
        for name in ("S1_c0_R1.png", "S1_c1_R2.png"):
            line.drop(name)
        until(lambda: service.judged == 2)
        asked(service, order_of(picture(), component="c0", board="B2", ref="R1", key="k1"))
        frame = np.zeros((16, 32, 3), np.uint8)
        frame[:, 16:] = 200
        asked(service, order_of(frame, board="F1", board_type="main", key="k2"))
        until(lambda: not service.store.statistics().pending and len(line.boards) == 2)
        yield service, line


def state(web):
    return web.json("/api/state")["state"]


def test_state_shows_shift_boards_cases_and_sources(busy):
    web = Web(busy[0])
    document = web.json("/api/state")
    now = document["state"]
    assert (now["line"], now["phase"], now["judging"]) == ("test", None, {"state": "JUDGING", "reason": None})
    assert now["shift"]["verdicts"] == {"OK": 2, "NG": 3, "UNKNOWN": 0}
    assert now["shift"]["boards"] == {"OK": 0, "NG": 2, "UNKNOWN": 0}
    assert now["shift"]["takt_target_s"] == 3600
    assert now["shift"]["pareto"] == [{"component": "c0", "label": "bad", "images": 3}]
    tiles = [(tile["serial"], tile["number"], tile["verdict"], tile["missing"]) for tile in now["boards"]]
    assert tiles == [("B2", None, None, 1), ("F1", 2, "NG", 0), ("S1", 1, "NG", 0)]
    assert {case["verdict"] for case in now["cases"]} == {"NG"}
    assert [(source["kind"], source["received"]) for source in now["sources"]] == [("folder", 2)]
    assert now["executors"][0]["processor"] == "cpu"
    assert now["memories"][0]["experts"] == 2
    assert now["loads"]["wait_p99_s"] > 0
    assert (now["texts"], now["standing"], now["alarms"]) == (None, [], [])
    assert now["unproven"] == ["cls/f0", "cls/f1"]
    assert {case["unproven"] for case in now["cases"]} == {True}
    assert datetime.fromisoformat(document["ages"]["at"]).utcoffset() is not None
    assert document["ages"]["uptime_s"] > 0
    assert 0 <= int(web("/api/state")[1]["age"]) <= PATIENCE_S, "seconds since the state was made"


def test_boards_of_two_types_show_each_type_s_takt_beside_its_own_target(line):
    line.document["boards"]["back"] = {"components": {"c1": 1}, "takt_s": 5}
    with line.served() as service:
        for serial in ("B1", "B2"):
            for component, board_type, ref in (("c0", "main", "R1"), ("c1", "main", "R2"), ("c1", "back", "R1")):
                asked(service, order_of(picture(), component=component, board=serial, board_type=board_type, ref=ref))
        until(lambda: not service.store.statistics().pending and len(line.boards) == 4)
        shift = state(Web(service))["shift"]
    targets = [(each["board_type"], each["takt_target_s"]) for each in shift["takts"]]
    assert targets == [("back", 5), ("main", 3600)], "that of the newest board first"
    assert all(0 <= each["takt_s"] < PATIENCE_S for each in shift["takts"])
    assert (shift["takt_s"], shift["takt_target_s"]) == (shift["takts"][0]["takt_s"], 5)


def test_unchanged_state_is_answered_without_a_body(line):
    with line.served() as service:
        web = Web(service)
        state(web)  # a first look knows no rates
        _, headers, _ = web("/api/state")
        status, again, body = web("/api/state", if_none_match=f'"other", {headers["etag"]}')
        assert (status, again["etag"], body) == (304, headers["etag"], b"")
        asked(service, order_of(picture(), component="c0", board="B2", ref="R1"))
        until(lambda: web("/api/state", if_none_match=headers["etag"])[0] == 200)
        assert state(web)["boards"][0]["serial"] == "B2"


def test_raised_alarm_is_shown_with_its_number_and_time(line, monkeypatch):
    monkeypatch.setattr("agent.service.alarms.RAISED_S", 0.0)
    (line.folder / "f1.yaml").write_text("weight_bytes: -1")
    with line.served() as service:
        (alarm,) = until(lambda: [each for each in state(Web(service))["alarms"] if each["number"]])
    assert (alarm["number"], alarm["name"]) == (1, "expert/cls/f1")
    assert datetime.fromisoformat(alarm["raised_at"]).utcoffset() is not None


def test_state_distinguishes_idle_failing_and_judging_lines(line):
    with line.served() as service:
        web = Web(service)
        assert state(web)["judging"] == {"state": "IDLE", "reason": None}
        with line.full_disk():
            service.desk.order(order_of(picture(), component="c0"), _NoListener())
            until(lambda: state(web)["judging"]["state"] == "FAILING")
            assert state(web)["judging"]["reason"] == "results are not stored: database is locked"
            until(lambda: [alarm["name"] for alarm in state(web)["alarms"]] == ["store"])
        until(lambda: state(web)["judging"]["state"] == "JUDGING")


@pytest.mark.slow
def test_stopping_line_reports_itself_as_stopped_to_its_end(line):
    line.fake(0, B_s=2.0)
    said = []
    with line.served() as service:
        web = Web(service)

        def look():
            with suppress(OSError, http.client.HTTPException), closing(web.connection()) as caller:
                while True:
                    caller.request("GET", "/api/state")
                    said.append(json.loads(caller.getresponse().read())["state"]["judging"]["state"])

        looking = threading.Thread(target=look)
        service.desk.order(order_of(picture(), component="c0"), _NoListener())
        until(lambda: state(web)["executors"][0]["running"])
        looking.start()
    looking.join(PATIENCE_S)
    assert "STOPPED" in said


def test_vanished_results_disk_is_reported_and_earlier_counts_stay(line):
    with line.served() as service:
        web = Web(service, "operator")
        asked(service, order_of(picture(), component="c0", board="B2", ref="R1"))
        until(lambda: state(web)["shift"]["verdicts"]["OK"] == 1)
        (line.folder / "state").rename(line.folder / "away")
        assert web.error("/api/results", status=503)["message"].startswith("results cannot be read")
        order = order_of(picture(), component="c0", board="B2", ref="R2")
        service.desk.order(order, _NoListener())
        until(lambda: state(web)["judging"]["state"] == "FAILING")
        assert state(web)["shift"]["verdicts"]["OK"] == 1
        (line.folder / "away").rename(line.folder / "state")
        until(lambda: state(web)["judging"]["state"] == "JUDGING")
        until(lambda: state(web)["shift"]["verdicts"]["OK"] == 2)


class _NoListener:
    def accepted(self): ...

    def judged(self, parts): ...

    def refused(self, refusal): ...


def test_results_are_filtered_and_come_in_pages(busy):
    web = Web(busy[0])
    everything = web.json("/api/results")
    seqs = [one["seq"] for one in everything["results"]]
    assert (seqs, everything["next"]) == ([5, 4, 3, 2, 1], None)
    pages, before = [], ""
    while before is not None:
        page = web.json(f"/api/results?limit=2{before and f'&before={before}'}")
        pages.append([one["seq"] for one in page["results"]])
        before = page["next"]
    assert pages == [[5, 4], [3, 2], [1]]
    folder = str(busy[1].inbox)
    for query, count in {
        "verdict=NG": 3, "component=c1": 2, "expert=cls/f0": 3, "label=bad": 3, "board=F1": 2, "source=api": 3,
        f"source={folder}": 2, "since=2026-01-01T00:00:00Z": 5, "until=2026-01-01T00:00:00%2B02:00": 0,
        "reviewed=false": 5, "finding=agree": 0, "verdict=NG&component=c1": 0,
    }.items():  # fmt: skip
        assert len(web.json(f"/api/results?{query}")["results"]) == count, query


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("limit=0", "limit"), ("limit=201", "limit"), ("limit=1_0", "limit"), ("limit=1&limit=2", "limit"),
        ("before=x", "before"), ("verdict=ok", "verdict"), ("reviewed=1", "reviewed"), ("sinse=2026", "sinse"),
        ("since=2026-01-01", "since"), ("since=2026-01-01T00:00:00", "since"), ("since=2026-13-01T00:00:00Z", "since"),
        ("since=0001-01-01T00:00:00%2B23:59", "since"), ("until=9999-12-31T23:59:59-23:59", "until"),
        ("component=", "component"), (f"label={'x' * 201}", "label"),
    ],
)  # fmt: skip
def test_wrong_parameter_is_refused_by_name(busy, query, field):
    error = Web(busy[0]).error(f"/api/results?{query}")
    assert (error["reason"], error["field"]) == ("INVALID", field)


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("limit=1000", "200 at most - ask for the next one with before="),
        ("since=2026-11-28T06:00:00+02:00", "its + as a space: write %2B"),
        ("since=2026-11-28T06:00:00", "is no time with its offset"),
    ],
)
def test_mistyped_parameter_is_refused_with_the_right_form(busy, query, says):
    assert says in Web(busy[0]).error(f"/api/results?{query}")["message"]


def test_page_of_a_result_shows_its_steps_course_and_image(busy):
    web = Web(busy[0])
    (of_folder,) = web.json("/api/results?board=S1&component=c0")["results"]
    found = web.json(f"/api/results/{of_folder['seq']}")
    assert [(step["expert"], step["label"], step["boxes"]) for step in found["steps"]] == [("cls/f0", "bad", [])]
    assert (found["size"], found["box"], found["has_image"], found["reviews"]) == ([8, 8], None, True, [])
    assert [step["expert"] for step in found["timeline"]["steps"]] == ["cls/f0"]
    (quick,) = web.json("/api/results?board=S1&component=c1")["results"]  # its course is only remembered
    assert [step["expert"] for step in web.json(f"/api/results/{quick['seq']}")["timeline"]["steps"]] == ["cls/f1"]
    assert web.error("/api/results/99", status=404) == {
        "reason": "NOT_FOUND", "message": "no result 99", "field": "seq",
    }  # fmt: skip
    assert web.error("/api/results/x")["field"] == "seq"


def shown(web, path):
    status, headers, content = web(path)
    assert status == 200, content
    assert headers["content-type"] in {"image/png", "image/jpeg"}
    return Image.open(io.BytesIO(content))


def test_images_are_shown_cut_whole_and_small(busy):
    web = Web(busy[0])
    (of_folder,) = web.json("/api/results?board=S1&component=c0")["results"]
    assert shown(web, f"/api/results/{of_folder['seq']}/image").getpixel((0, 0)) == (10, 200, 30)
    (part,) = web.json("/api/results?board=F1&component=c1")["results"]
    cut = shown(web, f"/api/results/{part['seq']}/image")
    assert (cut.size, cut.getpixel((0, 0))) == ((16, 16), (200, 200, 200))
    assert shown(web, f"/api/results/{part['seq']}/frame").size == (32, 16)
    assert shown(web, f"/api/results/{part['seq']}/frame?width=16").size == (16, 8)
    for _ in range(2):
        assert shown(web, f"/api/results/{part['seq']}/thumbnail").size == (16, 16)
    assert web.error(f"/api/results/{part['seq']}/image?width=9999")["field"] == "width"
    assert web.error(f"/api/results/{part['seq']}/maps/0", status=404)["field"] == "step"


def test_image_is_turned_by_its_exif_or_refused_with_the_reason(line):
    line.watch()
    turned = io.BytesIO()
    stored = Image.new("RGB", (8, 4), (250, 0, 0))
    exif = Image.Exif()
    exif[0x0112] = 6
    stored.save(turned, "JPEG", exif=exif)
    with line.served() as service:
        web = Web(service)
        line.drop("S1_c0_R1.png", turned.getvalue())
        until(lambda: line.shelf("done") + line.shelf("ng") + line.shelf("failed"))
        assert shown(web, "/api/results/1/image").size == (4, 8)
        assert web.json("/api/results/1")["size"] == [8, 4]
        (file,) = [each for each in line.inbox.rglob("S1_*") if each.is_file()]
        claimed = line.inbox / ".work" / "agent" / f"{web.json('/api/results/1')['key'].rpartition('@')[2]}~{file.name}"
        claimed.parent.mkdir(parents=True)
        file.rename(claimed)  # as it is until it is put away
        assert shown(web, "/api/results/1/image").size == (4, 8)
        claimed.unlink()
        assert "no longer there" in web.error("/api/results/1/image", status=404)["message"]
        assert web.json("/api/results/1")["size"] is None


def test_pictures_that_take_long_keep_no_question_waiting(busy, monkeypatch):
    goes_on, web = threading.Event(), Web(busy[0])
    monkeypatch.setattr("agent.service.station.pictures.decode_image", lambda *_, **__: goes_on.wait(PATIENCE_S))
    monkeypatch.setattr("agent.service.station.pictures.PATIENCE_S", PATIENCE_S)
    (seq, *_) = [one["seq"] for one in web.json("/api/results?board=S1")["results"]]
    with ThreadPoolExecutor(8) as pool:
        shown = [pool.submit(web, f"/api/results/{seq}/image?width={width}") for width in range(100, 108)]
        until(lambda: web.json("/api/results?board=S1") and web.json(f"/api/results/{seq}")["size"] == [8, 8])
        assert not any(each.done() for each in shown)
        goes_on.set()


def test_picture_that_no_caller_waits_for_is_not_made(busy, monkeypatch):
    begun, goes_on = [], threading.Event()

    def hanging(*_):
        begun.append(None)
        goes_on.wait(PATIENCE_S)
        raise OSError("the share is gone")

    config = busy[0].inspector.agent.config
    pictures, row = Pictures(lambda: config), result(seq=1)
    monkeypatch.setattr("agent.service.station.pictures.image_file", hanging)
    monkeypatch.setattr("agent.service.station.pictures.PATIENCE_S", 0.01)
    for _ in range(3):
        with pytest.raises(OrderRefused, match=r"busy|has not answered"):
            pictures.frame(row, None)
    monkeypatch.setattr("agent.service.station.pictures.PATIENCE_S", PATIENCE_S)
    goes_on.set()
    with pytest.raises(OrderRefused, match="the share is gone"):
        pictures.frame(row, None)
    pictures.stop()
    assert len(begun) == 2


def test_hanging_share_delays_no_image_of_another_place(busy, monkeypatch):
    """Eight pictures of the folder are asked for, which is twice the threads; kept images are on another disk."""
    goes_on, web, real = threading.Event(), Web(busy[0]), pictures_module.image_file

    def hanging(config, key, *about):
        kept = about[1]
        return real(config, key, *about) if kept is not None else goes_on.wait(PATIENCE_S) and None

    monkeypatch.setattr(pictures_module, "image_file", hanging)
    monkeypatch.setattr(pictures_module, "SIZE_S", 0.05)
    (seq, *_) = [one["seq"] for one in web.json("/api/results?board=S1")["results"]]
    (kept,) = [one["seq"] for one in web.json("/api/results?board=B2")["results"]]
    with ThreadPoolExecutor(8) as pool:
        shares = [pool.submit(web, f"/api/results/{seq}/image?width={width}") for width in range(200, 208)]
        assert shown(web, f"/api/results/{kept}/image").size == (8, 8)
        assert web.json(f"/api/results/{seq}")["size"] is None
        assert {each.result()[0] for each in shares} == {503}
    goes_on.set()


def test_page_of_a_board_shows_its_parts_and_its_frame(busy):
    web = Web(busy[0])
    page = web.json("/api/boards")
    assert [(board["number"], board["serial"]) for board in page["boards"]] == [(2, "F1"), (1, "S1")]
    assert [board["number"] for board in web.json("/api/boards?serial=S1&verdict=NG")["boards"]] == [1]
    framed, plain = web.json("/api/boards/2"), web.json("/api/boards/1")
    assert [(part["ref"], part["box"]) for part in framed["parts"]] == [("R1", [0, 0, 16, 16]), ("R2", [16, 0, 32, 16])]
    assert (framed["size"], plain["size"], plain["frame"]) == ([16, 32], None, None)
    assert shown(web, f"/api/results/{framed['frame']}/frame").size == (32, 16)
    assert web.error("/api/boards/99", status=404)["field"] == "number"


def test_review_is_shown_beside_the_verdict_counted_and_undone(line):
    line.fake(0, label="bad")
    with line.served() as service:
        asked(service, order_of(picture(), component="c0", board="B2", ref="R1"))
        web, reader = Web(service, "operator"), Web(service)
        made = web.json("/api/reviews", {"result": 1, "verdict": "OK", "reason": "dust"}, 201)
        assert (made["finding"], made["who"], made["reason"]) == ("false_call", "operator", "dust")
        found = reader.json("/api/results/1")
        assert (found["verdict"], found["review"], found["reviews"]) == ("NG", made, [made])
        until(lambda: state(reader)["shift"]["reviews"]["false_call"] == 1)
        assert state(reader)["cases"][0]["review"] == made
        assert reader.json("/api/reviews?who=operator")["reviews"] == [made]
        assert reader.json("/api/expert?id=cls/f0")["reviews"]["false_call"] == 1
        for wrong in (
            ("/api/reviews", {"result": 1, "verdict": "NG", "file": "0"}),
            (f"/api/reviews/{made['number']}?file=0",),
        ):
            method = "POST" if wrong[1:] else "DELETE"
            assert web.error(*wrong, status=409, method=method)["field"] == "file"
        undone = web.json(f"/api/reviews/{made['number']}?file={found['file']}", method="DELETE")
        assert undone["undone_by"] == "operator"
        assert reader.json("/api/results/1")["review"] is None
        until(lambda: state(reader)["shift"]["reviews"]["false_call"] == 0)
        assert web.error("/api/reviews", {"result": 99, "verdict": "OK"}, 404)["field"] == "result"
        assert web.error("/api/reviews", {"result": 1, "verdict": "OK", "reason": "\ud800"})["field"] == "body"
        strange = {"verdict": "UNKNOWN", "label": "x" * 201, "reason": "x" * 2001}
        for field, given in (*strange.items(), ("result", "1"), ("result", 2**63)):
            assert web.error("/api/reviews", {"result": 1, "verdict": "OK"} | {field: given})["field"] == field


def test_changes_and_refused_changes_are_audited_with_caller_and_role(line):
    with line.served() as service:
        asked(service, order_of(picture(), component="c0", board="B2", ref="R1"))
        operator = Web(service, "operator")
        operator.json("/api/reviews", {"result": 1, "verdict": "NG"}, 201)
        operator.error("/api/trigger", {"camera": "none"}, 404)

        def rows():
            return operator.json("/api/audit")["entries"]

        until(lambda: len(rows()) == 2)
        told = [(row["who"], row["role"], row["action"], row["subject"]) for row in rows()]
        assert told == [
            ("operator", "operate", "trigger", "camera none"),
            ("operator", "operate", "review", "result 1, verdict NG"),
        ]  # fmt: skip
        assert [row["outcome"].partition(":")[0] for row in rows()] == ["NOT_FOUND", "done"]


def test_caller_with_a_reader_token_or_none_changes_nothing(line):
    changes = {
        "POST /api/reviews": {"result": 1, "verdict": "OK"},
        "DELETE /api/reviews/1": None,
        "POST /api/boards/rework": {"serial": "B2", "board_type": "main"},
        "POST /api/trigger": {"camera": "top"},
        "POST /api/line/check": {"text": ""},
        "POST /api/reload": None,
        "POST /api/experts/promote": PROMOTED,
        "GET /api/line": None,
        "GET /api/audit": None,
    }
    with line.served() as service:
        for where, body in changes.items():
            method, path = where.split()
            assert Web(service, "watcher").error(path, body, 403, method=method)["reason"] == "FORBIDDEN"
            assert Web(service).error(path, body, 401, method=method)["reason"] == "UNAUTHENTICATED"
        for path, body in (("/api/reload", None), ("/api/experts/promote", PROMOTED)):
            assert Web(service, "operator").error(path, body, 403, method="POST")["reason"] == "FORBIDDEN"


def test_reworked_board_shows_its_requester(line):
    line.watch()
    with line.served() as service:
        web = Web(service, "operator")
        for name in ("S1_c0_R1.png", "S1_c1_R2.png"):
            line.drop(name)
        until(lambda: line.boards)
        made = web.json("/api/boards/rework", {"serial": "S1", "board_type": "main", "reason": "resoldered"}, 201)
        assert (made["who"], made["reason"]) == ("operator", "resoldered")
        assert web.json("/api/boards/1")["reworks"] == [made]


def test_page_of_a_board_shows_its_stored_run_without_the_open_one(line):
    with line.served() as service:
        web = Web(service, "operator")
        for component, ref in (("c0", "R1"), ("c1", "R2")):
            asked(service, order_of(picture(), component=component, board="S1", ref=ref))
        until(lambda: line.boards)
        web.json("/api/boards/rework", {"serial": "S1", "board_type": "main"}, 201)
        asked(service, order_of(picture(), component="c0", board="S1", ref="R1"))
        until(lambda: [board["number"] for board in state(web)["boards"]] == [None, 1])
        page = web.json("/api/boards/1")
    assert [part["ref"] for part in page["parts"]] == ["R1", "R2"]
    assert not page["is_cut"]


def test_line_file_is_shown_checked_and_reloaded(line):
    with line.served() as service:
        web = Web(service, "master")
        shown_line = web.json("/api/line")
        assert (shown_line["is_served"], shown_line["file"]) == (True, str(line.folder / "line.yaml"))
        assert web.json("/api/line/check", {"text": shown_line["text"]})["problems"] == []
        (problem,) = web.json("/api/line/check", {"text": shown_line["text"] + "\nnonsense: 1\n"})["problems"]
        assert problem["key"] == "nonsense"
        assert problem["line"] > 10
        line.add_expert(2)
        (line.folder / "line.yaml").write_bytes(line.config.document.content)
        assert web.json("/api/line")["is_served"] is False
        assert web.json("/api/reload", method="POST")["added"] == ["cls/f2"]
        assert [each["id"] for each in web.json("/api/experts")["experts"]] == ["cls/f0", "cls/f1", "cls/f2"]


def test_check_that_waits_for_a_file_delays_no_review(line):
    pipes = [line.folder / f"f{number}.onnx" for number in range(2)]
    with line.served() as service, ThreadPoolExecutor(1) as pool:
        asked(service, order_of(picture(), component="c0", key="k"))
        web, given = Web(service, "operator"), line.config.document.values
        for number, pipe in enumerate(pipes):
            os.mkfifo(pipe)
            given["experts"][f"cls/f{number}"] |= {"architecture": "onnx", "weights": str(pipe)}
        checked = pool.submit(web.json, "/api/line/check", {"text": json.dumps(given)})
        until(lambda: let_go(pipes[0]))
        web.json("/api/reviews", {"result": 1, "verdict": "NG"}, 201)
        assert not checked.done()
        until(lambda: let_go(*pipes) is None and checked.done())
        assert checked.result()["problems"]


def let_go(*pipes):
    """End what waits for a pipe's bytes; None without one."""
    for pipe in pipes:
        with suppress(OSError):
            os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
            return pipe
    return None


def test_experts_executors_texts_and_reasons_are_shown(busy):
    web = Web(busy[0])
    found = web.json("/api/expert?id=cls/f0")
    assert (found["components"], found["memories"], found["seen"]["images"]) == (["c0"], ["host"], 3)
    assert found["latency"]["cpu"]["one_s"] > 0
    assert found["drift"] == pytest.approx(found["usage_seen"] - found["usage_profiled"])
    engine = web.json("/api/engine?last=600")
    assert sum(span[3] for span in engine["executors"][0]["spans"]) == 5
    assert all(begin <= end <= 0 for begin, end, *_ in engine["executors"][0]["spans"])
    assert {held["id"] for held in engine["memories"][0]["experts"]} == {"cls/f0", "cls/f1"}
    assert web.json("/api/texts")["models"] == []
    explained = web.json("/api/explain?subject=1")
    assert explained["sentences"]
    assert web.error("/api/explain?subject=nobody", status=404)["reason"] == "NOT_FOUND"
    assert web.error("/api/expert?id=cls/none", status=404)["field"] == "id"


def test_text_under_way_is_shown_with_its_expert(text_line):
    with with_door(text_line).served() as service:
        web, reader = Web(service), Held()
        service.desk.generate(TextOrder("llm/code", "the quick fox", most_tokens=4, sampling=GREEDY), reader)
        until(lambda: reader.pieces)
        (row,) = web.json("/api/texts")["under_way"]
        assert (row["number"], row["model"], row["expert"]) == (1, "llm/code", "llm/code")
        assert row["read_tokens"] > 0
        assert row["waited_s"] > 0
        assert state(web)["texts"]["under_way"] == 1
        reader.may_go_on.set()
        reader.wait()
        until(lambda: (texts := state(web)["texts"])["ended"] == 1 and texts["under_way"] == 0)
        told = web.json("/api/texts")
        assert (told["under_way"], told["first_token_s"] > 0) == ([], True)
        assert {model["name"] for model in told["models"] if not model["is_ready"]} == {"llm/mute"}


def test_trace_is_sent_as_a_file_that_browsers_do_not_cache(busy):
    status, headers, content = Web(busy[0])("/api/trace?last=600")
    assert (status, headers["content-type"], headers["cache-control"]) == (200, "application/json", "no-store")
    assert len(content) > 100


def test_anomaly_map_of_a_result_is_shown_in_heat_colours(line):
    map_ = AnomalyMap(2, 2, 0.0, 1.0, bytes((0, 85, 170, 255)))
    with line.served() as service:
        anomaly = {"score": 1.0, "threshold": 0.5}
        step = Step("look/x", "anomalous", 1.0, anomaly=AnomalyScore(**anomaly))
        found = result("api/k", Verdict.NG, component="c0", steps=(step,), maps=(KeptMap(0, "look/x", map_png(map_)),))
        service.store.record(found)
        web = Web(service)
        until(lambda: web.json("/api/results")["results"])
        (row,) = web.json("/api/results")["results"]
        assert (row["has_maps"], row["has_image"]) == (True, False)
        (told,) = web.json("/api/results/1")["steps"]
        assert told["anomaly"] == anomaly | {"has_map": True}
        heat = shown(web, "/api/results/1/maps/0")
        opacity = [heat.getpixel((x, y))[3] for y in (0, 1) for x in (0, 1)]
        assert opacity == sorted(opacity)
        assert (opacity[0], opacity[-1]) == (0, 166)
