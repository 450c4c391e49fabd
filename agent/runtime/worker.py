"""Contract of a worker: memories, loads and executors of one place, which carry out an Engine's effects.

The agent's own process is a worker; others are processes of this box, or of another one (``agent.runtime.workers``).

Guarantees: each load and each batch has one answer, posted as an event, unless the worker is lost. Then a WorkerLost is
posted once, and nothing after it. No method waits for the work that it starts. An image is sent to a worker at most
once for each request, until ``end``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.runtime.weights.transfer import TransferStatistics

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from agent.core.effects import Prepare, StartLoad
    from agent.core.performance import PerformanceMatrix
    from agent.core.request import Batch
    from agent.runtime.executor import ExecutorStatistics, RequestSource
    from agent.runtime.expert_copy import ExpertCopy
    from agent.runtime.images.sources import ImageSource
    from agent.runtime.weights.slots import SlotStatistics


@dataclass(frozen=True, slots=True)
class WorkerStatistics:
    """Statistics of a worker's loads, memories and executors since its start."""

    transfers: TransferStatistics
    slots: tuple[SlotStatistics, ...] = ()
    executors: tuple[ExecutorStatistics, ...] = ()
    skeletons_constructed: int = 0

    @classmethod
    def sum(cls, each: Iterable[WorkerStatistics]) -> WorkerStatistics:
        every = tuple(each)
        return cls(
            TransferStatistics.sum(one.transfers for one in every),
            tuple(slot for one in every for slot in one.slots),
            tuple(sorted((each for one in every for each in one.executors), key=lambda each: each.executor)),
            sum(one.skeletons_constructed for one in every),
        )


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """Posted by a worker that has ended, or was killed because it hung."""

    worker: str
    reason: str


class Worker(ABC):
    """One worker. Its methods are called on the loop's thread, in the order of the Engine's effects.

    Methods with a body are a worker's without images or without texts.
    """

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def start_load(self, effect: StartLoad) -> None: ...

    @abstractmethod
    def evict(self, copy: str, pool: str) -> None: ...

    def start_quantum(self, batch: Batch) -> None:
        """Run a batch of texts for its quantum."""
        raise NotImplementedError("no texts are placed on a worker of images")

    @abstractmethod
    def start_batch(self, batch: Batch, images: Sequence[RequestSource], *, is_next: bool) -> None:
        """Run a batch of images, in the order of its requests; a text is rejected.

        ``is_next``: no other batch runs on its executor.
        """

    def prioritise(self, batch: Batch) -> None:
        """Prepare a batch's images first: it is next, or runs."""
        return

    def prepare(self, effect: Prepare, image: ImageSource) -> None:
        """Prepare a request's image ahead of its batch."""
        return

    def forget(self, request: int) -> None:
        """Release what was prepared for a request."""
        return

    def end(self, request: int) -> None:
        """Release all that is held for a request, which has its outcome."""
        return

    def set_budget(self, pool: str, size_bytes: int) -> None:
        """Change the budget of a memory, if it is the worker's own."""
        return

    @abstractmethod
    def know(self, copies: Mapping[str, ExpertCopy], matrix: PerformanceMatrix) -> None:
        """Serve these copies from now on, by name; earlier ones may still run."""

    @abstractmethod
    def statistics(self) -> WorkerStatistics: ...

    def lose(self, reason: str) -> bool:
        """Kill a worker that hangs, which posts WorkerLost; False for the agent's own process."""
        return False

    @abstractmethod
    def stop(self, timeout_s: float) -> bool:
        """Finish running batches, cancel loads, and end; False if threads are left behind."""
