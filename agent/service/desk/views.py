"""Views of stored results and boards, and of the line's status, for callers."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, TypeVar

from agent.core.names import line_name
from agent.deployment.profile_in_use import advice_without_profile
from agent.doors.desk import AnomalyView, BoardView, PoolView, QueueView, StatusView, TextsView, VerdictView

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agent.core.pool import PoolStatistics
    from agent.core.state import QueueStatistics
    from agent.records.boards import BoardRun, BoardVerdict
    from agent.records.verdict import KeptMap, Result
    from agent.runtime.executor import ExecutorStatistics
    from agent.service.desk.line_state import LineState

Shown = TypeVar("Shown")
View = TypeVar("View")

OF_RESULT = ("subject", "verdict", "label", "score", "reason", "experts", "finished_at", "seconds")


def verdict_view(
    result: Result, *, queue_s: float = 0.0, compute_s: float = 0.0, maps: Sequence[KeptMap] = ()
) -> VerdictView:
    return VerdictView(
        **result.flat(OF_RESULT),
        seq=result.seq or None,
        boxes=tuple(box for step in result.steps for box in step.boxes),
        queue_s=queue_s,
        compute_s=compute_s,
        anomalies=_anomalies(result, maps),
        outputs=tuple(output for step in result.steps for output in step.outputs),
    )


def measures_anomalies(result: Result) -> bool:
    return any(step.anomaly for step in result.steps)


def _anomalies(result: Result, maps: Sequence[KeptMap]) -> tuple[AnomalyView, ...]:
    pictures = {each.step: each.png for each in maps}
    return tuple(
        AnomalyView(step.expert, step.anomaly.score, step.anomaly.threshold, pictures.get(number))
        for number, step in enumerate(result.steps)
        if step.anomaly is not None
    )


def board_view(board: BoardVerdict) -> BoardView:
    return BoardView(
        board.serial, board.board_type, board.verdict, board.opened_at, board.closed_at, board.missing, board.counts,
        is_revision=board.is_revision, reason=board.reason,
    )  # fmt: skip


def run_view(run: BoardRun) -> BoardView:
    if run.closed is not None:
        return replace(board_view(run.closed), counts=run.counts)
    return BoardView(run.serial, run.board_type, None, run.opened_at, None, run.missing, run.counts)


def status_view(state: LineState) -> StatusView:
    agent, engine = state.agent, state.loop.engine
    executors = {each.executor: each for each in state.loop.executors}
    return StatusView(
        line=agent.config.line,
        version=version("coserve"),
        uptime_s=time.monotonic() - state.line.started_s,
        is_draining=engine.is_draining,
        requests_in_flight=state.loop.requests_in_flight,
        verdicts=state.tally.verdicts,
        boards_open=state.boards_open,
        switches=engine.switches,
        loads=sum(engine.loads.values()),
        evictions=engine.evictions,
        bytes_read=engine.bytes_read,
        queues=tuple(_queue_view(queue, executors.get(queue.executor)) for queue in engine.queues),
        pools=tuple(memory_view(PoolView, pool, pool.resident) for pool in engine.pools),
        sources=tuple(state.sources),
        standing=state.standing,
        alarms=tuple(alarm.message for alarm in state.alarms),
        texts=_texts_view(state),
        shadows=state.shadows,
        unproven={name: lack.why for name, lack in state.lacks.items()},
        advice=() if agent.stored else advice_without_profile(agent.config, agent.box),
    )


def memory_view(kind: Callable[[str, int, int, Shown, int, int], View], pool: PoolStatistics, experts: Shown) -> View:
    return kind(pool.name, pool.used_bytes, pool.expert_bytes, experts, pool.lease_used_bytes, pool.lease_bytes)


def _texts_view(state: LineState) -> TextsView:
    first = state.texts.first_token_s
    return TextsView(
        under_way=state.texts.under_way,
        ended=sum(state.texts.ended.values()),
        read_tokens=sum(each.read_tokens for each in state.loop.executors),
        written_tokens=state.written_tokens,
        shown=first.counts[math.inf],
        first_token_s=first.sum_s,
    )


def _queue_view(queue: QueueStatistics, executor: ExecutorStatistics | None) -> QueueView:
    running = None if queue.expert is None else line_name(queue.expert)
    view = QueueView(queue.executor, queue.processor, queue.requests, running)
    return view if executor is None else replace(view, busy_s=executor.busy_s, waited_s=executor.waited_s)
