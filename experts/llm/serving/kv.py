"""Records of an arena: layout of keys and values, and prefix of a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from experts.llm.config import ArchSpec

LEAST_PREFIX_TOKENS = 16  # reading fewer tokens again costs less than the search


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
    """Beginning of a text. ``weights``: key of the weights that read its tokens; identical weights have equal keys."""

    weights: str
    tokens: tuple[int, ...]
