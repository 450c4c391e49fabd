"""The desk of a served line: what callers order, ask, cancel, and what of it survives the agent's end."""

import signal
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from agent.faults.errors import OrderRefused, Reason
from experts.expert import Verdict
from tests.agent.service.fake_line import PATIENCE_S, Caller, asked, ordered, picture
from tests.lines import order as order_of
from tests.waiting import until

OK, NG, UNKNOWN = Verdict.OK, Verdict.NG, Verdict.UNKNOWN
PART = {"component": "c0", "board": "B1", "ref": "R1"}


def part(**about):
    return order_of(picture(), **({"component": "c0"} | about))


def question(**about):
    return part(is_kept=False, **about)


def wait_for_a_batch(service):
    until(lambda: any(queue.running for queue in service.desk.status().queues))


def wait_for_the_disk(service, line):
    until(lambda: not service.store.statistics().pending and not line.unfinished)


def test_kept_order_is_accepted_judged_stored_and_counts_on_its_board(line):
    with line.served() as service:
        (someone,) = ordered(service, part(**PART, key="mine"))
        (told,) = someone.wait()
        assert someone.was_accepted.is_set()
        assert (told.subject.key, told.verdict, told.seq, told.experts) == ("api/mine", OK, 1, ("cls/f0",))
        assert [(board.verdict, board.missing) for board in service.desk.boards("B1")] == [(None, {"c1": 1})]
        asked(service, part(component="c1", board="B1", ref="R2"))
        assert [(board.verdict, board.missing) for board in service.desk.boards("B1")] == [(OK, {})]
        status = service.desk.status()
        assert (status.line, status.verdicts[OK], status.requests_in_flight) == ("test", 2, 0)
        assert status.pools[0].capacity_bytes > status.pools[0].used_bytes > 0
        assert (status.standing, status.alarms) == ({}, ())
    assert (line.rows[0].subject.key, line.rows[0].subject.board) == ("api/mine", "B1")
    assert line.unfinished == []


def test_question_is_answered_and_stores_nothing(line):
    with line.served() as service:
        pixels = np.full((8, 8, 3), 99, np.uint8)
        others = [order_of(pixels, is_kept=False, **about) for about in ({"component": "c1"}, {"expert": "cls/f1"})]
        said = [(told.verdict, told.seq, told.label) for (told,) in asked(service, question(), *others)]
        assert said == [(OK, None, "ok"), (OK, None, "ok"), (UNKNOWN, None, "ok")]
    assert line.rows == []


def test_orders_of_one_key_are_judged_once(line):
    line.fake(0, B_s=0.2)
    with line.served() as service:
        together = asked(service, *[part(key="mine")] * 3)
        later = asked(service, part(key="mine"))
        told = [one for (one,) in together + later]
        assert [(one.seq, one.is_repeat) for one in told] == [(1, False), (1, True), (1, True), (1, True)]
        assert service.judged == 1


@pytest.mark.parametrize("state", ["under way", "stored", "after a restart"])
def test_key_of_one_inspection_is_refused_for_another(line, batches, state):
    changes = ({"component": "c1"}, {"board": "B2"}, {"board": None}, {"ref": "R2"})
    others = [
        order_of(picture((200, 0, 0)), **PART, key="B1/R1"),
        order_of(np.full((8, 8, 3), (10, 200, 30), np.uint8), **PART, key="B1/R1"),
        *(part(**(PART | change), key="B1/R1") for change in changes),
        order_of(picture(), expert="cls/f0", board="B1", ref="R1", key="B1/R1"),
        order_of(picture(size=(32, 16)), board="B1", key="B1/R1"),
    ]
    first = part(**PART, key="B1/R1")
    line.document["api"] = {"limits": {"requests": 3}}  # what a refusal kept of them would be missed
    with ExitStack() as ending:
        service = ending.enter_context(line.served())
        if state == "under way":
            batches.clear()
        (someone,) = ordered(service, first)
        assert someone.was_accepted.wait(PATIENCE_S)
        if state != "under way":
            someone.wait()
        if state == "after a restart":
            ending.close()
            service = ending.enter_context(line.served())
        for order in others:
            (refused,) = ordered(service, order)
            refused.wait()
            assert refused.refusal.reason is Reason.KEY_REUSED
            assert "'B1/R1' was given for something else" in str(refused.refusal)
            assert (refused.answers, refused.parts, refused.was_accepted.is_set()) == (1, [], False)
        (again,) = ordered(service, first)
        batches.set()
        (told,) = again.wait()
        assert (told.verdict, told.seq, told.is_repeat, again.refusal) == (OK, 1, True, None)
    assert [row.subject.key for row in line.rows] == ["api/B1/R1"]
    assert line.unfinished == []


def test_order_cancelled_before_its_batch_stores_nothing_and_may_come_again(line, batches):
    line.document["executors"] = {"cpu": 1}
    with line.served() as service:
        batches.clear()
        (running,), queued = ordered(service, question(key="runs")), Caller()
        wait_for_a_batch(service)
        for number in range(3):
            ticket = service.desk.order(part(**PART, key=f"queued {number}"), queued)
            ticket.cancel()
            ticket.cancel()
        wait_for_the_disk(service, line)
        assert service.desk.status().requests_in_flight == 1
        batches.set()
        running.wait()
        assert (queued.answers, service.judged) == (0, 0)
        ((told,),) = asked(service, part(**PART, key="queued 1"))
        assert (told.verdict, told.seq) == (OK, 1)


def test_board_order_cancelled_in_its_batch_is_stored(line):
    line.fake(0, B_s=0.3)
    with line.served() as service:
        someone = Caller()
        ticket = service.desk.order(part(**PART), someone)
        wait_for_a_batch(service)
        ticket.cancel()
        until(lambda: service.judged == 1)
        assert (someone.answers, [row.verdict for row in line.rows]) == (0, [OK])


def test_frame_is_cut_by_its_layout_and_answered_once_all_parts_are_judged(line):
    with line.served() as service:
        order = order_of(picture(size=(32, 16)), board="B7", key="frame")
        (parts,) = asked(service, order)
        about = [(told.subject.key, told.subject.component, told.subject.ref) for told in parts]
        assert about == [("api/frame#R1", "c0", "R1"), ("api/frame#R2", "c1", "R2")]
        assert [board.verdict for board in service.desk.boards("B7", "main")] == [OK]
        (again,) = asked(service, order)
        assert again == [replace(told, queue_s=0.0, compute_s=0.0, is_repeat=True) for told in parts]
        (broken,) = asked(service, order_of(b"no image", board="B8"))
        assert [(told.verdict, "not an image" in told.reason) for told in broken] == [(UNKNOWN, True)] * 2


IMPOSSIBLE = [
    (part(component="c9"), Reason.NOT_FOUND, "no route for component 'c9'"),
    (order_of(picture(), expert="cls/x"), Reason.NOT_FOUND, "no expert 'cls/x'"),
    (part(expert="cls/f0"), Reason.INVALID, "name one"),
    (part(board="B1"), Reason.INVALID, "give its ref"),
    (part(board_type="other"), Reason.NOT_FOUND, "no board type 'other'"),
    (part(key="k" * 201), Reason.INVALID, "at most 200"),
    (part(key="frame#R1"), Reason.INVALID, "a key with #"),
    (order_of(picture(), board="B7"), Reason.INVALID, r"8 x 8 pixels.*32 x 16"),
    (order_of(bytes(2_000_000), component="c0"), Reason.TOO_LARGE, "more than the line takes at once"),
]


def test_impossible_order_is_refused_and_stores_nothing(line):
    line.document["api"] = {"limits": {"requests": 2, "memory": "1MiB"}}
    with line.served() as service:
        for order, reason, text in IMPOSSIBLE:
            with pytest.raises(OrderRefused, match=text) as refused:
                service.desk.order(order, Caller())
            assert refused.value.reason is reason
        with pytest.raises(UnicodeEncodeError):  # no row can hold it
            service.desk.order(part(board="\udcff", ref="R1"), Caller())
        assert service.desk.status().requests_in_flight == 0
        assert [told.verdict for (told,) in asked(service, part(), part())] == [OK, OK]


def test_orders_cancelled_on_a_full_disk_keep_their_places_in_the_queue(line):
    line.document["api"] = {"limits": {"requests": 5, "memory": "1MiB"}}
    with line.served() as service:
        with line.full_disk():
            callers = [Caller() for _ in range(5)]
            for caller in callers:
                service.desk.order(part(), caller).cancel()
            with pytest.raises(OrderRefused, match="5 images") as refused:
                service.desk.order(part(), Caller())
            assert refused.value.reason is Reason.QUEUE_FULL
            assert not any(caller.was_accepted.is_set() for caller in callers)  # accepted means on the disk
        wait_for_the_disk(service, line)
        assert asked(service, *[part()] * 5)  # everything was given back


def thirty(image):
    return [
        order_of(image, component=f"c{n % 2}", board=f"B{n // 2}", ref=f"R{n % 2 + 1}", key=str(n)) for n in range(30)
    ]


KILLED = """
import sys, os, signal, threading
from pathlib import Path
from tests.agent.service.desk.test_line_desk import ordered, thirty
from agent.config import read_line
from agent.service.line_service import LineService
service = LineService(read_line(Path(sys.argv[1]), {}), lambda *_: None)
service.start()
for caller in ordered(service, *thirty(Path(sys.argv[2]).read_bytes())):
    caller.was_accepted.wait(60)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_orders_accepted_before_a_kill_are_judged_once_by_the_next_agent(line, forks):
    for number in range(2):
        line.fake(number, K_s=0.02)
    (line.folder / "image.png").write_bytes(picture())
    done = forks.run(KILLED, line.write(), line.folder / "image.png")
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (len(line.rows) + len(line.unfinished), bool(line.unfinished)) == (30, True)
    with line.served() as service:
        for image, end in ((picture((200, 0, 0)), ([], Reason.KEY_REUSED)), (picture(), ([True], None))):
            again = ordered(service, *thirty(image))
            ends = [([told.is_repeat for told in each.wait()], each.refusal and each.refusal.reason) for each in again]
            assert ends == [end] * 30
        until(lambda: not line.unfinished)
    assert sorted(row.subject.key for row in line.rows) == sorted(f"api/{number}" for number in range(30))
    assert {row.verdict for row in line.rows} == {OK}
    assert set(line.boards) == {(f"B{number}", OK) for number in range(15)}


def test_subscriber_is_called_once_results_and_boards_can_be_read(line):
    heard = []
    with line.served() as service:
        end = service.desk.subscribe(lambda: heard.append(service.desk.stored_after(0, 0, 10)))
        asked(service, order_of(picture(size=(32, 16)), board="B1"))
        asked(service, part(key="last"))
        end()
        asked(service, part())
        assert [told.seq for told in service.desk.stored_after(1, 0, 2).results] == [2, 3]
    assert len(heard) == 4
    assert [told.seq for told in heard[-1].results] == [1, 2, 3]
    assert [(number, board.serial, board.verdict) for number, board in heard[-1].boards] == [(1, "B1", OK)]


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_gpu_that_torch_does_not_see_raises_an_alarm(line, monkeypatch, device):
    monkeypatch.setattr("agent.runtime.machine.detection.has_nvidia_gpu", lambda: True)
    line.document["device"] = device
    with line.served() as service:
        alarms = service.desk.status().alarms
        assert len(alarms) == (device == "auto" and service.agent.box.name == "cpu")
        assert all("torch does not see this box's NVIDIA GPU" in alarm for alarm in alarms)


def test_unservable_expert_makes_its_models_not_ready_with_the_reason(line):
    line.fake(1, weight_bytes="many")
    with line.served() as service:
        models = {model.name: model for model in service.desk.models()}
        names = {"c0", "c1", "expert:cls/f0", "expert:cls/f1"}
        assert {name: model.is_ready for name, model in models.items()} == {name: "0" in name for name in names}
        assert (models["c0"].labels, models["c0"].input_px) == (("ok", "bad"), (8, 8))
        assert "cls/f1" in models["c1"].reason
        assert "cls/f1" in service.desk.status().standing
        assert any("gets no requests" in sentence for sentence in service.desk.explanation("cls/f1").sentences)


def test_models_come_and_go_on_demand(line):
    with line.served() as service:

        def resident():
            return len({name for pool in service.desk.status().pools for name in pool.experts})

        until(lambda: resident() == 2)
        service.desk.unload("c0")
        until(lambda: resident() == 1)
        service.desk.load("expert:cls/f0")
        until(lambda: resident() == 2)
        with pytest.raises(OrderRefused, match="no model 'c7'"):
            service.desk.load("c7")
        assert asked(service, part())[0][0].verdict is OK


def test_explanations_name_the_deciding_facts(line):
    line.fake(0, label="bad")
    with line.served() as service:
        explain = service.desk.explanation
        asked(service, part(key="k"))
        for subject in ("k", "1"):  # by key and by number
            text = " ".join(explain(subject).sentences)
            assert "is NG" in text
            assert "cls/f0 answered bad with 0.900: only ok passes" in text
        assert "Step 1 runs cls/f0; ok passes, all else is NG." in explain("c0").sentences
        assert any("rank" in sentence for sentence in explain("cls/f0").sentences)
        for unknown in ("what", "2", "9" * 30, ""):
            with pytest.raises(OrderRefused, match="no expert, no component"):
                explain(unknown)


def test_course_of_a_result_that_is_not_ok_is_stored(line):
    line.fake(0, label="bad")
    with line.served() as service:
        asked(service, part(key="ng"), part(key="ok", component="c1"))
        wait_for_the_disk(service, line)
        courses = {row.subject.key: row.course for row in line.rows}
        assert courses["api/ok"] is None
        ok = service.desk.explanation("ok")  # the record has it
    ng = courses["api/ng"]
    for course, expert in ((ng, "cls/f0"), (ok.timeline, "cls/f1")):
        (step,) = course["steps"]
        assert (step["expert"], step["executor"], step["processor"], step["joined"]) == (expert, 0, "cpu", False)
        assert 0.0 <= step["queued_s"] <= step["batch"]["began_s"] <= course["total_s"]
        assert step["batch"]["images"] == 1
    with line.served() as service:  # a restart, and the record is empty
        again = service.desk.explanation("ng")
        assert again.timeline == ng
        assert any("it opened a group on executor 0 (cpu)" in sentence for sentence in again.sentences)
        later = service.desk.explanation("ok")
    assert later.timeline is None
    assert any("not known any more" in sentence for sentence in later.sentences)


def test_explanation_shows_where_an_unfinished_image_is(line, batches):
    with line.served() as service:
        batches.clear()
        callers = ordered(service, question(key="first"))
        wait_for_a_batch(service)
        callers += ordered(service, question(key="second", component="c1"))
        until(lambda: service.desk.status().requests_in_flight == 2)
        (running,) = service.desk.explanation("first").timeline["steps"]
        assert running["batch"]["seconds"] is None
        until(lambda: service.desk.explanation("second").timeline["steps"])
        assert any("waits there for its batch" in sentence for sentence in service.desk.explanation("second").sentences)
        assert "Requests that wait for it on executor 0: 1." in service.desk.explanation("cls/f1").sentences
        batches.set()
        for caller in callers:
            caller.wait()
        assert any("has been judged" in sentence for sentence in service.desk.explanation("first").sentences)


def test_explanation_of_an_expert_has_the_reasons_of_its_evictions_and_residence(line):
    line.document["memory"] = {"host": "11500KB", "workspace": "10MB"}  # room for one of the two
    with line.served() as service:
        for component in ("c0", "c1", "c0"):
            asked(service, part(component=component))
        left = " ".join(service.desk.explanation("cls/f1").sentences)
        assert "cls/f1 left memory host at" in left
        assert "for cls/f0, as a queue's head needed it; stage 2, the least used; candidates in order: cls/f1" in left
        stays = " ".join(service.desk.explanation("cls/f0").sentences)
        assert "Nothing was evicted from memory host since cls/f0 came at" in stays
        assert "Images that it ran lately: 2, batches: 2." in stays


def test_order_without_board_type_is_refused_on_a_line_of_two_types(line):
    line.document["boards"]["other"] = {"components": {"c0": 1}}
    with line.served() as service:
        with pytest.raises(OrderRefused, match="which of main, other"):
            service.desk.order(part(**PART), Caller())
        asked(service, part(**PART, board_type="other"))
        assert [board.board_type for board in service.desk.boards("B1")] == ["other"]
        asked(service, order_of(picture(), expert="cls/f0", board="B2", board_type="main", ref="R1"))
        assert service.desk.boards("B2") == []  # one expert's answer is no verdict on a board
