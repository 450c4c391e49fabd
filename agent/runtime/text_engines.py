"""Engines of texts: one for each executor, over one arena of keys and values for each memory and device.

Guarantees: an arena has the size of its memory's share for leases, and leases are rounded as in the arena.
"""

from __future__ import annotations

from bisect import bisect_right
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from agent.core.names import expert_of
from agent.runtime.machine.box import exclusive, torch_device
from agent.runtime.texts import TextExpert
from experts.backends import LLM, family
from experts.errors import CoServeError, MemoryExceeded, is_out_of_memory
from experts.llm.arenas.extents import arena_for
from experts.llm.arenas.key_values import KvArena, KvLayout
from experts.llm.files.names import FINAL_NORM
from experts.llm.files.program import spec_of
from experts.llm.serving.engine import LlmEngine
from experts.llm.serving.iteration import OutputLengths

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from agent.core.performance import ExecutorSpec, Limits, PerformanceMatrix
    from agent.runtime.expert_copy import ExpertCopy
    from experts.packed.weights import SegmentStore


@dataclass(slots=True)
class TextEngines:
    """Engines ``by_executor``, and their shared parts. ``runs_on``: copy -> its (memory, device)s; None: all."""

    by_executor: dict[int, LlmEngine]
    lengths: OutputLengths = field(default_factory=OutputLengths)
    arenas: dict[tuple[str, str], KvArena] = field(default_factory=dict)  # by memory and torch device
    layout_of: Callable[[ExpertCopy], KvLayout] | None = None
    runs_on: dict[str, set[tuple[str, str]]] | None = None
    _layouts: dict[str, KvLayout] = field(default_factory=dict)

    def add(self, spec: ExecutorSpec, lease_bytes: int) -> None:
        """Add an executor with keys and values of its own, which keeps no prefixes."""
        arena = self.arenas[spec.pool, "cpu"] = arena_for("cpu", lease_bytes, keeps_prefixes=False)
        self.by_executor[spec.id] = LlmEngine(arena, lengths=self.lengths)

    def add_place(self, copy: str, place: tuple[str, str]) -> None:
        """Let texts of a copy use the arena of this (memory, device)."""
        if self.runs_on is not None:
            self.runs_on[copy] = {*self.runs_on.get(copy, ()), place}

    def reached(self, copies: Iterable[ExpertCopy]) -> list[TextExpert]:
        """Language models among these copies, in order."""
        by_expert: dict[str, list[ExpertCopy]] = {}
        for copy in copies:
            if family(copy.expert.architecture) == LLM:
                by_expert.setdefault(copy.expert.id, []).append(copy)
        return [
            TextExpert(expert, expert_of(own[0].name), partial(self._rounded, own)) for expert, own in by_expert.items()
        ]

    def most_tokens(self, copies: Iterable[ExpertCopy]) -> int | None:
        copies = list(copies)
        rooms = [arena.budget_bytes // layout.token_bytes for arena, layout in self._places(copies)]
        if not rooms:
            return None
        return bisect_right(range(1, max(rooms) + 1), max(rooms), key=lambda tokens: self._rounded(copies, tokens))

    def lose_places(self, places: Collection[tuple[str, str]]) -> None:
        """Count no more on the arenas of these (memory, device)s."""
        self.arenas = {place: arena for place, arena in self.arenas.items() if place not in places}

    def set_budget(self, pool: str, budget_bytes: int) -> None:
        for (name, _), arena in self.arenas.items():
            if name == pool:
                arena.set_budget(budget_bytes)

    def _rounded(self, copies: Sequence[ExpertCopy], tokens: int) -> int:
        return max((arena.tokens_for(layout, tokens) for arena, layout in self._places(copies)), default=tokens)

    def _places(self, copies: Iterable[ExpertCopy]) -> Iterator[tuple[KvArena, KvLayout]]:
        for copy in copies:
            layout = self._layout(copy)
            for place, arena in self.arenas.items():
                if layout is not None and (self.runs_on is None or place in self.runs_on.get(copy.name, ())):
                    yield arena, layout

    def _layout(self, copy: ExpertCopy) -> KvLayout | None:
        """Layout of a copy; None for an unreadable program."""
        if copy.name not in self._layouts and self.layout_of is not None:
            with suppress(CoServeError):
                self._layouts[copy.name] = self.layout_of(copy)
        return self._layouts.get(copy.name)


def text_engines(
    executors: Sequence[ExecutorSpec],
    limits: Limits,
    segments: SegmentStore,
    matrix: PerformanceMatrix,
    *,
    keeps_prefixes: bool = True,
) -> TextEngines:
    """Engine for each executor that runs texts and whose memory has a share for leases. Raises MemoryExceeded."""
    shares = {pool.name: pool.lease_bytes for pool in limits.pools if pool.lease_bytes}
    places = {
        spec.id: (spec.pool, torch_device(spec.processor))
        for spec in executors
        if spec.pool in shares and matrix.runs_texts(spec)
    }
    arenas = {
        place: _arena(*place, shares[place[0]], keeps_prefixes=keeps_prefixes)
        for place in dict.fromkeys(places.values())
    }
    lengths = OutputLengths()
    engines = {executor: LlmEngine(arenas[place], lengths=lengths) for executor, place in places.items()}
    return TextEngines(engines, lengths, arenas, partial(layout_of, segments=segments))


def _arena(pool: str, device: str, lease_bytes: int, *, keeps_prefixes: bool) -> KvArena:
    try:
        with exclusive(device):
            return arena_for(device, lease_bytes, keeps_prefixes=keeps_prefixes)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryExceeded(f"{pool}, for keys and values", lease_bytes, 0) from error


def layout_of(copy: ExpertCopy, segments: SegmentStore) -> KvLayout:
    """Layout of a copy. Raises as reading the program does."""
    spec = spec_of(segments.program(copy.packed), copy.expert.id)
    tables = (tensor for segment in copy.packed.segments for tensor in segment.tensors)
    dtype = next(tensor.dtype for tensor in tables if tensor.name == FINAL_NORM)
    return KvLayout.of(spec, getattr(torch, dtype))
