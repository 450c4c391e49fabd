"""Periodic work in short steps, on the thread of another part: one round after another, each when due."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from threading import Event
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from sqlite_utils import Database

    from agent.records.result_writer import ResultStore


class Rounds(ABC):
    """Call ``step`` from one thread at a time. ``clock``: monotonic seconds; ``due_s``: of the next round."""

    def __init__(self, store: ResultStore, clock: Callable[[], float], due_s: float) -> None:
        self._store = store
        self._clock = clock
        self._due_s = due_s
        self._round: Generator[None, None, None] | None = None

    def step(self) -> None:
        """Do a part of a round, if one is due. After an OSError, which is raised, the next step begins a new round."""
        if self._round is None and self._clock() < self._due_s:
            return
        under_way, self._round = self._round or self._steps(), None
        with suppress(StopIteration):
            next(under_way)
            self._round = under_way

    def stop(self) -> None:
        if self._round is not None:
            self._round.close()
            self._round = None

    @abstractmethod
    def _steps(self) -> Generator[None, None, None]:
        """Steps of one round; its end sets ``_due_s``."""

    def _write(self, write: Callable[[Database], object]) -> Generator[None, None, None]:
        """Write, and yield until the commit."""
        is_stored = Event()
        self._store.write(write, lambda _: is_stored.set())
        while not is_stored.is_set():
            yield
