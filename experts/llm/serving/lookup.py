"""Drafts by prompt lookup: behind a text's last tokens may come what came behind them before, in prompt or answer.

An iteration verifies a draft: it has logits behind each drafted token, and samples along them as long as it draws the
draft's tokens. So each token is sampled as without a draft, from the same logits up to rounding, and the text is the
same.

A lookup takes a microsecond, so each written token is compared with the token looked up, drafted or not. The share of
right ones is known before a draft costs a pass: a text that repeats nothing drafts nothing, and one that begins to
quote drafts a few tokens later. How many tokens are worth their time is decided in ``iteration``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

GRAM = 3  # tokens that are looked up
MOST_DRAFTED = 15  # with the last written token 16, beyond which int8 in bf16 has a slower kernel
FORGETTING = 0.9  # each comparison multiplies the weight of earlier ones by this
DOUBT = 0.5  # wrong tokens that each text is thought to have had


class PromptLookup:
    """Lookup in one text, and how often it was right lately."""

    def __init__(self) -> None:
        self._behind: dict[tuple[int, ...], int] = {}  # place behind the last occurrence
        self._known = GRAM - 1  # tokens whose occurrences are known
        self._place: int | None = None  # of the token that is expected next
        self._right = self._compared = 0.0

    @property
    def share(self) -> float:
        """Probability that the next token is as expected, or the one behind an expected one; 0 for none expected."""
        return 0.0 if self._place is None else self._right / (self._compared + DOUBT)

    def wrote(self, tokens: Sequence[int]) -> None:
        """Take all tokens of the text, of which the last was written now."""
        if self._place is not None:
            self._right = FORGETTING * self._right + (tokens[self._place] == tokens[-1])
            self._compared = FORGETTING * self._compared + 1
        for end in range(self._known + 1, len(tokens) + 1):
            gram = tuple(tokens[end - GRAM : end])
            self._place = self._behind.get(gram)
            self._behind[gram] = end
        self._known = len(tokens)

    def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        """The next ``count`` tokens as they came before; a repetition that reaches the end goes round."""
        drafted: list[int] = []
        if self._place is not None:
            for place in range(self._place, self._place + count):
                drafted.append(tokens[place] if place < len(tokens) else drafted[place - len(tokens)])
        return drafted
