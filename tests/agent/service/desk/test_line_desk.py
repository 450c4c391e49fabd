"""The desk of a served line: what callers order, ask, cancel, and what of it survives the agent's end."""

from __future__ import annotations

import hashlib
import signal
import sqlite3
import threading
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace

import numpy as np
import pytest

from agent.records.journal import JournalReader
from agent.records.result_writer import ResultStore
from agent.subject import asked_sha256
from experts.errors import OrderRefused, Refusing
from experts.expert import Verdict
from tests.lines import order as order_of

OK, NG, UNKNOWN = Verdict.OK, Verdict.NG, Verdict.UNKNOWN


def asked(service, caller, *orders):
    """The answers to these orders, given together."""
    callers = [caller() for _ in orders]
    for order, each in zip(orders, callers, strict=True):
        service.desk.order(order, each)
    return [each.wait() for each in callers]


@contextmanager
def full_disk(line):
    """Nothing can be committed meanwhile."""
    with closing(sqlite3.connect(line.folder / "state" / "results.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


def test_a_kept_order_is_accepted_judged_stored_and_counts_on_its_board(desk_line, caller, png):
    with desk_line.served() as service:
        someone = caller()
        service.desk.order(order_of(png(), component="c0", board="B1", ref="R1", key="mine"), someone)
        (part,) = someone.wait()
        assert someone.was_accepted.is_set()
        assert (part.subject.key, part.verdict, part.seq, part.experts) == ("api/mine", OK, 1, ("cls/f0",))
        (board,) = service.desk.boards("B1")
        assert (board.verdict, dict(board.missing)) == (None, {"c1": 1})
        asked(service, caller, order_of(png(), component="c1", board="B1", ref="R2"))
        (board,) = service.desk.boards("B1")
        assert (board.verdict, dict(board.missing), len(board.parts)) == (OK, {}, 2)
    first = next(desk_line.results.query()).result
    assert (first.subject.key, first.subject.board) == ("api/mine", "B1")
    assert desk_line.unfinished == []


def test_nothing_is_accepted_before_it_is_on_the_disk(desk_line, caller, png):
    with desk_line.served() as service:
        someone = caller()
        with full_disk(desk_line):
            service.desk.order(order_of(png(), component="c0"), someone)
            assert not someone.was_accepted.wait(0.2)
            assert service.agent.loop.requests_in_flight == 0
        (part,) = someone.wait()
        assert part.verdict is OK


def test_a_question_is_answered_and_nothing_remains_of_it(desk_line, caller, png):
    with desk_line.served() as service:
        pixels = np.full((8, 8, 3), 99, np.uint8)
        answers = asked(
            service,
            caller,
            order_of(png(), component="c0", is_kept=False),
            order_of(pixels, component="c1", is_kept=False),
            order_of(pixels, expert="cls/f1", is_kept=False),
        )
        said = [(part.verdict, part.seq, part.label) for (part,) in answers]
        assert said == [(OK, None, "ok"), (OK, None, "ok"), (UNKNOWN, None, "ok")]
    assert list(desk_line.results.query()) == []


def test_pixels_are_kept_as_they_are(desk_line, caller):
    desk_line.fake(0, label=None)
    with desk_line.served() as service:
        pixels = np.full((8, 8, 3), (10, 200, 30), np.uint8)
        (kept,), (asked_only,) = asked(
            service, caller, order_of(pixels, component="c0"), order_of(pixels, component="c0", is_kept=False)
        )
        assert (kept.verdict, kept.label) == (asked_only.verdict, asked_only.label)


def test_one_key_is_judged_once_whoever_sends_it_how_often(desk_line, caller, png):
    desk_line.fake(0, B_s=0.2)
    with desk_line.served() as service:
        order = order_of(png(), component="c0", key="mine")
        together = asked(service, caller, order, order, order)
        (later,) = asked(service, caller, order)
        assert [part.seq for (part,) in (*together, later)] == [1, 1, 1, 1]
        assert [part.is_repeat for (part,) in (*together, later)] == [False, True, True, True]
        assert service.judged == 1


INSPECTION = {"component": "c0", "board": "B1", "ref": "R1"}


@pytest.mark.parametrize("state", ["under way", "stored", "after a restart"])
def test_a_key_that_stands_for_one_inspection_stands_for_no_other(desk_line, caller, png, batches, state):
    """A verdict that another image was given is nobody's: neither OK for a defective part, nor NG for a good one."""
    others = [
        order_of(png((200, 0, 0)), **INSPECTION, key="B1/R1"),
        order_of(np.full((8, 8, 3), (10, 200, 30), np.uint8), **INSPECTION, key="B1/R1"),
        *(order_of(png(), **(INSPECTION | {name: other}), key="B1/R1")
          for name, other in (("component", "c1"), ("board", "B2"), ("board", None), ("ref", "R2"))),
        order_of(png(), expert="cls/f0", board="B1", ref="R1", key="B1/R1"),
        order_of(png(size=(32, 16)), board="B1", key="B1/R1"),
    ]  # fmt: skip
    first = order_of(png(), **INSPECTION, key="B1/R1")
    desk_line.document["api"] = {"limits": {"requests": 3}}  # what a refusal kept of them would be missed
    with ExitStack() as ending:
        service = ending.enter_context(desk_line.served())
        if state == "under way":
            batches.clear()
        someone = caller()
        service.desk.order(first, someone)
        assert someone.was_accepted.wait(60)
        if state == "stored":
            someone.wait()
        elif state == "after a restart":
            someone.wait()
            ending.close()
            service = ending.enter_context(desk_line.served())
        for order in others:
            refused = caller()
            service.desk.order(order, refused)
            refused.wait()
            assert refused.refusal.reason is Refusing.KEY_REUSED
            assert "'B1/R1' was given for something else" in str(refused.refusal)
            assert (refused.answers, refused.parts, refused.was_accepted.is_set()) == (1, [], False)
        again = caller()
        service.desk.order(first, again)
        batches.set()
        (part,) = again.wait()
        assert (part.verdict, part.seq, part.is_repeat, again.refusal) == (OK, 1, True, None)
    assert [row.result.subject.key for row in desk_line.results.query()] == ["api/B1/R1"]
    assert desk_line.unfinished == []


def test_what_is_cancelled_before_it_ran_leaves_nothing_and_may_come_again(
    desk_line, caller, png, wait_until_so, batches
):
    desk_line.document["executors"] = {"cpu": 1}
    with desk_line.served() as service:
        batches.clear()
        running, queued = caller(), caller()
        service.desk.order(order_of(png(), component="c0", key="runs", is_kept=False), running)
        wait_until_so(lambda: any(queue.running for queue in service.desk.status().queues))
        for number in range(3):
            ticket = service.desk.order(
                order_of(png(), component="c0", key=f"queued {number}", board="B1", ref="R1"), queued
            )
            ticket.cancel()
            ticket.cancel()
        wait_until_so(lambda: not service.statistics().store.pending and not desk_line.unfinished)
        assert service.desk.status().requests_in_flight == 1
        batches.set()
        running.wait()
        assert queued.answers == 0
        assert service.judged == 0
        (part,) = asked(service, caller, order_of(png(), component="c0", key="queued 1", board="B1", ref="R1"))[0]
        assert (part.verdict, part.seq) == (OK, 1)


def test_what_is_cancelled_before_it_is_durable_never_runs_though_nothing_else_does(
    desk_line, caller, png, wait_until_so
):
    """AC17."""
    with desk_line.served() as service:
        with full_disk(desk_line):
            for number in range(20):
                order = order_of(png(), component="c0", key=str(number), board="B1", ref="R1")
                service.desk.order(order, caller()).cancel()
        wait_until_so(lambda: not service.statistics().store.pending and not desk_line.unfinished)
        assert service.judged == 0


def test_what_runs_when_it_is_cancelled_is_stored_where_it_belongs_to_a_board(desk_line, caller, png, wait_until_so):
    desk_line.fake(0, B_s=0.3)
    with desk_line.served() as service:
        someone = caller()
        ticket = service.desk.order(order_of(png(), component="c0", board="B1", ref="R1"), someone)
        wait_until_so(lambda: any(queue.running for queue in service.desk.status().queues))
        ticket.cancel()
        wait_until_so(lambda: service.judged == 1)
        assert someone.answers == 0
        assert [row.result.verdict for row in desk_line.results.query()] == [OK]


def test_who_waits_for_a_key_while_it_is_withdrawn_may_cancel_it_too(desk_line, caller, png, wait_until_so, batches):
    """The second one is journaled behind the first one's cancelling, and taken up anew under its own name."""
    desk_line.document["executors"] = {"cpu": 1}
    order = order_of(png(), component="c0", key="shared")
    with desk_line.served() as service:
        batches.clear()
        running, first, second = caller(), caller(), caller()
        service.desk.order(order_of(png(), component="c0", is_kept=False), running)
        wait_until_so(lambda: any(queue.running for queue in service.desk.status().queues))
        ticket = service.desk.order(order, first)
        wait_until_so(lambda: service.statistics().requests_in_flight == 2)
        with full_disk(desk_line):
            before = service.desk.order(order_of(png(), component="c0"), caller())  # the others wait behind it
            other = service.desk.order(order, second)
            ticket.cancel()
            wait_until_so(lambda: service.statistics().store.pending == 3)
        assert second.was_accepted.wait(60)
        wait_until_so(lambda: service.statistics().requests_in_flight == 3 and not service.statistics().store.pending)
        other.cancel()
        before.cancel()
        wait_until_so(lambda: service.statistics().requests_in_flight == 1)
        batches.set()
        running.wait()
        wait_until_so(lambda: not desk_line.unfinished)
        assert (first.answers, second.answers, service.judged) == (0, 0, 0)


def test_a_key_that_two_wait_for_is_judged_until_both_have_cancelled(desk_line, caller, png, wait_until_so):
    desk_line.fake(0, B_s=0.4)
    with desk_line.served() as service:
        first, one, other = caller(), caller(), caller()
        service.desk.order(order_of(png(), component="c0", is_kept=False), first)
        wait_until_so(lambda: any(queue.running for queue in service.desk.status().queues))
        order = order_of(png(), component="c0", key="shared")
        ticket = service.desk.order(order, one)
        service.desk.order(order, other)
        ticket.cancel()
        (part,) = other.wait()
        assert (part.verdict, one.answers) == (OK, 0)


def test_a_frame_is_cut_by_its_boards_layout_and_told_when_all_its_parts_are_judged(desk_line, caller, png):
    with desk_line.served() as service:
        order = order_of(png(size=(32, 16)), board="B7", key="frame")
        (parts,) = asked(service, caller, order)
        assert [(part.subject.key, part.subject.component, part.subject.ref) for part in parts] == [
            ("api/frame#R1", "c0", "R1"),
            ("api/frame#R2", "c1", "R2"),
        ]
        (board,) = service.desk.boards("B7", "main")
        assert board.verdict is OK
        assert asked(service, caller, order)[0] == [
            replace(part, queue_s=0.0, compute_s=0.0, is_repeat=True) for part in parts
        ]


def test_a_frame_of_another_size_than_its_layouts_is_refused(desk_line, caller, png):
    with desk_line.served() as service, pytest.raises(OrderRefused, match=r"8 x 8 pixels.*32 x 16") as refused:
        service.desk.order(order_of(png(), board="B7"), caller())
    assert refused.value.reason is Refusing.INVALID


def test_a_frame_that_is_no_image_makes_all_its_parts_unknown(desk_line, caller):
    with desk_line.served() as service:
        (parts,) = asked(service, caller, order_of(b"no image", board="B7"))
        assert [part.verdict for part in parts] == [UNKNOWN, UNKNOWN]
        assert all("not an image" in part.reason for part in parts)


@pytest.mark.parametrize(
    ("order", "reason", "text"),
    [
        ({"component": "c9"}, Refusing.NOT_FOUND, "no route for component 'c9'"),
        ({"expert": "cls/x"}, Refusing.NOT_FOUND, "no expert 'cls/x'"),
        ({"component": "c0", "expert": "cls/f0"}, Refusing.INVALID, "name one of the two"),
        ({"component": "c0", "board": "B1"}, Refusing.INVALID, "give its ref"),
        ({"component": "c0", "board_type": "other"}, Refusing.NOT_FOUND, "no board type 'other'"),
        ({"component": "c0", "key": "k" * 201}, Refusing.INVALID, "at most 200"),
        ({"component": "c0", "key": "frame#R1"}, Refusing.INVALID, "a key with #"),
    ],
)
def test_what_cannot_be_ordered_is_refused_and_leaves_nothing(desk_line, caller, png, order, reason, text):
    with desk_line.served() as service:
        with pytest.raises(OrderRefused, match=text) as refused:
            service.desk.order(order_of(png(), **order), caller())
        assert refused.value.reason is reason
        assert service.desk.status().requests_in_flight == 0


def test_more_than_the_line_takes_at_once_is_refused_with_a_time_to_try_again(desk_line, caller, png):
    """AC18: the excess is refused at once, and what was admitted is judged."""
    desk_line.fake(0, K_s=0.01)
    desk_line.document["api"] = {"limits": {"requests": 5, "memory": "1MiB"}}
    with desk_line.served() as service:
        admitted, refusals = [], []
        for _ in range(20):
            someone = caller()
            try:
                service.desk.order(order_of(png(), component="c0", is_kept=False), someone)
                admitted.append(someone)
            except OrderRefused as refused:
                refusals.append(refused)
        assert len(admitted) >= 5
        assert len(refusals) >= 5
        assert {refused.reason for refused in refusals} == {Refusing.QUEUE_FULL}
        assert all(refused.retry_s > 0 for refused in refusals)
        assert [part.verdict for someone in admitted for part in someone.wait()] == [OK] * len(admitted)
        with pytest.raises(OrderRefused, match="more than the line takes at once") as refused:
            service.desk.order(order_of(bytes(2_000_000), component="c0"), caller())
        assert refused.value.reason is Refusing.TOO_LARGE
        asked(service, caller, order_of(png(), component="c0"))  # everything was given back


def test_the_excess_is_refused_while_the_engine_and_the_disk_stand_still(desk_line, caller, png):
    """AC18: at once, for a refusal waits for neither."""
    desk_line.document["api"] = {"limits": {"requests": 3}}
    is_stuck, may_go = threading.Event(), threading.Event()

    class Stuck(caller):
        def judged(self, parts):
            is_stuck.set()
            assert may_go.wait(60)  # on the thread of the Engine's
            super().judged(parts)

    with desk_line.served() as service:
        stuck, waiting = Stuck(), [caller() for _ in range(3)]
        question = order_of(png(), component="c0", is_kept=False)
        service.desk.order(question, stuck)
        assert is_stuck.wait(60)
        with full_disk(desk_line):
            for order, someone in zip([order_of(png(), component="c0")] * 2 + [question], waiting, strict=True):
                service.desk.order(order, someone)
            for order in (question, order_of(png(), component="c1")):
                with pytest.raises(OrderRefused) as refused:
                    service.desk.order(order, caller())
                assert refused.value.reason is Refusing.QUEUE_FULL
            assert not any(someone.answers for someone in (stuck, *waiting))
            may_go.set()
        assert [someone.wait()[0].verdict for someone in (stuck, *waiting)] == [OK] * 4


def test_who_gives_up_while_nothing_can_be_stored_makes_no_room_for_more(desk_line, caller, png, wait_until_so):
    """AC11, AC18: what waits for the disk is in memory, whether anybody waits for it or not."""
    desk_line.document["api"] = {"limits": {"requests": 5, "memory": "1MiB"}}
    order = order_of(png(), component="c0")
    with desk_line.served() as service:
        with full_disk(desk_line):
            for _ in range(5):
                service.desk.order(order, caller()).cancel()
            with pytest.raises(OrderRefused, match="5 images") as refused:
                service.desk.order(order, caller())
            assert refused.value.reason is Refusing.QUEUE_FULL
        wait_until_so(lambda: service.statistics().store.pending == 0 and not desk_line.unfinished)
        assert asked(service, caller, *[order] * 5)  # everything was given back


def test_an_order_that_no_row_can_hold_is_refused_and_gives_back_what_it_was_admitted_with(desk_line, caller, png):
    desk_line.document["api"] = {"limits": {"requests": 1, "memory": "1MiB"}}
    with desk_line.served() as service:
        with pytest.raises(UnicodeEncodeError):
            service.desk.order(order_of(png(), component="c0", board="\udcff", ref="R1"), caller())
        assert asked(service, caller, order_of(png(), component="c0"))[0][0].verdict is OK


KILLED = """
import sys, os, signal, threading
from pathlib import Path
from tests.lines import order as order_of
from agent.config import read_line
from agent.service.line_service import LineService
service = LineService(read_line(Path(sys.argv[1]), {}), lambda *_: None)
service.start()
count, all_accepted = 0, threading.Event()
class Caller:
    def accepted(self):
        global count
        count += 1
        if count == 30:
            all_accepted.set()
    def judged(self, parts):
        pass
image = Path(sys.argv[2]).read_bytes()
for number in range(30):
    order = order_of(image, component=f"c{number % 2}", board=f"B{number // 2}", ref="R", key=str(number))
    service.desk.order(order, Caller())
all_accepted.wait(60)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_accepted_before_a_kill_is_judged_by_the_next_agent_and_once(
    desk_line, caller, png, wait_until_so, forks
):
    """AC6, for what comes by wire."""
    for number in range(2):
        desk_line.fake(number, K_s=0.02)
    assert desk_line.config.line == "test"  # the line file is written
    (desk_line.folder / "image.png").write_bytes(png())
    done = forks.run(KILLED, desk_line.folder / "line.yaml", desk_line.folder / "image.png")
    assert done.returncode == -signal.SIGKILL, done.stderr
    before = {row.result.subject.key for row in desk_line.results.query()}
    assert len(before) + len(desk_line.unfinished) == 30
    assert desk_line.unfinished
    with desk_line.served() as service:
        for is_same in (False, True):
            image = png() if is_same else png((200, 0, 0))
            orders = [
                order_of(image, component=f"c{n % 2}", board=f"B{n // 2}", ref="R", key=str(n)) for n in range(30)
            ]
            again = [caller() for _ in orders]
            for order, each in zip(orders, again, strict=True):
                service.desk.order(order, each)
            ends = [([part.is_repeat for part in each.wait()], each.refusal and each.refusal.reason) for each in again]
            assert ends == [([True], None) if is_same else ([], Refusing.KEY_REUSED)] * 30
        wait_until_so(lambda: not desk_line.unfinished)
    rows = [row.result for row in desk_line.results.query()]
    assert sorted(row.subject.key for row in rows) == sorted(f"api/{number}" for number in range(30))
    assert {row.verdict for row in rows} == {OK}
    assert {(row.board.serial, row.board.verdict) for row in desk_line.results.boards()} == {
        (f"B{number}", OK) for number in range(15)
    }


def leave_unjudged(line, image):
    """As an earlier run that accepted this one, and was killed."""
    with closing(sqlite3.connect(line.folder / "state" / "results.db")) as database:
        database.execute("INSERT INTO accepted_images VALUES (1, ?)", (image,))
        asked = asked_sha256(hashlib.sha256(image).hexdigest(), None, None, [("c1", None, None, None)])
        database.execute(
            "INSERT INTO accepted (key, source, component, name, accepted_at, image, asked_sha256)"
            " VALUES ('api/left', 'api', 'c1', 'left', '2026-05-01T00:00:00.000000+00:00', 1, ?)", (asked,),
        )  # fmt: skip
        database.commit()


def test_what_an_earlier_run_accepted_is_judged_though_the_disk_refuses_to_read_it_for_a_while(
    desk_line, caller, png, monkeypatch
):
    with desk_line.served():
        pass
    leave_unjudged(desk_line, png())
    content, failures = JournalReader.content, []

    def fail_twice(reader, image):
        if len(failures) < 2:
            failures.append(image)
            raise sqlite3.OperationalError("disk I/O error")
        return content(reader, image)

    monkeypatch.setattr(JournalReader, "content", fail_twice)
    with desk_line.served() as service:
        ((left,),) = asked(service, caller, order_of(png(), component="c1", key="left"))
        assert (left.verdict, len(failures)) == (OK, 2)


def test_who_sends_a_key_that_an_earlier_run_accepted_waits_for_its_verdict(desk_line, caller, png):
    with desk_line.served() as service:
        asked(service, caller, order_of(png(), component="c0", key="done"))
    leave_unjudged(desk_line, png())
    with desk_line.served() as service:
        (left,), (done,) = asked(
            service, caller, order_of(png(), component="c1", key="left"), order_of(png(), component="c0", key="done")
        )
        assert (left.seq, left.subject.component, done.seq) == (2, "c1", 1)


def test_who_subscribes_hears_when_results_and_boards_are_there_to_be_read(desk_line, caller, png):
    heard = []
    with desk_line.served() as service:
        end = service.desk.subscribe(lambda: heard.append(service.desk.stored_after(0, 0, 10)))
        asked(service, caller, order_of(png(size=(32, 16)), board="B1"))
        asked(service, caller, order_of(png(), component="c0", key="last"))
        end()
        asked(service, caller, order_of(png(), component="c0"))
    assert len(heard) == 4
    assert [part.seq for part in heard[-1].results] == [1, 2, 3]
    assert [(number, board.serial, board.verdict) for number, board in heard[-1].boards] == [(1, "B1", OK)]


def test_results_are_read_on_from_a_number(desk_line, caller, png):
    with desk_line.served() as service:
        asked(service, caller, *(order_of(png(), component="c0", key=str(number)) for number in range(5)))
        assert [part.seq for part in service.desk.stored_after(2, 0, 2).results] == [3, 4]
        assert service.desk.stored_after(5, 0, 10).results == ()


def test_the_status_says_what_the_agent_does(desk_line, caller, png):
    with desk_line.served() as service:
        asked(service, caller, order_of(png(), component="c0"))
        status = service.desk.status()
        assert (status.line, status.verdicts[OK], status.requests_in_flight) == ("test", 1, 0)
        assert [queue.processor for queue in status.queues] == ["cpu"] * len(status.queues)
        assert status.pools[0].capacity_bytes > status.pools[0].used_bytes > 0
        assert (status.standing, status.alarms) == ({}, ())


def test_a_gpu_that_ought_to_serve_and_does_not_is_an_alarm(desk_line, monkeypatch):
    """AC34, for `device: auto`."""
    monkeypatch.setattr("agent.service.line_service.has_nvidia_gpu", lambda: True)
    desk_line.document["device"] = "cpu"
    with desk_line.served() as service:
        assert service.desk.status().alarms == ()
    desk_line.document["device"] = "auto"
    with desk_line.served() as service:
        alarms = service.desk.status().alarms
        assert len(alarms) == (1 if service.agent.box.name == "cpu" else 0)
        assert all("torch does not see this box's NVIDIA GPU" in alarm for alarm in alarms)


def test_an_expert_that_cannot_be_served_makes_its_models_not_ready_and_says_why(desk_line, caller, png):
    desk_line.fake(1, weight_bytes="many")
    with desk_line.served() as service:
        models = {model.name: model for model in service.desk.models()}
        assert sorted(models) == ["c0", "c1", "expert:cls/f0", "expert:cls/f1"]
        assert (models["c0"].is_ready, models["c0"].labels, models["c0"].input_px) == (True, ("ok", "bad"), (8, 8))
        assert not models["c1"].is_ready
        assert "cls/f1" in models["c1"].reason
        assert "cls/f1" in service.desk.status().standing
        assert any("not asked" in sentence for sentence in service.desk.explain("cls/f1"))


def test_models_come_and_go_on_demand(desk_line, caller, png, wait_until_so):
    with desk_line.served() as service:

        def resident():
            return {name for pool in service.desk.status().pools for name in pool.experts}

        wait_until_so(lambda: len(resident()) == 2)
        service.desk.unload("c0")
        wait_until_so(lambda: len(resident()) == 1)
        service.desk.load("expert:cls/f0")
        wait_until_so(lambda: len(resident()) == 2)
        with pytest.raises(OrderRefused, match="no model 'c7'"):
            service.desk.load("c7")
        assert asked(service, caller, order_of(png(), component="c0"))[0][0].verdict is OK


def test_explanations_name_what_decided(desk_line, caller, png):
    desk_line.fake(0, label="bad")
    with desk_line.served() as service:
        asked(service, caller, order_of(png(), component="c0", key="k"))
        text = " ".join(service.desk.explain("k"))
        assert "is NG" in text
        assert "cls/f0 said bad with 0.900: only ok passes" in text
        assert "Step 1 asks cls/f0; ok goes on, all else is NG." in service.desk.explain("c0")
        assert any("rank" in sentence for sentence in service.desk.explain("cls/f0"))
        with pytest.raises(OrderRefused, match="no expert, no component"):
            service.desk.explain("what")


def test_one_experts_answer_is_no_verdict_on_a_board(desk_line, caller, png):
    with desk_line.served() as service:
        asked(service, caller, order_of(png(), expert="cls/f0", board="B1", ref="R1"))
        assert service.desk.boards("B1") == []


def test_two_board_types_want_to_be_told_which(desk_line, caller, png):
    desk_line.document["boards"]["other"] = {"components": {"c0": 1}}
    with desk_line.served() as service:
        with pytest.raises(OrderRefused, match="which of main, other"):
            service.desk.order(order_of(png(), component="c0", board="B1", ref="R1"), caller())
        order = order_of(png(), component="c0", board="B1", board_type="other", ref="R1")
        asked(service, caller, order)
        assert [board.board_type for board in service.desk.boards("B1")] == ["other"]


def test_a_known_verdict_that_cannot_be_read_for_a_moment_is_told_after_it(desk_line, caller, png, monkeypatch):
    find, failures = ResultStore.find, []

    def fail_twice(store, key):
        if len(failures) < 2:
            failures.append(key)
            raise sqlite3.OperationalError("database is locked")
        return find(store, key)

    with desk_line.served() as service:
        asked(service, caller, order_of(png(), component="c0", key="known"))
        monkeypatch.setattr(ResultStore, "find", fail_twice)
        (part,) = asked(service, caller, order_of(png(), component="c0", key="known"))[0]
        assert (part.seq, len(failures)) == (1, 2)


def move_away(line):
    """The results file, as somebody does who wants a fresh one."""
    for suffix in ("", "-wal", "-shm"):
        file = line.folder / "state" / f"results.db{suffix}"
        if file.exists():
            file.rename(file.with_name(f"away.db{suffix}"))


def test_a_known_verdict_that_goes_with_its_file_before_it_is_told_is_judged_again(desk_line, caller, png, monkeypatch):
    find, gone = ResultStore.find, []

    def go_first(store, key):
        if not gone:
            gone.append(key)
            move_away(desk_line)
        return find(store, key)

    with desk_line.served() as service:
        asked(service, caller, order_of(png(), component="c0", key="known"))
        monkeypatch.setattr(ResultStore, "find", go_first)
        assert asked(service, caller, order_of(png(), component="c0", key="known"))[0][0].verdict is OK
    assert [row.result.subject.key for row in desk_line.results.query()] == ["api/known"]


def test_a_results_file_that_is_moved_away_loses_nobody_who_waits(desk_line, caller, png):
    desk_line.fake(0, B_s=0.3)
    with desk_line.served() as service:
        first, second = caller(), caller()
        service.desk.order(order_of(png(), component="c0", key="twice"), first)
        assert first.was_accepted.wait(60)
        move_away(desk_line)
        service.desk.order(order_of(png(), component="c0", key="twice"), second)
        assert [each.wait()[0].verdict for each in (first, second)] == [OK, OK]
