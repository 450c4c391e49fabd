"""What a caller wants of a prompt itself, taken from its hidden states while it is read.

Guarantees: each position counts once, also if it is read again after a preemption, or a pass that was abandoned. An
engine gives at most POSITIONS_AT_ONCE of them at once, whose logits the workspace of a batch counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from experts.llm.serving.generation import Token
from experts.llm.serving.sampling import Logprobs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from experts.devices.copies import Download
    from experts.llm.model import LanguageModel
    from experts.llm.serving.pooling import Pooling

POSITIONS_AT_ONCE = 16  # a pass over the head's weights costs little more for these than for one
LEAST_NORM = 1e-12  # as torch.nn.functional.normalize has it


class PromptScores:
    """Log-probability of each token after those before it, with as many ``alternatives``; the first token has none.

    ``tell``: called on the executor's thread with the next tokens of the prompt.
    """

    def __init__(self, alternatives: int, tell: Callable[[Sequence[Token]], None]) -> None:
        self.read = 0
        self._alternatives = alternatives
        self._tell = tell

    def take(
        self, prompt: Sequence[int], first: int, hidden: Tensor, following: Tensor, model: LanguageModel,
        results: Download,
    ) -> Callable[[], bool]:  # fmt: skip
        start = max(self.read, first)
        tokens = prompt[start + 1 : first + len(hidden) + 1]
        logprobs, sound = Logprobs([self._alternatives] * len(tokens)), 0
        if tokens:
            raw = model.logits(hidden[start - first :][: len(tokens)]).float()
            sound = results.add(raw.amax(dim=-1).isfinite())
            logprobs.run(raw, following[start - first :][: len(tokens)], results)

        def told() -> bool:
            told = [] if self.read else [Token(prompt[0], None)]
            if tokens:
                if not all(results[sound].tolist()):
                    return False
                told += map(Token, tokens, *logprobs.told(results))
            self.read = max(start + len(tokens), 1)  # a prompt of one token has nothing else to tell
            if told:
                self._tell(told)
            return True

        return told


class PooledPrompt:
    """Vector of the whole prompt, of the final norm's states (``experts.llm.serving.pooling``). ``tell``: as above."""

    def __init__(self, pooling: Pooling, tell: Callable[[tuple[float, ...]], None]) -> None:
        self.read = 0
        self._pooling = pooling
        self._tell = tell
        self._sums: dict[int, Tensor] = {}  # by the positions whose states are added
        self._told = torch.empty(0)  # the last of them, on the host: for a text that moves

    def take(
        self, prompt: Sequence[int], first: int, hidden: Tensor, following: Tensor, model: LanguageModel,
        results: Download,
    ) -> Callable[[], bool]:  # fmt: skip
        start, end = max(self.read, first), min(first + len(hidden), len(prompt))
        is_last, pooling, sound, vector, told_sum = end == len(prompt), self._pooling, None, 0, 0
        if start < end and (pooling.is_mean or is_last):
            states = hidden[start - first : end - first]
            total = model.normed(states if pooling.is_mean else states[-1:]).float().sum(dim=0)
            if (before := self._sums.get(start)) is not None:
                total = total + (before if before.device == total.device else self._told.to(total.device))
            self._sums[end], sound, told_sum = total, results.add(total.isfinite()), results.add(total)
            if is_last:
                pooled = total / (len(prompt) if pooling.is_mean else 1)
                vector = results.add(pooled / pooled.norm().clamp_min(LEAST_NORM) if pooling.is_normalised else pooled)

        def told() -> bool:
            self.read = max(self.read, end)
            if sound is None:
                return True
            if not all(results[sound].tolist()):
                return False
            self._sums = {held: one for held, one in self._sums.items() if held >= end}
            self._told = results[told_sum]
            if is_last:
                self._tell(tuple(results[vector].tolist()))
            return True

        return told
