"""What a caller wants of a prompt itself, taken from its hidden states while it is read.

Guarantees: each position counts once, also if it is read again after a preemption. An engine gives at most
POSITIONS_AT_ONCE of them at once, whose logits the workspace of a batch counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from experts.llm.serving.generation import Token
from experts.llm.serving.sampling import logprobs_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

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

    def take(self, prompt: Sequence[int], first: int, hidden: Tensor, model: LanguageModel) -> bool:
        tokens = prompt[self.read + 1 : first + len(hidden) + 1]
        told = [] if self.read else [Token(prompt[0], None)]
        if tokens:
            states = hidden[self.read - first :]
            raw = model.logits(states[: len(tokens)]).float()
            if not raw.amax(dim=-1).isfinite().all():
                return False
            told += map(Token, tokens, *logprobs_of(raw, torch.tensor(tokens), [self._alternatives] * len(tokens)))
        self.read = max(self.read + len(tokens), 1)  # a prompt of one token has nothing else to tell
        if told:
            self._tell(told)
        return True


class PooledPrompt:
    """Vector of the whole prompt, of the final norm's states (``experts.llm.serving.pooling``). ``tell``: as above."""

    def __init__(self, pooling: Pooling, tell: Callable[[tuple[float, ...]], None]) -> None:
        self.read = 0
        self._pooling = pooling
        self._tell = tell
        self._sum: Tensor | None = None

    def take(self, prompt: Sequence[int], first: int, hidden: Tensor, model: LanguageModel) -> bool:
        states = hidden[self.read - first : len(prompt) - first]
        self.read += len(states)
        if not len(states) or not (self._pooling.is_mean or self.read == len(prompt)):
            return True
        states = model.normed(states if self._pooling.is_mean else states[-1:]).float().sum(dim=0)
        self._sum = states if self._sum is None else self._sum + states
        if not self._sum.isfinite().all():
            return False
        if self.read == len(prompt):
            vector = self._sum / (len(prompt) if self._pooling.is_mean else 1)
            vector = vector / vector.norm().clamp_min(LEAST_NORM) if self._pooling.is_normalised else vector
            self._tell(tuple(vector.tolist()))
        return True
