"""Ticket: where one request of the line stands, from its arrival to its Complete or Fail. The Engine's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agent.core.request import IMAGE

if TYPE_CHECKING:
    from agent.core.queue import ExecutorQueue, Group
    from agent.core.request import StepResult, Work
    from experts.graph import ExpertGraph


@dataclass(slots=True)
class Ticket:
    """Where a request stands: in ``group`` of ``queue``, or in a running batch; its step was queued at ``queued_s``.

    ``graph``: the routes that it arrived under, and is finished by.
    """

    component: str | None
    graph: ExpertGraph
    step: int = 0
    steps: list[StepResult] = field(default_factory=list)
    queue: ExecutorQueue | None = None
    group: Group | None = None
    queued_s: float = 0.0
    attempts: int = 0  # of its step, where it stands
    moves: int = 0  # of its step, to other executors as it could not be run where it stood
    is_cancelled: bool = False
    work: Work = IMAGE
    left: Work = IMAGE  # of its work, in the step that it is at
