"""Contract of arenas: one byte budget for the keys and values of all models in one memory.

Scheduling begins and releases requests by number; models read and write through ``key_values``. ``extents`` is the
arena of CPUs, ``blocks`` that of other devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

    from experts.llm.attention import BatchKeyValues
    from experts.llm.files.config import ArchSpec
    from experts.llm.token_batch import Chunk, TokenBatch

LEAST_PREFIX_TOKENS = 16  # reading fewer tokens again costs less than the search
Held = TypeVar("Held")


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

    def check_length(self, request: int, tokens: int) -> None:
        """Raises ValueError for more tokens than the context."""
        if tokens > self.positions:
            raise ValueError(f"request {request} wants {tokens} tokens, its context is {self.positions}")


@dataclass(frozen=True, slots=True)
class Prefix:
    """Beginning of a text. ``weights``: key of the weights that read its tokens; identical weights have equal keys."""

    weights: str
    tokens: tuple[int, ...]


class KvArena(Protocol):
    """Thread-safe; the keys and values of one request belong to one thread at a time.

    ``keeps_prefixes``: released texts stay as prefixes while there is room. ``promised_bytes``, ``cached_bytes`` (of
    prefixes) and ``idle_bytes`` (free, but to be given back) together never exceed ``budget_bytes``.
    """

    budget_bytes: int
    promised_bytes: int
    cached_bytes: int
    idle_bytes: int
    keeps_prefixes: bool

    def set_budget(self, budget_bytes: int) -> None:
        """Limit promised bytes, at most to the first budget. Prefixes and idle memory make way; promises stay."""

    def tokens_for(self, layout: KvLayout, tokens: int) -> int:
        """Round up to whole units of the arena."""

    def begin(self, request: int, layout: KvLayout, tokens: int, prefix: Prefix | None = None) -> int:
        """Reserve room; returns the number of prefix tokens already present.

        Raises MemoryExceeded, AddressesExceeded, and ValueError for a request that has begun or exceeds its context.
        """

    def grow(self, request: int, tokens: int) -> None:
        """Raise the promise to a request that has begun to ``tokens`` in all. Raises as ``begin`` does."""

    def share(self, request: int, source: int, tokens: int) -> None:
        """Give the first tokens of a request to another of its layout, within the promise to that."""

    def release(self, request: int, prefix: Prefix | None = None, *, is_sound: bool = True) -> None:
        """Idempotent. ``prefix``: its tokens, kept while there is room. Not ``is_sound``: it may hold NaN."""

    def holds(self, request: int) -> bool:
        """True from ``begin`` to ``release``."""

    def place(self, request: int) -> tuple[int, int]:
        """Sort key of a request's place: decode rows in this order are read in the fewest calls."""

    def close(self) -> None:
        """Forget all requests and prefixes, and give the memory back. No batch is under way, and no request begins."""

    def key_values(self, layout: KvLayout) -> ArenaKeyValues:
        """KeyValues of the models of one layout."""

    def reserve(self, layout: KvLayout, batch: TokenBatch) -> BatchKeyValues:
        """Reserve room for a batch's tokens, within the promises to its requests. Raises ValueError."""


@dataclass(frozen=True, slots=True)
class ArenaKeyValues:
    """KeyValues of models of one layout; sequences are requests that have begun."""

    arena: KvArena
    layout: KvLayout

    def holds(self, sequence: int) -> bool:
        return self.arena.holds(sequence)

    def reserve(self, batch: TokenBatch) -> BatchKeyValues:
        return self.arena.reserve(self.layout, batch)


class KvLease(Protocol):
    """Room of a request: tokens ``promised`` to it, and those that it ``held`` at last."""

    layout: KvLayout
    held: int

    @property
    def promised(self) -> int: ...


Leased = TypeVar("Leased", bound=KvLease)


def checked_lease(lease: Leased | None, layout: KvLayout, row: Chunk) -> Leased:
    """The lease of a row's request. Raises ValueError for none of this layout, or without room for the row."""
    if lease is None or lease.layout != layout:
        raise ValueError(f"request {row.sequence} has not begun with this layout")
    if row.first > lease.held:
        raise ValueError(f"request {row.sequence} holds {lease.held} tokens, a row begins at {row.first}")
    if row.end > lease.promised:
        raise ValueError(f"request {row.sequence} was promised {lease.promised} tokens, a row ends at {row.end}")
    return lease


@dataclass(slots=True, eq=False)
class CachedPrefix(Generic[Held]):
    """Prefix that a released request left. ``held``: where its keys and values are."""

    layout: KvLayout
    prefix: Prefix
    held: Held
    used: int  # last use, counted in uses of the index

    def common(self, layout: KvLayout, wanted: Prefix) -> int:
        if self.prefix.weights != wanted.weights or self.layout != layout:
            return 0
        return common_length(self.prefix.tokens, wanted.tokens)


class PrefixIndex(Generic[Held]):
    """Prefixes that an arena keeps; it says which are found, replaced and evicted first."""

    def __init__(self) -> None:
        self._cached: list[CachedPrefix[Held]] = []
        self._uses = 0

    @property
    def oldest_first(self) -> list[CachedPrefix[Held]]:
        return sorted(self._cached, key=lambda one: one.used)

    def add(self, layout: KvLayout, prefix: Prefix, held: Held) -> None:
        self._uses += 1
        self._cached.append(CachedPrefix(layout, prefix, held, self._uses))

    def remove(self, cached: CachedPrefix[Held]) -> None:
        self._cached.remove(cached)

    def replaced_by(self, layout: KvLayout, prefix: Prefix) -> list[CachedPrefix[Held]] | None:
        """Prefixes that this one contains; None if it is too short to keep, or another contains it."""
        commons = [(one, one.common(layout, prefix)) for one in self._cached]
        length = len(prefix.tokens)
        if length < LEAST_PREFIX_TOKENS or any(common == length for _, common in commons):
            return None
        return [one for one, common in commons if common == len(one.prefix.tokens)]

    def best(self, layout: KvLayout, wanted: Prefix | None) -> tuple[CachedPrefix[Held] | None, int]:
        """Longest common prefix; a search of some hundred takes less time than copying one page."""
        if wanted is None or len(wanted.tokens) < LEAST_PREFIX_TOKENS:
            return None, 0
        commons = ((one, one.common(layout, wanted)) for one in self._cached)
        best, common = max(commons, key=lambda each: each[1], default=(None, 0))
        if best is None or common < LEAST_PREFIX_TOKENS:
            return None, 0
        self._uses += 1
        best.used = self._uses
        return best, common


def common_length(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Length of the common prefix of both."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:  # the first ``low`` are equal, the first ``high`` are not
        middle = (low + high) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle)
    return low
