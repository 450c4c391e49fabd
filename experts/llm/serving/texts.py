"""State of a text between iterations: its tokens, and the chunk that it needs next.

``WrittenText`` samples token by token; ``RoutedText`` reads its prompt, then each choice after it, and weighs the
choices. A text that lost its keys and values reads its tokens again from the beginning, and continues with the same
tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from experts.expert import Prediction
from experts.llm.serving.generation import Ending, RefusedText
from experts.llm.serving.sampling import Sampler
from experts.llm.token_batch import Chunk

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from experts.llm.model import LanguageModel
    from experts.llm.serving.generation import TextRequest, Token


@dataclass(frozen=True, slots=True)
class Turn:
    """A request's part in a quantum."""

    request: int
    expert: str
    model: LanguageModel  # may be a new object each time, of equal weights
    text: TextRequest
    weights: str | None = None  # key that only identical weights share; None: no prefix is kept
    lease: int | None = None  # tokens it may hold for now, never fewer than before; None: the most ever


class TextState:
    """Base of both kinds. ``arrival`` and ``ran``: in counts of the engine."""

    def __init__(self, turn: Turn, arrival: int) -> None:
        self.request, self.expert, self.text, self.weights = turn.request, turn.expert, turn.text, turn.weights
        self.arrival = arrival
        self.ran = 0
        self.tokens = list(turn.text.generation.prompt)
        self.held = 0  # tokens whose keys and values are stored
        self.checked = 0  # of those, tokens behind finite logits
        self.has_room = False  # the arena has promised it room
        self.promised = 0  # tokens that the arena has promised room for
        self.lease = self.most_tokens  # tokens that it may hold for now
        self.result: Prediction | RefusedText | None = None

    @property
    def most_tokens(self) -> int:
        return self.text.generation.most_tokens

    @property
    def written(self) -> int:
        return len(self.tokens) - len(self.text.generation.prompt)

    @property
    def is_sound(self) -> bool:
        return self.checked == self.held  # without NaN or infinity

    @property
    def is_whole(self) -> bool:
        return False

    @property
    def unread(self) -> int:
        return len(self.tokens) - self.held

    @property
    def next_tokens(self) -> int:
        return min(self.unread, self.promised - self.held)

    def chunk(self, count: int) -> Chunk:
        return Chunk(self.request, self.held, self.tokens[self.held : self.held + count])

    def wanted(self, count: int) -> int:
        """Count of a chunk's last tokens for which the text needs logits."""
        return 1 if count == self.unread else 0

    def ran_for(self, count: int) -> None:
        self.held += count

    def lost(self, held: int = 0) -> None:
        """Keys and values are lost, except those of the first ``held`` tokens."""
        self.held = self.checked = held

    def end(self, ending: Ending) -> None:
        self.result = Prediction(ending.value, 1.0)

    def refuse(self, reason: str) -> None:
        self.result = RefusedText(reason)


class WrittenText(TextState):
    """Text that continues with sampled tokens."""

    def __init__(self, turn: Turn, arrival: int) -> None:
        super().__init__(turn, arrival)
        generation = turn.text.generation
        read = len(generation.prompt) - generation.written
        self.sampler = Sampler(generation.sampling, generation.prompt[:read], generation.prompt[read:])

    def follows(self, token: Token) -> None:
        """Take the next token. A stop token ends the text and is not written."""
        self.checked = self.held
        generation = self.text.generation
        if token.id in generation.stop_tokens:
            self.end(Ending.STOP)
            return
        self.tokens.append(token.id)
        self.sampler.wrote(token.id)
        try:
            is_over = self.text.writer.write(token)
        except Exception as error:  # noqa: BLE001 - the boundary to a caller's writer: its own text ends
            self.refuse(f"its reader failed: {type(error).__name__}: {error}")
            return
        if is_over:
            self.end(Ending.STOP)
        elif self.written >= generation.most_new_tokens:
            self.end(Ending.LENGTH)


class RoutedText(TextState):
    """Text of a router. Choices of several tokens are read one by one, each directly after the prompt."""

    def __init__(self, turn: Turn, arrival: int) -> None:
        super().__init__(turn, arrival)
        self._choices: Mapping[str, tuple[int, ...]] = turn.text.generation.choices or {}
        self._logprobs: dict[str, float] = {}  # of the weighed tokens of each choice
        self._pending = [label for label, tokens in self._choices.items() if len(tokens) > 1]

    def end(self, ending: Ending) -> None:
        self.result = Prediction("", 1.0)  # no label: a choice may have the ending's name

    @property
    def is_whole(self) -> bool:
        return bool(self._logprobs) and self.held == len(self.tokens)

    @property
    def unread(self) -> int:
        if self.held < len(self.tokens) or not self._pending:
            return len(self.tokens) - self.held
        return len(self._next_choice)

    @property
    def left_to_read(self) -> int:
        return len(self.tokens) - self.held + sum(len(self._choices[label]) - 1 for label in self._pending)

    def chunk(self, count: int) -> Chunk:
        if self.held < len(self.tokens):
            return super().chunk(count)
        return Chunk(self.request, self.held, self._next_choice)

    def wanted(self, count: int) -> int:
        if self.held < len(self.tokens):
            return 1 if count == self.unread and not self._logprobs else 0
        return count

    def ran_for(self, count: int) -> None:
        if self.held < len(self.tokens):
            self.held += count  # a choice's tokens are dropped: the next choice begins in their place

    def weighs(self, logits: Tensor) -> None:
        """Take logits after the prompt, or after each token of a choice but its last. They must be finite."""
        logprobs = logits.float().log_softmax(dim=-1)
        self.checked = self.held
        if not self._logprobs:
            first = [tokens[0] for tokens in self._choices.values()]
            self._logprobs = dict(zip(self._choices, logprobs[0, first].tolist(), strict=True))
        else:
            label = self._pending.pop(0)
            later = torch.tensor(self._choices[label][1:], device=logits.device)
            self._logprobs[label] += float(logprobs.gather(1, later[:, None]).sum())
        if not self._pending:
            self._choose()

    @property
    def _next_choice(self) -> tuple[int, ...]:
        return self._choices[self._pending[0]][:-1]

    def _choose(self) -> None:
        label = max(self._logprobs, key=lambda one: self._logprobs[one])
        best = self._logprobs[label]
        among = sum(math.exp(logprob - best) for logprob in self._logprobs.values())
        self.result = Prediction(label, 1 / among)


def text_of(turn: Turn, arrival: int) -> TextState:
    return (WrittenText if turn.text.generation.choices is None else RoutedText)(turn, arrival)
