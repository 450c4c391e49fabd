"""How far one form of a model is from another: the same texts through both, compared token by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from experts.llm.serving.extents import ModelKeyValues
from experts.llm.token_batch import Chunk, TokenBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from experts.llm.model import LanguageModel


@dataclass(frozen=True, slots=True)
class OutputDifference:
    """Comparison over positions of texts; logits in fp32."""

    tokens: int  # positions
    largest: float
    relative_error: float  # root mean square of the difference, over that of the reference's logits
    divergence: float  # mean Kullback-Leibler divergence of what may follow, in nats
    same_best: float  # share of positions at which both hold the same token likeliest
    loss: float  # mean negative log likelihood of the texts, in nats a token
    reference_loss: float

    def __str__(self) -> str:
        return (
            f"logits differ by {self.relative_error:.2%} (at most {self.largest:.3g}), divergence "
            f"{self.divergence:.2g} nats, the same likeliest token at {self.same_best:.1%} of {self.tokens} positions, "
            f"loss {self.loss:.4f} against {self.reference_loss:.4f} nats"
        )


def output_difference(
    reference: LanguageModel, model: LanguageModel, texts: Sequence[Sequence[int]]
) -> OutputDifference:
    """Compare what both say at every position of these texts. ValueError where none has two tokens or more."""
    compared = [_compare(reference, model, text) for text in texts if len(text) > 1]
    if not compared:
        raise ValueError("a text of at least two tokens is needed: there is nothing to compare")
    largest, squares, reference_squares, divergence, same, loss, reference_loss = (
        torch.cat(columns).double() for columns in zip(*compared, strict=True)
    )
    return OutputDifference(
        tokens=len(same),
        largest=float(largest.max()),
        relative_error=float((squares.sum() / reference_squares.sum()).sqrt()),
        divergence=float(divergence.mean()),
        same_best=float(same.mean()),
        loss=float(loss.mean()),
        reference_loss=float(reference_loss.mean()),
    )


def _compare(reference: LanguageModel, model: LanguageModel, text: Sequence[int]) -> tuple[Tensor, ...]:
    """One text's figures, (tokens - 1) each."""
    expected, found = _logits(reference, text), _logits(model, text)
    expected_log, found_log = expected.log_softmax(dim=-1), found.log_softmax(dim=-1)
    following = torch.tensor(text[1:]).unsqueeze(-1)
    return (
        (found - expected).abs().amax(dim=-1),
        (found - expected).square().sum(dim=-1),
        expected.square().sum(dim=-1),
        (expected_log.exp() * (expected_log - found_log)).sum(dim=-1),
        (found.argmax(dim=-1) == expected.argmax(dim=-1)).float(),
        -found_log.gather(-1, following).squeeze(-1),
        -expected_log.gather(-1, following).squeeze(-1),
    )


def _logits(model: LanguageModel, text: Sequence[int]) -> Tensor:
    batch = TokenBatch.of([Chunk(0, 0, text[:-1])], model.device)
    key_values = ModelKeyValues(model.spec, model.dtype)
    return model.logits(model.hidden(batch, key_values)).float().cpu()
