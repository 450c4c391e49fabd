"""Places of one memory, filled in the background by the decisions of the residency.

Guarantees: a failed load is raised where the moe_expert is needed. After ``settle`` no thread writes into a place
before the next need or prediction. Passes do not deadlock: each uses the moe_experts in memory before it waits for
more.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from threading import Condition
from typing import TYPE_CHECKING

from experts.daemon_threads import DaemonThreads
from experts.llm.tiers.moe_experts import MoeExpert

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from contextlib import AbstractContextManager

    from experts.llm.tiers.moe_experts import LoadMoeExpert, MoeResidency, MoeStatistics

CLOSE_S = 5.0  # a load that has not ended by then is abandoned


@dataclass(frozen=True, slots=True)
class PlacedMoeExpert:
    moe_expert: MoeExpert
    place: int


class MoeCache:
    """``fill`` brings a moe_expert's bytes into a place; it is called by at most ``loads_at_once`` threads.

    ``aside``: context of a pass that waits, in which ``fill`` may have the device.
    """

    def __init__(
        self, residency: MoeResidency, fill: Callable[[MoeExpert, int], None], *, name: str, loads_at_once: int = 1,
        aside: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:  # fmt: skip
        self._residency = residency
        self._fill = fill
        self._aside = aside
        self._threads = DaemonThreads(loads_at_once, name)
        self._changed = Condition()  # guards all fields; held only briefly
        self._failed: dict[MoeExpert, Exception] = {}
        self._waited_s = 0.0

    def need(self, layer: int, numbers: Sequence[int]) -> None:
        """Start missing loads. Each moe_expert must then be ``used``, even after a failed load."""
        with self._changed:
            for number in numbers:
                self._failed.pop(MoeExpert(layer, number), None)
            self._start(self._residency.need(layer, numbers))

    def first_of(self, wanted: Collection[MoeExpert], make_room: Callable[[], None] = lambda: None) -> PlacedMoeExpert:
        """Wait until the first of these is in its place. Raises the error of any failed load among these.

        ``make_room``: called before a wait, to let go of moe_experts in whose places these may be loaded.
        """
        with self._changed:
            found = self._there(wanted)
        if found is not None:
            return found
        make_room()
        with self._aside(), self._changed:
            began = time.perf_counter()
            self._changed.wait_for(lambda: self._there(wanted) is not None)
            self._waited_s += time.perf_counter() - began
            found = self._there(wanted)
            assert found is not None, "it was there while the lock was held"
            return found

    def used(self, moe_experts: Iterable[MoeExpert]) -> None:
        with self._changed:
            for moe_expert in moe_experts:
                self._start(self._residency.used(moe_expert))

    def predict(self, layer: int, numbers: Sequence[int]) -> None:
        with self._changed:
            self._start(self._residency.predict(layer, numbers))

    def end_pass(self) -> None:
        with self._changed:
            self._start(self._residency.end_pass())

    def settle(self) -> None:
        """Start no more loads ahead, and wait for loads under way. No pass may run meanwhile."""
        with self._changed:
            self._start(self._residency.end_pass())
            self._changed.wait_for(lambda: not self._residency.in_flight)

    def usage(self) -> dict[MoeExpert, float]:
        with self._changed:
            return self._residency.usage()

    def statistics(self) -> MoeStatistics:
        with self._changed:
            return replace(self._residency.statistics(), waited_s=self._waited_s)

    def close(self) -> None:
        self._threads.stop(CLOSE_S)

    def _there(self, wanted: Collection[MoeExpert]) -> PlacedMoeExpert | None:
        for moe_expert in wanted:
            place = self._residency.place_of(moe_expert)
            if place is not None:
                return PlacedMoeExpert(moe_expert, place)
        for moe_expert in wanted:
            if moe_expert in self._failed:
                raise self._failed[moe_expert]
        return None

    def _start(self, loads: Iterable[LoadMoeExpert]) -> None:
        for load in loads:
            try:
                self._threads.submit(self._load, load)
            except RuntimeError as error:  # closed
                self._fail(load.moe_expert, error)

    def _load(self, load: LoadMoeExpert) -> None:
        try:
            self._fill(load.moe_expert, load.place)
        except Exception as error:  # noqa: BLE001 - raised where the moe_expert is needed
            with self._changed:
                self._fail(load.moe_expert, error)
        else:
            with self._changed:
                self._start(self._residency.loaded(load.moe_expert))
                self._changed.notify_all()

    def _fail(self, moe_expert: MoeExpert, error: Exception) -> None:
        self._failed[moe_expert] = error
        self._start(self._residency.failed(moe_expert))
        self._changed.notify_all()
