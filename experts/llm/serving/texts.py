"""State of a text at one expert: its tokens, the chunk that it needs next, its result.

``RunningText`` samples token by token; ``RoutedText`` reads its prompt, then each choice after it, and weighs the
choices. A text that lost its keys and values reads its tokens again from the beginning, and continues with the same
tokens, also on another engine.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from experts.expert import Prediction, Rejected
from experts.llm.arenas.key_values import LEAST_PREFIX_TOKENS
from experts.llm.serving.generation import Ending
from experts.llm.serving.lookup import MOST_DRAFTED, PromptLookup
from experts.llm.serving.sampling import Sampler
from experts.llm.token_batch import Chunk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from experts.llm.serving.generation import TextRequest, Token


@dataclass(eq=False)
class RunningText:
    """A request's text at one expert, which continues with sampled tokens. ``asked``: as its caller wants it.

    ``weights``: key that only identical weights share; None: no prefix is kept. ``lease``: tokens that the text may
    hold for now, never fewer than before; None: the most ever.
    """

    request: int
    expert: str
    asked: TextRequest
    weights: str | None = None
    lease: int | None = None
    tokens: list[int] = field(init=False)
    sampler: Sampler = field(init=False)
    lookup: PromptLookup = field(default_factory=PromptLookup, init=False)
    result: Prediction | Rejected | None = field(default=None, init=False)
    arrival: int = field(default=0, init=False)  # in counts of its engine, as is ``ran``, its last iteration
    ran: int = field(default=0, init=False)
    held: int = field(default=0, init=False)  # tokens whose keys and values are stored
    checked: int = field(default=0, init=False)  # of those, tokens behind finite logits
    has_room: bool = field(default=False, init=False)  # the arena has promised it room
    promised: int = field(default=0, init=False)  # tokens that the arena has promised room for
    source: RunningText | None = field(default=None, init=False)  # it waits for this text to read what both begin with
    owner: int = field(default=0, init=False)  # in a quantum: place of its model in its family
    part: int = field(default=0, init=False)  # in an iteration: its tokens, with those of its draft
    draft: list[int] = field(default_factory=list, init=False)
    wanted: int = field(default=0, init=False)  # and the last of these for which it needs logits

    def __post_init__(self) -> None:
        self.tokens = list(self.asked.prompt)
        self.sampler = Sampler(self.asked.sampling, self.asked.prompt, self.asked.grammar)

    def moved(self, weights: str | None) -> RunningText:
        """The text for another engine. The sampler and the tokens are the same: the engine before adds no more."""
        other = copy(self)
        other.weights, other.has_room, other.promised = weights, False, 0
        other.lost()
        return other

    @property
    def most_tokens(self) -> int:
        return self.asked.most_tokens

    @property
    def leased(self) -> int:
        return self.most_tokens if self.lease is None else min(self.lease, self.most_tokens)

    @property
    def written(self) -> int:
        return len(self.tokens) - len(self.asked.prompt)

    @property
    def is_sound(self) -> bool:
        return self.checked == self.held  # without NaN or infinity

    @property
    def is_whole(self) -> bool:
        """Its next tokens run in one piece."""
        return False

    @property
    def unread(self) -> int:
        return len(self.tokens) - self.held

    @property
    def left_to_read(self) -> int:
        return 0 if self.unread == 1 and self.held else self.unread

    @property
    def next_tokens(self) -> int:
        return min(self.unread, self.promised - self.held)

    @property
    def most_drafted(self) -> int:
        """Tokens that a draft may have: the lease has room for them, and the text for one more behind them."""
        return min(self.promised - self.held - 1, self.asked.most_new_tokens - self.written - 1, MOST_DRAFTED)

    def take_part(self, count: int, drafted: int = 0) -> None:
        """Take part in an iteration, with the next ``count`` tokens, and ``drafted`` tokens of a draft behind them."""
        self.draft = self.lookup.draft(self.tokens, drafted)
        self.part, self.wanted = count + len(self.draft), self._wanted(count) + len(self.draft)

    def _wanted(self, count: int) -> int:
        return 1 if count == self.unread and self.asked.most_new_tokens else 0

    @property
    def spared(self) -> int:
        """Tokens at its beginning that it need not read itself where their keys and values are stored already."""
        behind = min(len(self.tokens), self.leased) - 1
        return behind if self.asked.reading is None else min(behind, self.asked.reading.read)

    def common_with(self, other: RunningText) -> int:
        """Tokens to take over from another text of equal weights once it has read its prompt; 0: too few, or no prompt
        that this one begins with."""
        common = min(len(other.asked.prompt), self.spared)
        is_worth = common >= max(self.held + 1, LEAST_PREFIX_TOKENS)
        return common if is_worth and self.tokens[:common] == other.tokens[:common] else 0

    def chunk(self) -> Chunk:
        own = self.tokens[self.held : self.held + self.part - len(self.draft)]
        return Chunk(self.request, self.held, own + self.draft)

    def has_run(self, iteration: int) -> None:
        self.ran = iteration
        self.held += self.part - len(self.draft)
        if self.result is None and self.held == len(self.tokens) and not self.asked.most_new_tokens:
            self.checked = self.held
            self.end(Ending.LENGTH)

    def accept(self, place: int) -> bool:
        """True if the last token is the draft's at this place: its keys and values are stored."""
        is_right = self.result is None and place < len(self.draft) and self.draft[place] == self.tokens[-1]
        self.held += is_right
        return is_right

    def follows(self, token: Token) -> None:
        """Take the next token. A stop token ends the text and is not written."""
        self.checked = self.held
        grammar = self.sampler.grammar
        if grammar is not None and grammar.fault is not None:
            self.refuse(f"the text's grammar cannot be continued: {grammar.fault}")
            return
        if token.id in self.asked.stop_tokens:
            self.end(Ending.STOP)
            return
        self.tokens.append(token.id)
        self.sampler.wrote(token.id)
        self.lookup.wrote(self.tokens)
        try:
            is_over = self.asked.writer.write(token)
        except Exception as error:  # noqa: BLE001 - the boundary to a caller's writer: its own text ends
            self.refuse(f"its reader failed: {type(error).__name__}: {error}")
            return
        if is_over or (grammar is not None and grammar.is_complete):
            self.end(Ending.STOP)
        elif self.written >= self.asked.most_new_tokens:
            self.end(Ending.LENGTH)

    def lost(self, held: int = 0) -> None:
        """Keys and values are lost, except those of the first ``held`` tokens."""
        self.held = self.checked = held

    def abandoned(self) -> None:
        """Its part has run in some layers: what they stored behind ``held`` was never checked."""
        self.checked = -1

    def end(self, ending: Ending) -> None:
        self.result = Prediction(ending.value, 1.0)

    def refuse(self, reason: str) -> None:
        self.result = Rejected(reason)


class RoutedText(RunningText):
    """Text of a router. Choices of several tokens are read one by one, each directly after the prompt."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._choices = self.asked.choices or {}
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

    def _wanted(self, count: int) -> int:
        if self.held < len(self.tokens):
            return 1 if count == self.unread and not self._logprobs else 0
        return count

    def chunk(self) -> Chunk:
        if self.held < len(self.tokens):
            return super().chunk()
        return Chunk(self.request, self.held, self._next_choice)

    def has_run(self, iteration: int) -> None:
        self.ran = iteration
        if self.held < len(self.tokens):
            self.held += self.part  # a choice's tokens are dropped: the next choice begins in their place

    @property
    def weighed(self) -> list[tuple[int, int]]:
        """Tokens whose logprobs it wants, behind which of its wanted rows: after the prompt each choice's first one,
        then those of one choice after the others."""
        if not self._logprobs:
            return [(0, tokens[0]) for tokens in self._choices.values()]
        return list(enumerate(self._choices[self._pending[0]][1:]))

    def weighs(self, logprobs: Sequence[float]) -> None:
        """Take the logprobs of ``weighed``, of finite logits."""
        self.checked = self.held
        if not self._logprobs:
            self._logprobs = dict(zip(self._choices, logprobs, strict=True))
        else:
            self._logprobs[self._pending.pop(0)] += math.fsum(logprobs)
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


def text_of(
    request: int, expert: str, asked: TextRequest, weights: str | None = None, lease: int | None = None
) -> RunningText:
    """The text of a request at an expert. Arguments as of RunningText."""
    return (RunningText if asked.choices is None else RoutedText)(request, expert, asked, weights, lease)
