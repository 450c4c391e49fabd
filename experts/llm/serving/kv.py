"""Arena contract: one byte budget for the keys and values of all models in one memory.

``KvArena`` is the seam: scheduling begins and releases requests by number, models read and write through
``key_values``. ``ExtentArena`` keeps it on CPUs. A GPU will need an arena of blocks and tables behind the same seam.

Guarantees: reservations never exceed the budget. A request that fits the budget finds room: nothing is lost to
fragments, and cached prefixes are evicted first. Only the very same weights share a prefix. No other bytes of a
released request are ever read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from experts.llm.config import ArchSpec
    from experts.llm.key_values import BatchKeyValues, KeyValues
    from experts.llm.token_batch import TokenBatch

LEAST_PREFIX_TOKENS = 16  # what is shorter is read again in less time than is spent looking for it


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape of a token's keys and values: models of one layout can be read in one go."""

    layers: int
    kv_heads: int
    head_size: int
    positions: int  # the context, the most tokens of a sequence
    dtype: torch.dtype

    @classmethod
    def of(cls, spec: ArchSpec, dtype: torch.dtype) -> KvLayout:
        return cls(len(spec.layers), spec.kv_heads, spec.head_size, spec.max_positions, dtype)

    @property
    def head_bytes(self) -> int:
        itemsize: int = self.dtype.itemsize
        return self.head_size * itemsize  # of one token's keys, in one layer

    @property
    def token_bytes(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_bytes  # of one token, in all layers


@dataclass(frozen=True, slots=True)
class Prefix:
    """The beginning of a text. ``weights``: what these tokens were read by, equal for the very same weights only."""

    weights: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KvStatistics:
    """Snapshot of an arena: promised, cached and idle bytes together never exceed the budget."""

    budget_bytes: int
    promised_bytes: int
    cached_bytes: int
    idle_bytes: int  # given back by requests, for the next ones or, where room is short, the machine
    requests: int
    prefixes: int
    prefix_hits: int
    prefix_tokens: int  # not read again, thanks to prefixes


class KvArena(Protocol):
    """Safe to be asked from several threads; a request's keys and values are one thread's at a time."""

    @property
    def budget_bytes(self) -> int:
        """Limit on promised bytes."""

    def set_budget(self, budget_bytes: int) -> None:
        """New budget, at most the first one: cached prefixes and idle memory go, promises stay."""

    def tokens_for(self, layout: KvLayout, tokens: int) -> int:
        """Tokens that a promise of so many holds: at least those, in whole units of the arena."""

    def begin(self, request: int, layout: KvLayout, tokens: int, prefix: Prefix | None = None) -> int:
        """Promise room; gives how many tokens of the prefix are there. MemoryExceeded; ValueError: begun, too long."""

    def grow(self, request: int, tokens: int) -> None:
        """Promise room for so many tokens in all to one that has begun. Raises MemoryExceeded, as ``begin`` does."""

    def release(self, request: int, prefix: Prefix | None = None, *, is_sound: bool = True) -> None:
        """Idempotent. ``prefix``: its tokens, kept while there is room. Not ``is_sound``: it may hold NaN."""

    def place(self, request: int) -> tuple[int, int]:
        """Sort key of a request's place: decode rows in this order are read in the fewest calls."""

    def key_values(self, layout: KvLayout) -> KeyValues:
        """Keys and values of models of this layout; sequences are requests that have begun."""

    def reserve(self, layout: KvLayout, batch: TokenBatch) -> BatchKeyValues:
        """Room for a batch's tokens, within what was promised to its requests. Raises ValueError."""

    def forget_prefixes(self, weights: str | None = None) -> None:
        """Drop what is kept of texts that these weights read, or of all."""

    def statistics(self) -> KvStatistics: ...


@dataclass(frozen=True, slots=True)
class ArenaKeyValues:
    """An arena as models of one layout see it."""

    arena: KvArena
    layout: KvLayout

    def reserve(self, batch: TokenBatch) -> BatchKeyValues:
        return self.arena.reserve(self.layout, batch)

    def release(self, sequence: int) -> None:
        self.arena.release(sequence)
