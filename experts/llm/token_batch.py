"""Tokens of one iteration, flat: prefill rows of prompts, then decode rows of one token each.

Everything but attention sees only the tokens (Orca's selective batching, section 3.2); attention sees rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from experts.devices.copies import Upload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """Row of a batch: tokens of one sequence, from position ``first`` on. ``sequence``: the scheduler's number."""

    sequence: int
    first: int
    tokens: Sequence[int]

    @property
    def count(self) -> int:
        return len(self.tokens)

    @property
    def end(self) -> int:
        return self.first + len(self.tokens)


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Tokens of many sequences: prefill rows first, then decode rows, of one token each.

    ``numbers``: what their iteration has on the device, beginning with the batch's own; whoever needs more there adds
    it before ``token_ids`` is read.
    """

    numbers: Upload
    rows: tuple[Chunk, ...]
    starts: tuple[int, ...]  # index of each row's first token
    prefill_count: int
    count: int  # of tokens

    @classmethod
    def of(cls, chunks: Sequence[Chunk], device: torch.device | str = "cpu") -> TokenBatch:
        """A batch of these, rows in their order. ValueError for no chunk, an empty one, or a sequence given twice."""
        rows = tuple(chunks)
        if not rows or not all(row.tokens for row in rows):
            raise ValueError("a batch needs rows, and a row needs tokens")
        if len({row.sequence for row in rows}) != len(rows):
            raise ValueError(f"a sequence has several rows: {sorted(row.sequence for row in rows)}")
        ends = tuple(accumulate(row.count for row in rows))
        prefill_count = max((number for number, row in enumerate(rows, start=1) if row.count > 1), default=0)
        numbers = Upload(device)
        numbers.add(torch.tensor([token for row in rows for token in row.tokens]))
        numbers.add(torch.tensor([position for row in rows for position in range(row.first, row.end)]))
        numbers.add(torch.tensor([end - 1 for end in ends]))
        starts = tuple(end - row.count for end, row in zip(ends, rows, strict=True))
        return cls(numbers, rows, starts, prefill_count, ends[-1])

    @property
    def token_ids(self) -> Tensor:
        return self.numbers[0]

    @property
    def positions(self) -> Tensor:
        return self.numbers[1]

    @property
    def last(self) -> Tensor:
        """Index of each row's last token."""
        return self.numbers[2]

    @property
    def prefill_rows(self) -> tuple[Chunk, ...]:
        return self.rows[: self.prefill_count]

    @property
    def decode_rows(self) -> tuple[Chunk, ...]:
        return self.rows[self.prefill_count :]

    @property
    def decode_start(self) -> int:
        return self.count - len(self.decode_rows)
