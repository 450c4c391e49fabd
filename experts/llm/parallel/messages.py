"""Messages between a driver and its ranks: a header, and the bytes of one tensor."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from experts.children import messages
from experts.llm.parallel.shape import MeshShape
from experts.llm.token_batch import Chunk

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

BEGIN, RUN, HEAD = "begin", "run", "head"  # what a message asks of the ranks


@dataclass(frozen=True, slots=True)
class RankMessage:
    """``header``: plain JSON. ``tensor``: on the CPU, any dtype; None: none."""

    header: Mapping[str, Any]
    tensor: Tensor | None = None

    def packed(self) -> bytes:
        if self.tensor is None:
            return messages.packed([self.header, None])
        layout = [str(self.tensor.dtype).removeprefix("torch."), *self.tensor.shape]
        content = self.tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return messages.packed([self.header, layout], content)

    @classmethod
    def of(cls, message: bytes) -> RankMessage:
        (header, layout), contents = messages.unpacked(message)
        if layout is None:
            return cls(header)
        name, *shape = layout
        content = bytearray(contents[0])
        flat = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
        return cls(header, flat.view(getattr(torch, name)).view(shape))


@dataclass(frozen=True, slots=True)
class RanksSetup:
    """Start of every rank. ``dtype``: torch's name; None: the checkpoint's. ``threads``: operator threads of each
    rank."""

    expert: str
    directory: str
    shape: MeshShape
    dtype: str | None = None
    threads: int = 1

    @property
    def header(self) -> dict[str, Any]:
        return {"do": BEGIN, **asdict(self)}

    @classmethod
    def of(cls, header: Mapping[str, Any]) -> RanksSetup:
        values = {name: value for name, value in header.items() if name != "do"}
        return cls(**values | {"shape": MeshShape(**values["shape"])})


@dataclass(frozen=True, slots=True)
class RankRows:
    """Rows of one batch, in its order, and the tensor group of each. ``gone``: sequences that have ended."""

    rows: tuple[Chunk, ...]
    groups: tuple[int, ...]
    gone: tuple[int, ...] = ()

    @property
    def header(self) -> dict[str, Any]:
        rows = [[row.sequence, row.first, list(row.tokens)] for row in self.rows]
        return {"do": RUN, "rows": rows, "groups": self.groups, "gone": self.gone}

    @classmethod
    def of(cls, header: Mapping[str, Any]) -> RankRows:
        rows = tuple(Chunk(sequence, first, tokens) for sequence, first, tokens in header["rows"])
        return cls(rows, tuple(header["groups"]), tuple(header["gone"]))

    def of_group(self, group: int) -> list[Chunk]:
        return [row for row, own in zip(self.rows, self.groups, strict=True) if own == group]

    def places(self, group: int) -> list[int]:
        """Places of a group's tokens among all tokens of the batch."""
        places: list[int] = []
        start = 0
        for row, own in zip(self.rows, self.groups, strict=True):
            places += range(start, start + row.count) if own == group else ()
            start += row.count
        return places


def count_of(rows: Sequence[Chunk]) -> int:
    return sum(row.count for row in rows)
