"""One step of training: the loss over a batch of texts and its gradients, through the steps of a pass that serve.

Nothing here keeps state: a step is a function of the model's tensors and a batch, so that ranks which hold different
texts may each compute it, and add their gradients. Works for each family that LanguageModel runs; quantised matrices
have no gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cross_entropy, kl_div, one_hot, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from experts.llm.attention import Stored
from experts.llm.model import LanguageModel, run_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from experts.llm.files.config import ArchSpec

UNEVENNESS_WEIGHT = 0.005  # Switch Transformer (arXiv 2101.03961), section 2.2: 0.01, over two such layers


@dataclass(frozen=True, slots=True)
class TextBatch:
    """Texts, padded behind their ends. ``counted``: the tokens to predict; both (texts, tokens)."""

    token_ids: Tensor
    counted: Tensor

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]], padding: int = 0) -> TextBatch:
        """All tokens but the first of each text are counted."""
        token_ids = pad_sequence([torch.tensor(text) for text in texts], batch_first=True, padding_value=padding)
        places, lengths = torch.arange(token_ids.shape[1]), torch.tensor([len(text) for text in texts])[:, None]
        return cls(token_ids, (places > 0) & (places < lengths))

    def picked(self, rows: Tensor) -> TextBatch:
        """These texts, cut behind the longest."""
        token_ids, counted = self.token_ids[rows], self.counted[rows]
        length = int(counted.any(dim=0).nonzero().max()) + 1
        return TextBatch(token_ids[:, :length], counted[:, :length])

    @property
    def is_text(self) -> Tensor:
        """False for padding."""
        return self.counted.flip(1).cumsum(1).flip(1) > 0


@dataclass(frozen=True, slots=True)
class Losses:
    """Means over the counted tokens. ``divergence``: KL of the predictions from the teacher's soft labels.

    ``unevenness``: how uneven choices among moe_experts are, summed over layers.
    """

    cross_entropy: Tensor
    divergence: Tensor
    unevenness: Tensor

    def total(self, alpha: float) -> Tensor:
        """DeepSpeed-MoE (arXiv 2201.05596), equation 1, and a part that spreads tokens over moe_experts.

        Divided by the weights' sum: otherwise gradients would shrink where alpha falls to 0, and with them the steps
        of an optimiser that is used to larger ones.
        """
        return (self.cross_entropy + alpha * self.divergence) / (1 + alpha) + UNEVENNESS_WEIGHT * self.unevenness


def unevenness(gate_logits: Tensor) -> Tensor:
    """Unevenness of choices among moe_experts: 1 if even. Source: Switch Transformer (arXiv 2101.03961), equation 4."""
    shares = gate_logits.softmax(dim=-1)
    chosen = one_hot(shares.argmax(dim=-1), shares.shape[-1]).float().mean(dim=0)
    return shares.shape[-1] * (chosen * shares.mean(dim=0)).sum()


def run_texts(model: LanguageModel, token_ids: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Differentiable pass over texts of one length: hidden states behind the last layer, (texts * tokens, hidden).

    Beside them the logits of each gate, (texts * tokens, moe_experts).
    """
    texts, count = token_ids.shape
    group = model.spec.heads // model.spec.kv_heads
    gates: list[Tensor] = []
    places = torch.arange(count, device=token_ids.device)

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys, values = (each.repeat_interleave(group, dim=1) for each in (keys, values))
        queries, keys, values = (each.unflatten(0, (texts, count)).transpose(1, 2) for each in (queries, keys, values))
        if model.scopes is not None:
            mask = model.scopes[layer].mask(places[:, None], places)
            attended = model.scopes[layer].attend(queries, Stored(keys, values), mask)
            return attended.transpose(1, 2).flatten(0, 1)
        return scaled_dot_product_attention(queries, keys, values, is_causal=True).transpose(1, 2).flatten(0, 1)

    def run(part: int, step: Callable[..., tuple[Tensor, ...]], *inputs: Any) -> tuple[Tensor, ...]:  # noqa: ANN401
        layer, is_attention = divmod(part - 1, 2)
        if part > 0 and is_attention:
            logits = model.gate_logits(layer, inputs[0])
            gates.extend([] if logits is None else [logits])
        return step(model, *inputs)

    return run_steps(model, run, token_ids.flatten(), places.repeat(texts), attend), tuple(gates)


def predictions(
    model: LanguageModel, batch: TextBatch, uneven_by: Callable[[Tensor], Tensor] = unevenness
) -> tuple[Tensor, Tensor]:
    """Logits of the counted tokens, (tokens, vocabulary), and the unevenness of all layers."""
    hidden, gates = run_texts(model, batch.token_ids)
    before = batch.counted.roll(-1, dims=1).flatten()  # each counted token is predicted from the one before it
    uneven = sum((uneven_by(each[batch.is_text.flatten()]) for each in gates), start=hidden.new_zeros(()))
    return model.predicted(hidden[before]), uneven


def losses_of(
    model: LanguageModel,
    batch: TextBatch,
    soft_labels: Tensor | None = None,
    uneven_by: Callable[[Tensor], Tensor] = unevenness,
) -> Losses:
    """``soft_labels``: the teacher's logits of the counted tokens; without them the divergence is 0."""
    logits, uneven = predictions(model, batch, uneven_by)
    hard = cross_entropy(logits.float(), batch.token_ids[batch.counted])
    if soft_labels is None:
        return Losses(hard, hard.new_zeros(()), uneven)
    own, wanted = (each.float().log_softmax(dim=-1) for each in (logits, soft_labels))
    return Losses(hard, kl_div(own, wanted, reduction="batchmean", log_target=True), uneven)


def loss_and_gradients(
    spec: ArchSpec,
    tensors: Mapping[str, Tensor],
    batch: TextBatch,
    alpha: float = 0.0,
    soft_labels: Tensor | None = None,
) -> tuple[Losses, dict[str, Tensor]]:
    """Losses of one batch, and the gradient of their total for each tensor that requires one."""
    trained = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    losses = losses_of(LanguageModel(spec, tensors), batch, soft_labels)
    total = losses.total(alpha)
    found = torch.autograd.grad(total, list(trained.values()), allow_unused=True, materialize_grads=True)
    parts = (part.detach() for part in (losses.cross_entropy, losses.divergence, losses.unevenness))
    return Losses(*parts), dict(zip(trained, found, strict=True))
