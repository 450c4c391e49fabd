"""Grammar of a text: the tokens that may come next, by llguidance.

Guarantees: each mask is made by a thread of its own pool while the model runs, and a text's state follows from its
written tokens alone, on any executor. A grammar has passed its trial before it is compiled here (``grammar_trial``).
The library's fuel bounds each mask; a text whose masks take more than MASKS_S, and MASK_S a token, is refused. So a
hostile grammar ends its own text, and delays no other by more than that. llguidance is imported at the first grammar.
"""

from __future__ import annotations

import json
import time
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from experts.daemon_threads import DaemonThreads
from experts.errors import GrammarInvalid
from experts.llm.serving.grammar_trial import GrammarTrials, check_size, mask_of, parser_limits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from llguidance import LLMatcher, LLTokenizer

TRIALS = GrammarTrials()
MASKS_S, MASK_S = 1.0, 0.005  # of the processor, for each text and for each of its tokens; a usual mask takes 50 us
LATE_S = 5.0  # until a mask that does not come ends its text
NO_TOKEN = b"<no token>"
MARK = "\x02"  # before a text: takes the space that some tokenizers put at the beginning


class GrammarVocabulary:
    """Tokens of a model as llguidance reads them, built at the first grammar. For any thread.

    ``spell``: bytes of each token. ``encode``: tokens of a text, perhaps with a space before it. ``special``: tokens
    that are no text; ``stops``: those that end one.
    """

    def __init__(
        self, spell: Callable[[], Sequence[bytes]], encode: Callable[[str], Sequence[int]], special: Iterable[int],
        stops: Iterable[int],
    ) -> None:  # fmt: skip
        self._spell = spell
        self._encode = encode
        self._special = frozenset(special)
        self._stops = frozenset(stops)
        self._lock = Lock()
        self._built: LLTokenizer | None = None

    def compiled(self, entries: Sequence[Mapping[str, Any]], fields: Mapping[str, str]) -> Grammar:
        """Compile named grammars, of which the first is the start. ``fields``: of a caller's grammars, by name.

        Raises GrammarInvalid with the field of the first one that is wrong.
        """
        for entry in entries:
            if (own := fields.get(entry.get("name", ""))) is not None:
                TRIALS.check(entry, own)
        field = next(iter(fields.values()))
        check_size(entries, field)
        return Grammar(self._matcher(entries, field))

    def _tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        with self._lock:
            if self._built is None:
                spelling = _Spelling(self._spell(), self._encode, self._special, self._stops)
                self._built = LLTokenizer(spelling, eos_token=spelling.stops)  # type: ignore[arg-type]  # duck-typed
            return self._built

    def _matcher(self, entries: Sequence[Mapping[str, Any]], field: str) -> LLMatcher:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer(), json.dumps({"grammars": entries}), log_level=0, limits=parser_limits())
        try:
            if not any(mask_of(matcher.deep_copy())):
                raise GrammarInvalid(field, "has no beginning that the model has tokens for")
        except ValueError as error:
            raise GrammarInvalid(field, f"cannot be served: {error}") from None
        return matcher


class _Spelling:
    """Tokenizer in llguidance's terms. Without stop tokens, one beyond the vocabulary stands for them."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self, tokens: Sequence[bytes], encode: Callable[[str], Sequence[int]], special: frozenset[int],
        stops: frozenset[int],
    ) -> None:  # fmt: skip
        self._encode = encode
        self.stops = sorted(stop for stop in stops if stop < len(tokens)) or [len(tokens)]
        self.tokens = [*tokens, NO_TOKEN]
        self.eos_token_id = self.stops[0]
        self.special_token_ids = sorted({*special, *self.stops, len(tokens)})

    def __call__(self, text: str) -> list[int]:
        """Usual tokens of a text that a grammar forces."""
        mark = self._encode(MARK)
        for tokens in (self._encode(text), self._encode(MARK + text)[len(mark) :]):
            if b"".join(self.tokens[token] for token in tokens) == text.encode():
                return list(tokens)
        return self._longest(text.encode())

    def _longest(self, content: bytes) -> list[int]:
        tokens = []
        while content:
            sizes = range(min(len(content), self._most), 0, -1)
            size = next((size for size in sizes if content[:size] in self._numbers), 0)
            if not size:
                break
            tokens.append(self._numbers[content[:size]])
            content = content[size:]
        return tokens

    @cached_property
    def _numbers(self) -> dict[bytes, int]:
        special = set(self.special_token_ids)
        return {content: token for token, content in enumerate(self.tokens) if token not in special}

    @cached_property
    def _most(self) -> int:
        return max(map(len, self._numbers))


class Grammar:
    """Compiled grammar, for any thread."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def begin(self) -> GrammarState:
        return GrammarState(self._matcher.deep_copy())


class GrammarState:
    """State of one text. ``fault``: why the text cannot go on, once its last mask was made. ``is_complete``: no token
    may follow."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.fault: str | None = None
        self.is_complete = False
        self._matcher = matcher
        self._spent_s, self._allowed_s = 0.0, MASKS_S
        self._next = _threads.submit(self._mask)

    def banned(self) -> np.ndarray | None:
        """True for each token that may not come next; waits for the mask. None after a fault."""
        try:
            return self._next.result(LATE_S)
        except TimeoutError:
            _renew_threads()
            self.fault = "it takes too long"
            return None

    def wrote(self, token: int) -> None:
        self._matcher.consume_token(token)  # the thread has made the last mask: it uses the matcher no more
        self._allowed_s += MASK_S
        self.is_complete = self._matcher.is_stopped() and not self._matcher.is_error()
        if not self.is_complete:
            self._next = _threads.submit(self._mask)

    def _mask(self) -> np.ndarray | None:
        began_s = time.thread_time()
        try:
            bits = mask_of(self._matcher)
        except ValueError as error:
            self.fault = str(error)
            return None
        self._spent_s += time.thread_time() - began_s
        if self._spent_s > self._allowed_s:
            self.fault = "it takes too long"
            return None
        banned: np.ndarray = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little") == 0
        return banned


def _new_threads() -> DaemonThreads:
    return DaemonThreads(2, "grammars")


def _renew_threads() -> None:
    """Leave a thread that hangs in the library behind."""
    global _threads
    _threads = _new_threads()


_threads = _new_threads()
