"""coserve.v1 over real sockets, with plain stubs as an integrator has them."""

import asyncio
import queue
import threading

import grpc
import pytest

from agent.doors.desk import ReloadView, ResultsCursor, VerdictView
from agent.doors.grpc import watching
from agent.doors.grpc.refusals import STATUS
from agent.doors.grpc.watching import PAGE_WITH_MAPS
from agent.doors.orders import Orders as OrdersOf
from agent.doors.proto import inspection_pb2 as pb
from agent.faults.errors import OrderRefused
from experts.expert import Verdict
from tests.agent.doors.conftest import metadata, refused
from tests.agent.doors.fake_desk import MAP
from tests.lines import order as order_of
from tests.waiting import until

DEADLINE_S = 30.0


def test_image_is_judged_by_its_route_and_stored(agent, desk):
    request = pb.InspectRequest(file=b"an NG one", component="resistor", board="B1", ref="R1", key="k1")
    (part,) = agent.Inspect(request, timeout=DEADLINE_S).parts
    assert (part.verdict, part.seq, part.board, part.ref, part.key) == (pb.VERDICT_NG, 1, "B1", "R1", "k1")
    assert list(part.experts) == ["cls/resistor", "det/alignment"]
    (again,) = agent.Inspect(request, timeout=DEADLINE_S).parts
    assert (again, len(desk.results)) == (part, 1)


def test_anomaly_score_is_answered_always_and_its_map_only_if_asked_for(agent, desk):
    def anomaly(**wanted):
        (part,) = agent.Inspect(pb.InspectRequest(file=b"strange", component="solder", **wanted)).parts
        (found,) = part.anomalies
        assert [(each.label, each.score, each.threshold) for each in part.outputs] == [("bent", 0.75, 0.5)]
        return found

    plain, shown = anomaly(), anomaly(wants_maps=True)
    assert (plain.expert, plain.score, plain.threshold, plain.HasField("map")) == ("look/solder", 3.5, 1.25, False)
    assert (shown.map, [order.wants_maps for order in desk.orders]) == (MAP, [False, True])


def test_frame_of_rgb_rows_is_judged_part_by_part(agent, desk):
    frame = pb.Pixels(height=1, width=2, rgb=bytes(range(6)))
    parts = agent.Inspect(pb.InspectRequest(pixels=frame, board="B1")).parts
    assert [part.component for part in parts] == ["resistor", "capacitor"]
    assert desk.orders[0].image.tolist() == [[[0, 1, 2], [3, 4, 5]]]


@pytest.mark.parametrize(("reason", "status"), STATUS.items())
def test_each_refusal_has_its_status_and_its_reason(agent, desk, reason, status):
    def refuse(order, listener):
        raise OrderRefused(reason, "as it is", 0.25)

    desk.order = refuse
    error = refused(agent.Inspect, pb.InspectRequest(file=b"x", component="resistor"))
    assert (error.code(), error.details()) == (status, "as it is")
    assert metadata(error) == {"coserve-reason": str(reason), "grpc-retry-pushback-ms": "250"}


def test_internal_error_is_answered_without_its_text(agent, desk, caplog):
    def fail(order, listener):
        raise KeyError("secret")

    desk.order = fail
    error = refused(agent.Inspect, pb.InspectRequest(file=b"x", component="resistor"))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in error.details()
    assert metadata(error) == {"coserve-reason": "INTERNAL"}
    assert "api_failed method=/coserve.v1.Inspection/Inspect" in caplog.text


def test_expired_deadline_withdraws_a_waiting_inspection(agent, desk, server):
    desk.holds = True
    while not desk.orders:  # a slow box may let the deadline pass before the call comes through
        error = refused(agent.Inspect, pb.InspectRequest(file=b"x", component="resistor", board="B1"), timeout=0.05)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    desk.wait_for(lambda desk: not desk.under_way)
    desk.release()
    agent.Inspect(pb.InspectRequest(file=b"after", component="resistor", key="after"), timeout=DEADLINE_S)
    assert ([part.subject.key for part in desk.results], len(desk.withdrawn)) == (["after"], len(desk.orders) - 1)
    until(lambda: server.orders_under_way == server.calls == 0)


def test_caller_that_leaves_withdraws_its_waiting_inspection(agent, channel, desk):
    """No deadline, only a connection that closes."""
    desk.holds = True
    call = agent.Inspect.future(pb.InspectRequest(file=b"x", component="resistor"))
    desk.wait_for(lambda desk: desk.under_way)
    channel.close()
    desk.wait_for(lambda desk: desk.withdrawn)
    assert desk.under_way == []
    desk.release()
    assert desk.results == []
    assert call.code() is grpc.StatusCode.CANCELLED


class Orders:
    def __init__(self):
        self._queue = queue.SimpleQueue()

    def send(self, id_, **order):
        self._queue.put(pb.StreamOrder(id=id_, order=pb.InspectRequest(**{"file": b"x"} | order)))

    def end(self):
        self._queue.put(None)

    def __iter__(self):
        return iter(self._queue.get, None)


def kinds(answers):
    return [(answer.id, answer.WhichOneof("answer")) for answer in answers]


def test_stream_answers_each_order_by_its_id_and_goes_on_after_a_refusal(agent):
    orders = Orders()
    orders.send("a", component="resistor")
    orders.send("b", component="nobody's")
    orders.send("", component="resistor")
    orders.send("c", component="resistor", file=b"NG", is_question=True)
    orders.end()
    answers = list(agent.InspectStream(iter(orders), timeout=DEADLINE_S))
    assert sorted(kinds(answers)) == [
        ("", "refused"), ("a", "accepted"), ("a", "judged"), ("b", "refused"), ("c", "judged"),
    ]  # fmt: skip
    by_id = {answer.id: answer for answer in answers}
    assert (by_id["b"].refused.reason, by_id[""].refused.reason) == ("NOT_FOUND", "INVALID")
    assert by_id["c"].judged.parts[0].verdict == pb.VERDICT_NG


def test_streamed_order_is_accepted_before_it_is_judged_and_blocks_no_other(agent, desk):
    desk.holds = True
    orders = Orders()
    answers = agent.InspectStream(iter(orders), timeout=DEADLINE_S)
    orders.send("a", component="resistor")
    assert kinds([next(answers)]) == [("a", "accepted")]
    orders.send("a", component="resistor")
    refused = next(answers)
    assert (refused.id, refused.refused.reason) == ("a", "INVALID")
    orders.send("b", component="capacitor")
    assert kinds([next(answers)]) == [("b", "accepted")]
    desk.release()
    assert kinds([next(answers), next(answers)]) == [("a", "judged"), ("b", "judged")]
    orders.send("a", component="resistor")
    assert kinds([next(answers), next(answers)]) == [("a", "accepted"), ("a", "judged")]
    orders.end()
    assert list(answers) == []


def test_broken_stream_withdraws_questions_and_keeps_accepted_inspections(agent, desk):
    desk.holds = True
    orders = Orders()
    answers = agent.InspectStream(iter(orders), timeout=DEADLINE_S)
    orders.send("kept", component="resistor", board="B1")
    assert kinds([next(answers)]) == [("kept", "accepted")]
    orders.send("asked", component="resistor", is_question=True)
    desk.wait_for(lambda desk: len(desk.under_way) == 2)
    answers.cancel()
    desk.wait_for(lambda desk: desk.withdrawn)
    assert [order.is_kept for order in desk.withdrawn] == [False]
    desk.release()
    desk.wait_for(lambda desk: desk.results)
    orders.end()


def test_long_reload_blocks_no_other_call(agent, desk):
    is_asked, may_end = threading.Event(), threading.Event()

    def reload():
        is_asked.set()
        assert may_end.wait(DEADLINE_S)
        return ReloadView(is_applied=True)

    desk.reload = reload
    reloading = agent.Reload.future(pb.ReloadRequest())
    assert is_asked.wait(DEADLINE_S)
    assert agent.Inspect(pb.InspectRequest(file=b"x", component="resistor"), timeout=DEADLINE_S).parts
    assert agent.Status(pb.StatusRequest(), timeout=DEADLINE_S).line == "test"
    may_end.set()
    assert reloading.result(DEADLINE_S).is_applied


def test_boards_triggers_and_explanations_return_the_desks_answers(agent, desk):
    agent.Inspect(pb.InspectRequest(file=b"x", component="resistor", board="B1"))
    (board,) = agent.GetBoard(pb.GetBoardRequest(serial="B1"), timeout=DEADLINE_S).boards
    assert (board.serial, board.is_open, dict(board.missing), board.parts[0].seq) == ("B1", True, {"capacitor": 1}, 1)
    assert agent.Trigger(pb.TriggerRequest(camera="top", board="B1"), timeout=DEADLINE_S).key == "top/B1"
    explained = agent.Explain(pb.ExplainRequest(subject="cls/resistor"), timeout=DEADLINE_S)
    assert list(explained.sentences) == list(desk.explanation("cls/resistor").sentences)
    for method, request in ((agent.GetBoard, pb.GetBoardRequest(serial="B9")), (agent.Trigger, pb.TriggerRequest())):
        error = refused(method, request, timeout=DEADLINE_S)
        assert metadata(error) == {"coserve-reason": "NOT_FOUND"}


@pytest.mark.parametrize("name", ["x" * 513, "a\0b"])
def test_overlong_name_or_one_with_nul_is_refused(agent, desk, name):
    error = refused(agent.Inspect, pb.InspectRequest(file=b"x", component="resistor", board=name))
    assert (error.code(), desk.orders) == (grpc.StatusCode.INVALID_ARGUMENT, [])


class TestWatches:
    def part(self, number):
        return pb.InspectRequest(file=b"x", component="resistor", board=f"B{number}")

    def test_stored_results_come_first_then_live_ones_then_a_board_behind_its_results(self, agent, desk):
        for number in range(3):
            agent.Inspect(self.part(number))
        events = agent.WatchResults(pb.WatchResultsRequest(after_seq=1, file=desk.file), timeout=DEADLINE_S)
        assert [next(events).result.seq for _ in range(2)] == [2, 3]
        agent.Inspect(pb.InspectRequest(file=b"NG", component="capacitor", board="B0"))
        assert next(events).result.seq == 4
        board = next(events).board
        assert (board.serial, board.verdict, len(board.parts)) == ("B0", pb.VERDICT_NG, 2)
        events.cancel()
        desk.wait_for(lambda desk: not desk.watchers)

    def test_resumed_watch_misses_no_board_and_repeats_none(self, agent, desk):
        told, place = [], {"after_seq": 0, "after_board": 0}
        for number in range(4):
            agent.Inspect(self.part(number))
            agent.Inspect(pb.InspectRequest(file=b"NG", component="capacitor", board=f"B{number}"))
            events = agent.WatchResults(pb.WatchResultsRequest(**place), timeout=DEADLINE_S)
            for _ in range(3):
                event = next(events)
                told.append(event.result.seq or event.board.serial)
                place = {name: getattr(event, name) for name in ("file", "after_seq", "after_board")}
            events.cancel()
        assert told == [1, 2, "B0", 3, 4, "B1", 5, 6, "B2", 7, 8, "B3"]

    @pytest.mark.parametrize(
        ("place", "code", "reason"),
        [
            ({"after_seq": 1, "file": "0ther"}, grpc.StatusCode.FAILED_PRECONDITION, "CURSOR_UNKNOWN"),
            ({"after_seq": 0, "file": "0ther"}, grpc.StatusCode.FAILED_PRECONDITION, "CURSOR_UNKNOWN"),
            ({"after_seq": 3, "file": "f11e"}, grpc.StatusCode.FAILED_PRECONDITION, "CURSOR_UNKNOWN"),
            ({"after_board": 2, "file": "f11e"}, grpc.StatusCode.FAILED_PRECONDITION, "CURSOR_UNKNOWN"),
            ({"after_seq": 1}, grpc.StatusCode.INVALID_ARGUMENT, "INVALID"),
            ({"after_board": 1}, grpc.StatusCode.INVALID_ARGUMENT, "INVALID"),
        ],
    )
    def test_watch_from_a_place_unknown_to_the_results_file_is_refused(self, agent, desk, place, code, reason):
        agent.Inspect(self.part(0))
        agent.Inspect(pb.InspectRequest(file=b"x", component="capacitor", board="B0"))
        error = refused(next, agent.WatchResults(pb.WatchResultsRequest(**place), timeout=DEADLINE_S))
        assert (error.code(), metadata(error)["coserve-reason"]) == (code, reason)

    def test_watch_ends_with_an_error_if_the_results_file_is_replaced(self, agent, desk):
        """Its numbers begin anew: to go on would be to miss all up to the old ones."""
        agent.Inspect(self.part(0))
        events = agent.WatchResults(pb.WatchResultsRequest(after_seq=0), timeout=DEADLINE_S)
        assert next(events).file == desk.file
        desk.file = "0ther"
        agent.Inspect(self.part(1))
        with pytest.raises(grpc.RpcError, match="results file f11e, and the line has 0ther"):
            next(events)

    @pytest.mark.parametrize("wants_maps", [False, True])
    def test_watched_results_carry_anomaly_maps_if_asked_for(self, agent, desk, wants_maps):
        count = 2 * PAGE_WITH_MAPS + 1
        for number in range(count):
            image = b"strange" if number % 2 else b"plain"
            desk.commit(desk._part(order_of(image, component="solder"), "solder"))
        request = pb.WatchResultsRequest(after_seq=0, wants_maps=wants_maps)
        events = agent.WatchResults(request, timeout=DEADLINE_S)
        parts = [next(events).result for _ in range(count)]
        events.cancel()
        assert [part.seq for part in parts] == list(range(1, count + 1))
        shown = [[each.map for each in part.anomalies] for part in parts]
        assert shown == [[MAP if wants_maps else b""] if number % 2 else [] for number in range(count)]

    def test_watcher_that_falls_behind_misses_nothing(self, desk, monkeypatch):
        monkeypatch.setattr(watching, "PAGE", 2)
        told = []

        async def watch_all():
            orders = OrdersOf(desk)
            events = watching.watch(orders, ResultsCursor(None, 0, 0), asyncio.Event())
            for number in range(5):
                for component in ("resistor", "capacitor"):
                    desk.commit(desk._part(order_of(b"x", component=component, board=f"B{number}"), component))
                if not number:
                    told.append((await anext(events))[0])  # from now on it watches, and does not read
            await asyncio.sleep(0)
            while len(told) < 15:
                told.append((await anext(events))[0])
            await events.aclose()
            orders.stop()

        asyncio.run(watch_all())
        names = [event.seq if isinstance(event, VerdictView) else event.serial for event in told]
        assert [name for name in names if isinstance(name, int)] == list(range(1, 11))
        assert [name for name in names if isinstance(name, str)] == [f"B{number}" for number in range(5)]
        assert all(names.index(f"B{number}") > names.index(2 * number + 2) for number in range(5))
        assert desk.watchers == 0


def test_verdict_numbers_of_the_protocol_are_stable():
    """IPC-Hermes: 0 unknown, 1 good, 2 failed."""
    numbers = {verdict.name: pb.Verdict.Value(f"VERDICT_{verdict.name}") for verdict in Verdict}
    assert numbers == {"UNKNOWN": 0, "OK": 1, "NG": 2}
