"""Texts to train on: files, in tokens of a model, divided into rows, of which a tenth is held out.

A file ``.jsonl`` has a text on each line, as ``{"text": "..."}``; any other file is one text, in UTF-8. A text ends
with the model's end token, and is divided into rows where it is longer than one. Deterministic by seed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from experts.errors import ConfigError
from experts.llm.training.step import TextBatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from experts.llm.text.tokenizer import TextModel

HELD_OUT_EVERY = 10  # rows
JSONL = ".jsonl"


@dataclass(frozen=True, slots=True)
class TrainingTexts:
    """Rows of at most ``batch_tokens``, shuffled: those to train on, and those held out."""

    rows: tuple[tuple[int, ...], ...]
    held_out: tuple[tuple[int, ...], ...]
    batch_tokens: int

    @property
    def largest_token(self) -> int:
        return max(max(row) for row in (*self.rows, *self.held_out))

    def batches(self, generator: torch.Generator) -> Iterator[TextBatch]:
        """Batches without end; each row is taken once before any is taken again."""
        while True:
            order = torch.randperm(len(self.rows), generator=generator).tolist()
            yield from _batches([self.rows[number] for number in order], self.batch_tokens)

    def held_out_batches(self) -> list[TextBatch]:
        return list(_batches(sorted(self.held_out, key=len), self.batch_tokens))


def read_texts(files: Sequence[Path], model: TextModel, batch_tokens: int, seed: int) -> TrainingTexts:
    """Raises ConfigError: a file that cannot be read, a line without a text, or too few texts."""
    end = min(model.stop_tokens, default=None)  # of several, the first in the vocabulary ends a text, not a turn
    length = min(model.context_tokens, batch_tokens)
    rows: list[tuple[int, ...]] = []
    for text in (text for file in files for text in _texts_of(file)):
        tokens = model.encode(text)
        if end is not None and tokens[-1:] != (end,):
            tokens = (*tokens, end)
        pieces = (tokens[start : start + length] for start in range(0, len(tokens), length))
        rows += [piece for piece in pieces if len(piece) > 1]
    if len(rows) < HELD_OUT_EVERY:
        raise ConfigError(
            f"the texts make {len(rows)} rows of up to {length} tokens, and at least {HELD_OUT_EVERY} are needed, of "
            "which one is held out - give more texts to --texts, or a lower --batch-tokens"
        )
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    held_out = tuple(rows[number] for number in order[::HELD_OUT_EVERY])
    taken = tuple(rows[number] for place, number in enumerate(order) if place % HELD_OUT_EVERY)
    return TrainingTexts(taken, held_out, batch_tokens)


def _texts_of(file: Path) -> Iterator[str]:
    try:
        content = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read as text: {error} - give files of text in UTF-8") from error
    if file.suffix != JSONL:
        yield content
        return
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError):
            text = None
        if not isinstance(text, str):
            raise ConfigError(f'{file}:{number}: is no text - write {{"text": "..."}} on each line')
        yield text


def _batches(rows: Sequence[tuple[int, ...]], batch_tokens: int) -> Iterator[TextBatch]:
    """Rows in their order, as many in each batch as fit with their padding."""
    batch: list[tuple[int, ...]] = []
    for row in rows:
        if batch and (len(batch) + 1) * max(len(row), *map(len, batch)) > batch_tokens:
            yield TextBatch.of(batch)
            batch = []
        batch.append(row)
    yield TextBatch.of(batch)
