"""TextWriter: turns tokens into text that may be shown, incrementally.

Guarantees: the pieces joined are the text. A piece ends with a whole character, unless PATIENCE tokens in a row
complete none, and so does the text: what its last tokens only began is left out. A stop string may begin and end within
tokens; neither part of it nor text after it is shown.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from experts.errors import PromptInvalid
from experts.llm.serving.generation import Piece, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from experts.llm.serving.generation import CallStyle
    from experts.llm.text.tokenizer import TextModel

PATIENCE = 16  # tokens without a whole character among them, which has four bytes at most
MOST_STOPS = 16
MOST_STOP_CHARACTERS = 500  # the most that is held back
HALF = "\ufffd"  # decoded from invalid or incomplete characters


class TextWriter:
    """A ``generation.Writer``. ``show`` must not raise. ``written``: tokens, those of a stop string included."""

    def __init__(
        self,
        model: TextModel,
        prompt: Sequence[int],
        stops: Sequence[str],
        show: Callable[[Piece], None],
        *,
        shows_tokens: bool = True,
        calls: CallStyle | None = None,
    ) -> None:
        """``prompt``: tokens before the text. ``calls``: style whose marks are shown. Pieces have no tokens of a stop
        string. Raises PromptInvalid for invalid stop strings."""
        self.written = 0
        self.is_stopped = False
        self._model = model
        marks = frozenset[int]() if calls is None else model.marks_of(calls)
        self._words = Words(partial(model.decode, spelled=marks), prompt[-PATIENCE:])
        self._calls = calls
        self._stops = StopStrings(check_stops(stops))
        self._show_piece = show
        self._is_thought = model.opens_thought(prompt)
        self._shows_tokens = shows_tokens
        self._unshown: deque[tuple[Token, int]] = deque()  # each with its place in the text
        self._length = self._shown = 0  # characters that tokens made, and that were shown, behind those echoed
        self._prompt: Words | None = None  # once it is echoed
        self._echoed, self._left = 0, len(prompt)  # its characters shown, its tokens not shown

    def write(self, token: Token) -> bool:
        """Take a token; True once a stop string is complete: the text ends before it."""
        if self.is_stopped:
            return True
        self.written += 1
        if self._shows_tokens:
            self._unshown.append((token, self._length))
        more = self._words.add(token.id)
        self._length += len(more)
        self._show(self._stops.add(more))
        self.is_stopped = self._stops.is_complete
        return self.is_stopped

    def echo(self, tokens: Sequence[Token]) -> None:
        """Show the prompt's next tokens, before the text. Its special tokens are spelled out; stop strings stay."""
        if self._prompt is None:
            self._prompt = Words(partial(self._model.decode, spelled=self._model.given_specials()))
        shown, text = [], ""
        for token in tokens:
            shown.append(self._spelled(token, self._echoed + len(text)))
            text += self._prompt.add(token.id)
        self._left -= len(tokens)
        text += "" if self._left else self._prompt.rest()
        self._echoed += len(text)
        self._show_piece(Piece(self._model.expert, text, tuple(shown)))

    def finish(self) -> None:
        """Show the text that was held back, unless a stop string has ended it."""
        if not self.is_stopped:
            self._show(self._stops.add(self._words.rest()) + self._stops.rest(), is_last=True)

    def _show(self, text: str, *, is_last: bool = False) -> None:
        self._shown += len(text)
        tokens = []
        while self._unshown and (is_last or self._unshown[0][1] < self._shown):
            token, place = self._unshown.popleft()
            tokens.append(self._spelled(token, self._echoed + place))
        if text or tokens:
            self._show_piece(Piece(self._model.expert, text, tuple(tokens), self._is_thought, self._calls))

    def _spelled(self, token: Token, offset: int) -> Token:
        alternatives = tuple(self._spelled(other, offset) for other in token.alternatives)
        return replace(token, alternatives=alternatives, content=self._model.token_bytes(token.id), offset=offset)


class Words:
    """Decodes token by token. A token's characters may depend on tokens before it, so the last shown ones are kept."""

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._given = _whole(before, decode)
        self._shown = decode(self._given)
        self._waiting: list[int] = []

    def add(self, token: int) -> str:
        """Characters that this token completes; empty for a part of a character."""
        self._waiting.append(token)
        more = self._more()
        if not more or (more.endswith(HALF) and len(self._waiting) < PATIENCE):
            return ""
        return self._give(more)

    def rest(self) -> str:
        return self._give(self._more()).rstrip(HALF)

    def _more(self) -> str:
        all_of_it = self._decode([*self._given, *self._waiting])
        # If the decoder now changes text already shown, the rest is decoded alone.
        return all_of_it[len(self._shown) :] if all_of_it.startswith(self._shown) else self._decode(self._waiting)

    def _give(self, more: str) -> str:
        self._given, self._waiting = self._waiting, []
        self._shown = self._decode(self._given)
        return more


def _whole(before: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[int]:
    ends = (list(before[start:]) for start in range(len(before)))
    return next((end for end in ends if HALF not in decode(end)), [])  # half a character would spoil the rest


class StopStrings:
    """Ends a text before the first stop string that is complete in it, the longest of those complete at once."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.is_complete = False
        self._stops = tuple(stops)
        self._held = ""

    def add(self, text: str) -> str:
        """Text that may be shown now; empty once a stop string is complete."""
        if self.is_complete:
            return ""
        self._held += text
        found = [(place + len(stop), place) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            self.is_complete = True
            return self._held[: min(found)[1]]
        shown = len(self._held) - self._possible_stop()
        text, self._held = self._held[:shown], self._held[shown:]
        return text

    def rest(self) -> str:
        text, self._held = self._held, ""
        return "" if self.is_complete else text

    def _possible_stop(self) -> int:
        """Count of characters at the end that may begin a stop string."""
        longest = min(max(map(len, self._stops), default=1) - 1, len(self._held))
        ends = (self._held[-size:] for size in range(longest, 0, -1))
        possible = (end for end in ends if any(stop.startswith(end) and stop != end for stop in self._stops))
        return len(next(possible, ""))


def check_stops(stops: Sequence[str]) -> tuple[str, ...]:
    """Return checked stop strings. Raises PromptInvalid for too many, and for one that is empty or too long."""
    if len(stops) > MOST_STOPS:
        raise PromptInvalid("stop", f"has {len(stops)} strings, where {MOST_STOPS} are the most")
    for stop in stops:
        if not 0 < len(stop) <= MOST_STOP_CHARACTERS:
            raise PromptInvalid("stop", f"has a string of {len(stop)} characters: give 1 to {MOST_STOP_CHARACTERS}")
    return tuple(stops)
