"""What is told over the wire is what the desk said."""

from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.doors.desk import BoardView, PoolView, QueueView, ReloadView, StatusView, TextsView, VerdictView
from agent.doors.grpc.messages import (
    board_message,
    order_of,
    part_message,
    part_of,
    reload_message,
    status_message,
    status_of,
)
from agent.doors.proto import inspection_pb2 as pb
from agent.faults.errors import OrderRefused, Reason
from agent.subject import SourceStatus, Subject
from experts.expert import BoundingBox, Verdict
from tests.lines import subject

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
maybe = st.none() | texts
filled = texts.filter(bool)
counts = st.integers(0, 2**40)
numbers = st.floats(allow_nan=False)
times = st.datetimes(datetime(1970, 1, 2), datetime(2200, 1, 1), timezones=st.just(UTC))
names = st.lists(texts, max_size=3).map(tuple)
boxes = st.lists(st.builds(BoundingBox, texts, numbers, numbers, numbers, numbers, numbers), max_size=2).map(tuple)
subjects = st.builds(
    lambda key, at, **about: Subject(key, "", key, at, **about), texts, times, component=st.none() | filled,
    expert=maybe, board=maybe, board_type=maybe, ref=maybe,
)  # fmt: skip
parts = st.builds(
    VerdictView, subject=subjects, verdict=st.sampled_from(Verdict), seq=st.none() | counts, label=maybe,
    score=st.none() | numbers, reason=maybe, experts=names, boxes=boxes, finished_at=st.none() | times,
    seconds=numbers, queue_s=numbers, compute_s=numbers,
)  # fmt: skip
verdict_counts = st.fixed_dictionaries(dict.fromkeys(Verdict, counts))
statuses = st.builds(
    StatusView, line=texts, version=texts, uptime_s=numbers, is_draining=st.booleans(), requests_in_flight=counts,
    verdicts=verdict_counts, boards_open=counts, switches=counts, loads=counts, evictions=counts, bytes_read=counts,
    queues=st.lists(st.builds(QueueView, st.integers(0, 64), texts, counts, maybe), max_size=2).map(tuple),
    pools=st.lists(st.builds(PoolView, texts, counts, counts, names, counts, counts), max_size=2).map(tuple),
    sources=st.lists(
        st.builds(SourceStatus, texts, texts, texts, counts, counts, counts, maybe), max_size=2
    ).map(tuple),
    standing=st.dictionaries(texts, texts, max_size=2), alarms=names,
    texts=st.builds(TextsView, counts, counts, counts, counts, counts, numbers),
)  # fmt: skip


@pytest.mark.parametrize(
    ("views", "message_of", "view_of"), [(parts, part_message, part_of), (statuses, status_message, status_of)]
)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_view_survives_a_round_trip_through_its_message(data, views, message_of, view_of):
    view = data.draw(views)
    message = message_of(view)
    assert view_of(type(message).FromString(message.SerializeToString())) == view


def test_boards_and_reloads_become_messages_field_by_field():
    at, counts = datetime(2026, 5, 1, tzinfo=UTC), {Verdict.OK: 2, Verdict.NG: 1}
    part = VerdictView(subject("p"), Verdict.NG)
    board = board_message(BoardView("B1", "main", Verdict.NG, at, at, {"c": 3}, counts, (part,), is_revision=True))
    assert board == pb.Board(
        serial="B1", board_type="main", verdict=pb.VERDICT_NG, opened_at=at, closed_at=at, missing={"c": 3}, ok=2, ng=1,
        parts=[part_message(part)], is_revision=True,
    )  # fmt: skip
    still_open = board_message(BoardView("B1", "main", None, at, None, {}, {}))
    assert still_open == pb.Board(serial="B1", board_type="main", is_open=True, opened_at=at)
    lists = {name: [f"{name} 1", f"{name} 2"] for name in ("problems", "added", "replaced", "removed", "needs_restart")}
    assert reload_message(ReloadView(True, *map(tuple, lists.values()))) == pb.ReloadReply(is_applied=True, **lists)


def test_surrogates_and_newer_verdicts_become_escaped_text_and_unknown():
    assert part_of(pb.Part(verdict=7)).verdict is Verdict.UNKNOWN  # as of a newer agent
    part = VerdictView(subject("B\udcff1.png", ref="\udc80"), Verdict.NG, experts=("\udc81",))
    message = part_message(part)
    assert (message.key, message.ref, message.experts) == ("B\\udcff1.png", "\\udc80", ["\\udc81"])


@pytest.mark.parametrize(
    "request_",
    [
        pb.InspectRequest(), pb.InspectRequest(file=b""), pb.InspectRequest(file=b"x", component="c", expert="e"),
        pb.InspectRequest(pixels=pb.Pixels(height=2, width=2, rgb=bytes(11))),
        pb.InspectRequest(pixels=pb.Pixels(height=0, width=0)),
        pb.InspectRequest(pixels=pb.Pixels(height=-1, width=-1, rgb=bytes(3))),
    ],
)  # fmt: skip
def test_contradictory_order_is_refused(request_):
    with pytest.raises(OrderRefused) as refused:
        order_of(request_)
    assert refused.value.reason is Reason.INVALID
