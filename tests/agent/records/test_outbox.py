"""The outbox: written with what it tells of, one message a receiver and event, bounded, with ids that stay."""

import json
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from agent.records.boards import BoardVerdict
from agent.records.outbox import Outbox, OutboxReader
from agent.records.result_reader import ResultReader
from agent.records.result_writer import ResultStore
from agent.records.verdict import Result, Step
from experts.expert import BoundingBox, Verdict
from tests.lines import NOON, changed, result
from tests.waiting import until

BURR = BoundingBox("burr", 0.5, 1.0, 2.0, 3.0, 4)
STEPS = (
    Step("cls/a", "ok", 0.9, model_sha256="c1" * 32),
    Step("det/a", "burr", 0.5, (BURR,), "d1" * 32),
)
MODELS = [{"expert": "cls/a", "sha256": "c1" * 32}, {"expert": "det/a", "sha256": "d1" * 32}]
RESULT = result(
    "k1", Verdict.NG, component="r0402", image="1.png", finished_at=NOON + timedelta(seconds=1), seconds=1.0,
    board="B1", board_type="main", ref="R1", label="burr", score=0.5, reason="a burr", experts=("cls/a", "det/a"),
    steps=STEPS, kept_as="2026-05-01/1.png",
)  # fmt: skip
BOARD = BoardVerdict("B1", "main", Verdict.NG, NOON, NOON + timedelta(seconds=9), {"c": 1}, {Verdict.NG: 1})
EVENTS = ("board", "ng", "result")


def recorded(file, outbox, *told):
    with closing(ResultStore(file, followers=[outbox])) as store:
        for each in told:
            store.record(each) if isinstance(each, Result) else store.record_board(each)
    return OutboxReader(file)


def payloads(reader, receiver="mqtt"):
    return [json.loads(message.payload) for message in reader.waiting(receiver, 1000)]


def numbered(number, verdict=Verdict.NG):
    return changed(RESULT, key=f"k{number}", verdict=verdict)


def test_message_of_an_image_has_every_field(tmp_path):
    reader = recorded(tmp_path / "r.db", Outbox("demo", ["mqtt"], ["ng"], 10), RESULT)
    (message,) = reader.waiting("mqtt", 10)
    told = json.loads(message.payload)
    for name in ("arrived_at", "finished_at"):
        at = datetime.fromisoformat(told.pop(name))
        assert at == getattr(RESULT.subject if name == "arrived_at" else RESULT, name)
    assert told == {
        "schema": 1, "id": message.id, "event": "ng", "line": "demo", "seq": 1, "board_serial": "B1",
        "board_type": "main", "ref": "R1", "component": "r0402", "verdict": "NG", "label": "burr", "score": 0.5,
        "reason": "a burr", "experts": ["cls/a", "det/a"], "image": "1.png", "kept_as": "2026-05-01/1.png",
        "boxes": [
            {"expert": "det/a", "label": "burr", "score": 0.5, "left": 1.0, "top": 2.0, "right": 3.0, "bottom": 4}
        ],
        "boxes_total": 1, "seconds": 1.0, "config_sha256": "ab", "models": MODELS, "unproven": False,
    }  # fmt: skip
    assert (message.event, message.board) == ("ng", "B1")


def test_message_of_an_image_with_many_boxes_has_the_first_and_their_number(tmp_path):
    boxes = tuple(replace(BURR, left=float(number)) for number in range(1000))
    many = changed(RESULT, steps=(Step("det/a", boxes=boxes),))
    reader = recorded(tmp_path / "r.db", Outbox("demo", ["mqtt"], ["ng"], 10, most_boxes=200), many)
    (told,) = payloads(reader)
    assert (told["boxes_total"], [box["left"] for box in told["boxes"]]) == (1000, [float(n) for n in range(200)])


def test_message_of_a_board_has_its_takt_and_missing_parts_also_in_a_revision(tmp_path):
    later = replace(BOARD, serial="B2", closed_at=BOARD.closed_at + timedelta(seconds=7), takt_s=7.0)
    worse = replace(later, verdict=Verdict.UNKNOWN, takt_s=None)
    other = replace(BOARD, serial="B3", board_type="back", closed_at=BOARD.closed_at + timedelta(seconds=8))
    reader = recorded(tmp_path / "r.db", Outbox("demo", ["mqtt"], ["board"], 10), RESULT, BOARD, later, other, worse)
    first, second, third, revised = payloads(reader)
    assert [each["takt_s"] for each in (first, second, third, revised)] == [None, 7.0, None, 7.0]
    assert (revised["verdict"], revised["revision"], revised["is_revision"]) == ("UNKNOWN", 1, True)
    assert revised["id"] != second["id"]
    assert (first["missing"], first["counts"], first["verdict"]) == ({"c": 1}, {"NG": 1}, "NG")
    assert (first["revision"], first["is_revision"], first["config_sha256"]) == (0, False, "ab")
    assert first["models"] == MODELS
    assert (second["config_sha256"], second["models"]) == (None, []), "no image of this board was judged"
    assert datetime.fromisoformat(str(first["closed_at"])) == BOARD.closed_at
    assert datetime.fromisoformat(str(first["opened_at"])) == BOARD.opened_at
    rows = {row.serial: row.takt_s for row in ResultReader(tmp_path / "r.db").boards()}
    assert rows == {"B1": None, "B2": 7.0, "B3": None}


@pytest.mark.parametrize("score", [0.5, float("nan")])
def test_message_of_an_image_or_board_says_that_an_unproven_expert_judged(tmp_path, score):
    steps = STEPS[0], replace(STEPS[1], unproven=True, score=score)
    told = changed(RESULT, key="k0", steps=steps), RESULT, BOARD, replace(BOARD, serial="B2")
    reader = recorded(tmp_path / "r.db", Outbox("demo", ["mqtt"], ["result", "board"], 10), *told)
    assert [each["unproven"] for each in payloads(reader)] == [True, False, True, False]
    assert payloads(reader)[2]["models"] == MODELS


def judged_by(key, at_s, sha256, **changes):
    steps = (Step("cls/a", "ok", 0.9, model_sha256=sha256),)
    return changed(RESULT, key=key, finished_at=NOON + timedelta(seconds=at_s), steps=steps, **changes)


def test_message_of_a_board_names_every_model_of_its_run(tmp_path):
    """Of a model that was replaced meanwhile both; of an earlier run of the serial, and of other boards, none."""
    before = judged_by("before", -60, "00" * 32)
    elsewhere = [judged_by("type", 1, "01" * 32, board_type="back"), judged_by("serial", 1, "02" * 32, board="B2")]
    first = judged_by("first", 0, "a1" * 32)
    again, replaced = judged_by("again", 1, "a1" * 32), judged_by("replaced", 2, "a2" * 32, config_sha256="cd")
    told = [before, *elsewhere, first, again, replaced, judged_by("set back", -3600, None), BOARD]
    (message,) = payloads(recorded(tmp_path / "r.db", Outbox("demo", ["mqtt"], ["board"], 10), *told))
    assert message["models"] == [{"expert": "cls/a", "sha256": sha256} for sha256 in ("a1" * 32, "a2" * 32, None)]
    assert message["config_sha256"] == "ab", "that of the latest"


@pytest.mark.parametrize(
    ("events", "told"),
    [
        (["ng"], ["ng", "ng"]), (["result"], ["result"] * 3),
        (["ng", "result"], ["result", "ng", "result", "ng", "result"]), (["board"], ["board"]),
    ],
)  # fmt: skip
def test_only_the_configured_events_are_sent(tmp_path, events, told):
    results = [numbered(1, Verdict.OK), numbered(2, Verdict.NG), numbered(3, Verdict.UNKNOWN)]
    reader = recorded(tmp_path / "r.db", Outbox("demo", ["mqtt"], events, 10), *results, BOARD)
    assert [message.event for message in reader.waiting("mqtt", 10)] == told


def test_receivers_have_separate_queues_and_a_result_stored_twice_is_sent_once(tmp_path):
    outbox = Outbox("demo", ["mqtt", "webhook"], EVENTS, 10)
    reader = recorded(tmp_path / "r.db", outbox, RESULT, RESULT, BOARD, BOARD)
    for receiver in ("mqtt", "webhook"):
        assert [each["event"] for each in payloads(reader, receiver)] == ["ng", "result", "board"]
    assert reader.standing("mqtt").waiting == 3
    assert payloads(reader) == payloads(reader, "webhook"), "one fact has one id, whoever is told"
    anew = recorded(tmp_path / "after the file was moved away.db", outbox, RESULT, BOARD)
    assert len({each["id"] for each in payloads(reader) + payloads(anew)}) == 6, "a receiver drops no new fact"


def test_full_outbox_of_a_receiver_drops_its_oldest_messages(tmp_path):
    outbox = Outbox("demo", ["mqtt"], ["ng"], 3)
    told = *(numbered(each) for each in range(9)), changed(RESULT, key="bare", component=None)
    reader = recorded(tmp_path / "r.db", outbox, *told)
    assert [(each["seq"], each["component"]) for each in payloads(reader)] == [(8, "r0402"), (9, "r0402"), (10, "")]
    assert (reader.standing("mqtt").waiting, reader.standing("mqtt").given_way) == (3, 7)


def test_messages_of_a_receiver_no_longer_configured_are_dropped(tmp_path):
    outbox = Outbox("demo", ["mqtt", "other", "webhook"], ["ng"], 10)
    recorded(tmp_path / "r.db", outbox, *(numbered(n) for n in range(5)))
    told = []
    with closing(ResultStore(tmp_path / "r.db")) as store:
        store.write(Outbox("demo", ["webhook"], ["ng"], 2).begin, told.append)
    reader = OutboxReader(tmp_path / "r.db")
    assert (told, payloads(reader)) == ([10], [])
    assert [each["seq"] for each in payloads(reader, "webhook")] == [4, 5], "a limit that was lowered holds at once"


def test_pump_is_woken_once_after_a_commit_with_new_messages(tmp_path):
    outbox = Outbox("demo", ["mqtt"], EVENTS, 10)
    woken = []
    outbox.when_committed(lambda: woken.append(OutboxReader(tmp_path / "r.db").standing("mqtt").waiting))
    recorded(tmp_path / "r.db", outbox, RESULT, RESULT)
    assert woken == [2], "once, and after the commit"


CRASH = """
import sys
from pathlib import Path
from agent.records.outbox import Outbox
from agent.records.result_writer import ResultStore
from tests.lines import result
store = ResultStore(Path(sys.argv[1]), followers=[Outbox("demo", ["mqtt"], ["result"], 100000)])
number = 0
while True:
    store.record(result(f"k{number}"), lambda recorded: print(recorded.seq, flush=True))
    number += 1
    while store.statistics().pending > 50:
        pass
"""


@pytest.mark.parametrize("reported", [1, 333])
def test_killed_writer_keeps_every_reported_result_and_a_message_for_each(tmp_path, forks, reported):
    """What is stored is told, and what is told is stored, whenever the process ends."""
    process = forks.start(CRASH, tmp_path / "r.db")
    until(lambda: process.report.count("\n") > reported)
    process.kill()
    lines = process.wait(60.0).stdout.splitlines(keepends=True)
    seqs = [row.seq for row in ResultReader(tmp_path / "r.db").query()]
    told = [json.loads(message.payload)["seq"] for message in OutboxReader(tmp_path / "r.db").waiting("mqtt", 10**6)]
    assert reported <= len([line for line in lines if line.endswith("\n")]) <= len(seqs)
    assert seqs == list(range(1, len(seqs) + 1))
    assert {int(line) for line in lines if line.endswith("\n")} <= set(seqs)
    assert (told, OutboxReader(tmp_path / "r.db").standing("mqtt").waiting) == (seqs, len(seqs))
