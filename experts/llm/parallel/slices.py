"""Part of each tensor of a model that a rank holds.

Source: DeepSpeed-MoE (arXiv 2201.05596), section 5.2. Queries, keys, values and a network's first matrix are cut by
rows, the matrix behind them by columns, so that one sum follows each pair (Megatron-LM, arXiv 1909.08053, section 3).
Embedding and head are cut by the vocabulary. A bias behind a sum is held by the first rank only.
Guarantees: the parts of a replica's ranks make the whole model, each number once, but for what tensor groups repeat:
norms, gates, and keys' heads where there are fewer than tensor ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from experts.errors import ModelUnsupported
from experts.llm.files.config import QkNorm
from experts.llm.files.names import EMBEDDING, HEAD, assemblies
from experts.llm.parallel.shape import pieces_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from experts.llm.files.config import ArchSpec, LayerSpec
    from experts.llm.parallel.shape import MeshShape, MoePiece

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Cut:
    """Part of a tensor, seen as a matrix of so many columns. ``rows``: ranges, ascending; ``columns``: one range."""

    shape: tuple[int, ...]  # of the part
    matrix_columns: int
    rows: tuple[Range, ...]
    columns: Range


def local_spec(spec: ArchSpec, shape: MeshShape, expert: str) -> ArchSpec:
    """The spec with a tensor rank's own heads. Raises ModelUnsupported where ranks do not divide heads."""
    degree = shape.tensor
    if spec.heads % degree or (spec.kv_heads % degree and degree % spec.kv_heads):
        raise ModelUnsupported(
            expert,
            "num_attention_heads",
            f"{spec.heads} heads, {spec.kv_heads} of keys, cannot be cut over {degree} tensor ranks: choose a number "
            "that divides both",
        )
    return replace(spec, heads=spec.heads // degree, kv_heads=max(spec.kv_heads // degree, 1))


def bytes_of_ranks(spec: ArchSpec, shape: MeshShape, itemsize: int) -> int:
    """Bytes of the weights that all ranks hold together."""
    numbers = [
        math.prod(cut.shape) for rank in range(shape.replica_ranks) for cut in cuts_of(spec, shape, rank).values()
    ]
    return shape.data * sum(numbers) * itemsize


def share(size: int, degree: int, index: int) -> Range:
    """A rank's part of something that is cut as evenly as possible."""
    return size * index // degree, size * (index + 1) // degree


def cuts_of(spec: ArchSpec, shape: MeshShape, replica_rank: int) -> dict[str, Cut]:
    """Part of each tensor that a rank holds; a tensor that it does not hold is missing."""
    return dict(_Cutter(spec, shape, replica_rank).cuts())


class _Cutter:
    def __init__(self, spec: ArchSpec, shape: MeshShape, replica_rank: int) -> None:
        self._spec = spec
        self._shape = shape
        self._rank = replica_rank
        self._index = replica_rank % shape.tensor

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        for assembly in assemblies(self._spec):
            cut = self._cut(assembly.name, assembly.shape)
            if cut is not None:
                yield assembly.name, cut

    def _cut(self, name: str, shape: tuple[int, ...]) -> Cut | None:
        prefix, _, part = name.rpartition(".")
        if name in {EMBEDDING, HEAD}:
            return _rows(shape, [self._share(shape[0])])
        if ".experts" in prefix:
            return self._of_experts(self._spec.layers[int(name.split(".")[1])], part, shape)
        if part in {"qkv", "qkv_bias"}:
            return _rows(shape, self._heads())
        if part in {"q_norm", "k_norm"} and self._spec.qk_norm is QkNorm.WHOLE:
            return _rows(shape, [self._heads()[0] if part == "q_norm" else self._key_heads(0)])
        if part in {"up", "up_bias"}:
            return _rows(shape, self._raised(shape[0], self._share(self._width(shape[0]))))
        if part in {"output", "down"}:
            return _columns(shape, self._share(shape[1]))
        if part in {"output_bias", "down_bias"} and self._index:
            return None
        return _rows(shape, [(0, shape[0])])

    def _share(self, size: int) -> Range:
        return share(size, self._shape.tensor, self._index)

    def _heads(self) -> list[Range]:
        """Rows of own queries, keys and values in their stacked matrix."""
        spec = self._spec
        queries = self._share(spec.heads)
        keys, values = (self._key_heads(start) for start in (spec.query_size, spec.query_size + spec.kv_size))
        return [(queries[0] * spec.head_size, queries[1] * spec.head_size), keys, values]

    def _key_heads(self, start: int) -> Range:
        """Own heads of keys; ranks outnumbering them share one."""
        spec = self._spec
        begin = spec.kv_heads * self._index // self._shape.tensor
        end = begin + max(spec.kv_heads // self._shape.tensor, 1)
        return start + begin * spec.head_size, start + end * spec.head_size

    def _width(self, raised: int) -> int:
        return raised // 2 if self._spec.mlp.is_gated else raised

    def _raised(self, raised: int, own: Range) -> list[Range]:
        """Rows of a network's first matrix for a part of its width: if gated the gate's, then the others."""
        width = self._width(raised)
        return [(start + own[0], start + own[1]) for start in range(0, raised, width)]

    def _of_experts(self, layer: LayerSpec, part: str, shape: tuple[int, ...]) -> Cut | None:
        pieces = own_pieces(layer, self._shape, self._rank)
        if not pieces:
            return None
        numbers = [piece.moe_expert for piece in pieces]
        own = (pieces[0].begin, pieces[0].end)  # a rank's pieces have one width
        if part == "down_bias" and own[0]:
            return None
        if part in {"up", "up_bias"}:
            rows = [(n * shape[1] + a, n * shape[1] + b) for n in numbers for a, b in self._raised(shape[1], own)]
            columns = shape[2] if part == "up" else 1
            height = sum(end - begin for begin, end in rows) // len(numbers)
            return Cut((len(numbers), height, *shape[2:]), columns, tuple(rows), (0, columns))
        height = shape[1]
        rows = [(numbers[0] * height, (numbers[-1] + 1) * height)]
        if part == "down_bias":
            return Cut((len(numbers), height), 1, tuple(rows), (0, 1))
        return Cut((len(numbers), height, own[1] - own[0]), shape[2], tuple(rows), own)


def own_pieces(layer: LayerSpec, shape: MeshShape, replica_rank: int) -> tuple[MoePiece, ...]:
    """Pieces of a layer's moe_experts that a rank holds: neighbours of one width."""
    assert layer.moe is not None, "a layer with moe_experts"
    every = pieces_of(shape, layer.moe.moe_experts, layer.moe.size)
    return tuple(piece for piece in every if piece.rank == replica_rank)


def _rows(shape: tuple[int, ...], ranges: list[Range]) -> Cut:
    count = sum(end - begin for begin, end in ranges)
    columns = shape[1] if len(shape) > 1 else 1
    return Cut((count, *shape[1:]), columns, tuple(ranges), (0, columns))


def _columns(shape: tuple[int, ...], own: Range) -> Cut:
    return Cut((shape[0], own[1] - own[0]), shape[1], ((0, shape[0]),), own)
