"""The engines that run texts: one for each executor, over one arena of keys and values for each memory.

Guarantees: an arena is as large as its memory's share for leases, whatever runs there; how it rounds what a text holds
is what leases are counted by, so who has its lease finds room.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from agent.runtime.machine.box import torch_device
from agent.runtime.texts import Reached
from experts.backends import LLM, family
from experts.errors import CoServeError
from experts.llm.names import EMBEDDING
from experts.llm.program import spec_of
from experts.llm.serving.blocks import BlockArena
from experts.llm.serving.engine import LlmEngine
from experts.llm.serving.extents import ExtentArena
from experts.llm.serving.kv import KvLayout
from experts.llm.serving.output_lengths import OutputLengths

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from agent.core.performance import ExecutorSpec, Limits
    from agent.runtime.expert_copy import ExpertCopy
    from agent.runtime.texts import TextEngine
    from experts.llm.serving.kv import KvArena
    from experts.packed.weights import SegmentStore


@dataclass(slots=True)
class TextEngines:
    """The engines ``by_executor``, and what they have in common."""

    by_executor: Mapping[int, TextEngine]
    lengths: OutputLengths = field(default_factory=OutputLengths)
    arenas: Mapping[str, KvArena] = field(default_factory=dict)  # by memory
    layout_of: Callable[[ExpertCopy], KvLayout] | None = None
    _layouts: dict[str, KvLayout] = field(default_factory=dict)

    def reached(self, copies: Iterable[ExpertCopy]) -> list[Reached]:
        """The language models among these, in their order; what each holds is rounded as where that takes the most."""
        by_expert: dict[str, list[ExpertCopy]] = {}
        for copy in copies:
            if family(copy.expert.architecture) == LLM:
                by_expert.setdefault(copy.expert.id, []).append(copy)
        return [Reached(expert, partial(self._rounded, each)) for expert, each in by_expert.items()]

    def set_budget(self, pool: str, budget_bytes: int) -> None:
        """Keys and values of this memory keep to so much from now on."""
        if pool in self.arenas:
            self.arenas[pool].set_budget(budget_bytes)

    def _rounded(self, copies: Sequence[ExpertCopy], tokens: int) -> int:
        layouts = [layout for copy in copies if (layout := self._layout(copy)) is not None]
        return max(
            (arena.tokens_for(layout, tokens) for arena in self.arenas.values() for layout in layouts), default=tokens
        )

    def _layout(self, copy: ExpertCopy) -> KvLayout | None:
        """None for one whose program cannot be read: whoever loads it says so."""
        if copy.name not in self._layouts and self.layout_of is not None:
            with suppress(CoServeError):
                self._layouts[copy.name] = self.layout_of(copy)
        return self._layouts.get(copy.name)


def text_engines(
    executors: Sequence[ExecutorSpec], limits: Limits, segments: SegmentStore, *, keeps_prefixes: bool = True
) -> TextEngines:
    """One for each executor whose memory has a share for leases."""
    shares = {pool.name: pool.lease_bytes for pool in limits.pools if pool.lease_bytes}
    arenas = {
        spec.pool: arena_for(torch_device(spec.processor), shares[spec.pool], keeps_prefixes=keeps_prefixes)
        for spec in reversed(executors)
        if spec.pool in shares
    }
    lengths = OutputLengths()
    engines = {spec.id: LlmEngine(arenas[spec.pool], lengths=lengths) for spec in executors if spec.pool in arenas}
    return TextEngines(engines, lengths, arenas, partial(layout_of, segments=segments))


def arena_for(device: str, budget_bytes: int, *, keeps_prefixes: bool) -> KvArena:
    """Where keys and values lie that this device reads."""
    if device == "cpu":
        return ExtentArena(budget_bytes, keeps_prefixes=keeps_prefixes)
    return BlockArena(budget_bytes, device, keeps_prefixes=keeps_prefixes)


def layout_of(copy: ExpertCopy, segments: SegmentStore) -> KvLayout:
    """What a token of a packed language model takes. Raises what reading its program raises."""
    spec = spec_of(segments.program(copy.packed), copy.expert.id)
    tables = (tensor for segment in copy.packed.segments for tensor in segment.tensors)
    dtype = next(tensor.dtype for tensor in tables if tensor.name == EMBEDDING)
    return KvLayout.of(spec, getattr(torch, dtype))
