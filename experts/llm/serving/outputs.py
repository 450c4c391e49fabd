"""Results of one iteration for its texts: planned before its pass, computed behind it, and read after one download.

Guarantees: nothing between the batch's upload and ``fetch`` asks the device for a value. A text's results do not depend
on its neighbours.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from experts.devices.copies import Download
from experts.llm.serving.readings import POSITIONS_AT_ONCE
from experts.llm.serving.sampling import SampledRows, WeighedRows, sample
from experts.llm.serving.texts import RoutedText

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from experts.llm.serving.family import ModelFamily
    from experts.llm.serving.generation import Token
    from experts.llm.serving.texts import RunningText
    from experts.llm.token_batch import TokenBatch


class Outputs:
    """Next tokens of texts, weights of choices, readings of prompts. ``texts``: of the batch's rows."""

    def __init__(self, texts: Sequence[RunningText], batch: TokenBatch, family: ModelFamily) -> None:
        numbers = batch.numbers
        self._texts, self._batch, self._family = texts, batch, family
        self._results = Download(numbers.device)
        self._told: list[tuple[RunningText, Callable[[], bool]]] = []
        self._following = {
            text: numbers.add(torch.tensor(text.asked.prompt[text.held + 1 : text.held + text.part + 1]))
            for text in texts
            if text.asked.reading is not None
        }
        self._logits: Tensor | None = None
        wanting = [text for text in texts if text.wanted]
        ends = list(accumulate(text.wanted for text in wanting))
        self._starts = {text: end - text.wanted for text, end in zip(wanting, ends, strict=True)}
        self._plan_logits(wanting)
        self._plan_tokens([text for text in wanting if not isinstance(text, RoutedText)])
        self._plan_choices([text for text in wanting if isinstance(text, RoutedText)])

    def _plan_logits(self, wanting: Sequence[RunningText]) -> None:
        ends = [start + text.part for start, text in zip(self._batch.starts, self._texts, strict=True)]
        places = [n for end, text in zip(ends, self._texts, strict=True) for n in range(end - text.wanted, end)]
        self._places = self._batch.numbers.add(torch.tensor(places)) if places else None
        owners = [text.owner for text in wanting for _ in range(text.wanted)]
        self._head = self._family.head(owners, self._batch.numbers) if places else None
        self._count = len(places)

    def _plan_tokens(self, writing: Sequence[RunningText]) -> None:
        """A text that changes its logits by what it wrote samples behind its draft step by step (``token``)."""
        together = [(text, 1 if text.sampler.changes_logits else text.wanted) for text in writing]
        rows = [self._starts[text] + n for text, count in together for n in range(count)]
        self._drawn: dict[int, Token | None] = dict.fromkeys(rows)
        is_all = len(rows) == self._count
        self._rows = None if is_all or not rows else self._batch.numbers.add(torch.tensor(rows))
        samplers = [text.sampler for text, count in together for _ in range(count)]
        self._sampled = SampledRows(samplers, self._batch.numbers) if rows else None

    def _plan_choices(self, routed: Sequence[RoutedText]) -> None:
        rows: list[int] = []
        wanted: list[tuple[int, int]] = []
        self._choices: dict[RunningText, tuple[int, slice]] = {}  # first of its rows, and its logprobs
        for text in routed:
            own = [(len(rows) + row, token) for row, token in text.weighed]
            self._choices[text] = (len(rows), slice(len(wanted), len(wanted) + len(own)))
            rows += self._rows_of(text)
            wanted += own
        self._weighed = WeighedRows(rows, wanted, self._batch.numbers) if rows else None
        self._sound: list[bool] = []
        self._logprobs: list[float] = []

    def _rows_of(self, text: RunningText) -> range:
        return range(self._starts[text], self._starts[text] + text.wanted)

    def compute(self, hidden: Tensor, pause: Callable[[], None]) -> None:
        """``hidden``: of all tokens, behind the last layer. ``pause``: called between steps, may raise."""
        for start, text in zip(self._batch.starts, self._texts, strict=True):
            self._read(text, hidden[start : start + text.part], pause)
        if self._places is None or self._head is None:
            return
        with torch.inference_mode():
            logits = self._logits = self._head(hidden[self._batch.numbers[self._places]])
            if self._sampled is not None:
                rows = logits if self._rows is None else logits[self._batch.numbers[self._rows]]
                self._sampled.run(rows, self._results)
            if self._weighed is not None:
                self._weighed.run(logits, self._results)

    def _read(self, text: RunningText, hidden: Tensor, pause: Callable[[], None]) -> None:
        reading = text.asked.reading
        if reading is None or text.held >= len(text.asked.prompt):
            return
        following, model = self._batch.numbers[self._following[text]], self._family.models[text.owner]
        for start in range(0, text.part, POSITIONS_AT_ONCE):
            pause()
            own = slice(start, start + POSITIONS_AT_ONCE)
            told = reading.take(
                text.asked.prompt, text.held + start, hidden[own], following[start:], model, self._results
            )
            self._told.append((text, told))

    def fetch(self) -> None:
        """Wait for the device, and for all results."""
        self._results.fetch()
        if self._sampled is not None:
            self._drawn = dict(zip(self._drawn, self._sampled.tokens(self._results), strict=True))
        if self._weighed is not None:
            self._sound, self._logprobs = self._weighed.logprobs(self._results)

    def tell(self) -> list[RunningText]:
        """Pass readings their results; returns the texts whose states were not finite."""
        refused: list[RunningText] = []
        for text, told in self._told:
            if text not in refused and not told():
                refused.append(text)
        return refused

    def token(self, text: RunningText, step: int) -> Token | None:
        """The text's next token once ``step`` tokens of its draft are right; None where its logits are not finite."""
        row = self._starts[text] + step
        if row not in self._drawn:
            assert self._logits is not None, "a text that samples wants logits"
            (self._drawn[row],) = sample(self._logits[row : row + 1], [text.sampler])
        return self._drawn[row]

    def is_sound(self, text: RunningText) -> bool:
        """True if all its logits are finite, also behind tokens of a draft that were not accepted."""
        assert self._logits is not None, "a text that samples wants logits"
        rows = self._rows_of(text)
        if all(row in self._drawn for row in rows):
            return all(self._drawn[row] is not None for row in rows)
        return bool(self._logits[rows.start : rows.stop].amax(dim=-1).isfinite().all())

    def weights(self, text: RoutedText) -> list[float] | None:
        """Logprobs that the text weighs; None where its logits are not finite."""
        row, wanted = self._choices[text]
        return self._logprobs[wanted] if all(self._sound[row : row + text.wanted]) else None
