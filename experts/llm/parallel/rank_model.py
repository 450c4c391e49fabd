"""One rank of a language model: its slices of every layer, run for the tokens of its tensor group.

Guarantees: the ranks of a tensor group compute the same hidden states, bit for bit, and together those of one process,
up to rounding. All ranks of a replica must call ``hidden`` for the same batch at once, with None where a group has no
tokens: its moe_experts serve the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import embedding, pad

from experts.llm.dispatch import MlpWeights
from experts.llm.files.checkpoint import open_checkpoint
from experts.llm.files.config import read_spec
from experts.llm.files.names import FINAL_NORM
from experts.llm.model import LanguageModel
from experts.llm.parallel.groups import total
from experts.llm.parallel.rank_moe import RankMoe
from experts.llm.parallel.slices import cuts_of, local_spec, share

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from experts.llm.attention import KeyValues
    from experts.llm.files.config import ArchSpec
    from experts.llm.kernels.products import Sequences
    from experts.llm.parallel.costs import ExchangeForm
    from experts.llm.parallel.groups import Mesh
    from experts.llm.token_batch import TokenBatch

SUM, GATHER, LOGITS = "sums", "layer gathers", "logits"  # purposes in a TrafficRecord


class RankModel(LanguageModel):
    """A rank's model over its own ``tensors``, by the names of the whole model's; ``whole``: spec of that."""

    def __init__(self, whole: ArchSpec, tensors: Mapping[str, Tensor], mesh: Mesh, expert: str) -> None:
        self._mesh = mesh
        self.whole = whole
        self._moe: dict[int, RankMoe] = {}
        for number, layer in enumerate(whole.layers):
            if layer.moe is not None:
                weights = _weights(whole, tensors, f"layers.{number}.experts")
                self._moe[number] = RankMoe(mesh, layer.moe, weights, tensors[FINAL_NORM].device)
        super().__init__(local_spec(whole, mesh.shape, expert), tensors, self._moe)
        self._first_token, self._end_token = share(whole.vocab_size, mesh.shape.tensor, mesh.tensor_index)

    def exchange_by(self, form: ExchangeForm) -> None:
        """Exchange tokens by this form from now on: all ranks at once."""
        for moe in self._moe.values():
            moe.exchange_by(form)

    @property
    def pair_bytes(self) -> int:
        """Bytes that one token's pairs with moe_experts of a layer have at most."""
        per_token = max((layer.moe.per_token for layer in self.whole.layers if layer.moe is not None), default=0)
        return int(per_token * self.spec.hidden_size * self.dtype.itemsize)

    def hidden(self, batch: TokenBatch | None, key_values: KeyValues) -> Tensor:
        """Hidden states of this group's tokens; None: it has none, and only its moe_experts run."""
        if batch is not None:
            return super().hidden(batch, key_values)
        with torch.inference_mode():
            nothing = torch.empty((0, self.spec.hidden_size), dtype=self.dtype, device=self.device)
            for number, layer in enumerate(self.spec.layers):
                if layer.moe is not None:
                    self.feed_forward(number, nothing)
            return nothing

    def _decoded(self, batch: TokenBatch, sequences: Sequences | None) -> None:
        """Between the steps of a pass stand sums over ranks."""

    def logits(self, hidden: Tensor) -> Tensor:
        """The whole vocabulary's logits of tokens that all ranks of this tensor group give: (tokens, vocabulary)."""
        own = super().logits(hidden)
        degree = self._mesh.shape.tensor
        if degree == 1:
            return own
        shares = [share(self.whole.vocab_size, degree, index) for index in range(degree)]
        widest = max(end - begin for begin, end in shares)
        gathered = self._mesh.tensor.gather(pad(own, (0, widest - own.shape[1])), LOGITS)
        parts = [one[:, : end - begin] for one, (begin, end) in zip(gathered, shares, strict=True)]
        return torch.cat(parts, dim=1)

    def embedded(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        held = (token_ids >= self._first_token) & (token_ids < self._end_token)
        found = super().embedded_tokens((token_ids - self._first_token) * held) * held.unsqueeze(1)
        tokens = total(self._mesh.tensor, found, SUM)
        return tokens if self._positions is None else tokens + embedding(positions, self._positions)

    def attention_output(self, layer: int, attended: Tensor) -> Tensor:
        return total(self._mesh.tensor, super().attention_output(layer, attended), SUM)

    def feed_forward(self, layer: int, tokens: Tensor) -> Tensor:
        purpose = SUM if self.spec.layers[layer].moe is None else GATHER
        return total(self._mesh.tensor, super().feed_forward(layer, tokens), purpose)

    def _whole_normed(self, tokens: Tensor, weight: Tensor | None) -> Tensor:
        """RMS norm over all heads, of which this rank has some."""
        assert weight is not None, "the layout of names has it where the spec has it"
        if self._mesh.shape.tensor == 1:
            return super()._whole_normed(tokens, weight)
        exact = tokens.float()
        squares = total(self._mesh.tensor, exact.square().sum(dim=-1, keepdim=True), SUM)
        # heads of keys that several ranks share count once for each of them: the mean stays right
        mean = squares / (tokens.shape[-1] * self._mesh.shape.tensor)
        return (exact * torch.rsqrt(mean + self.spec.norm_epsilon)).to(tokens.dtype) * weight


def load_rank(
    directory: Path, expert: str, mesh: Mesh, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> RankModel:
    """This rank's slices of a Hugging Face directory's model. Raises as ``load_model``, and ModelUnsupported."""
    spec = read_spec(directory, expert)
    local_spec(spec, mesh.shape, expert)
    checkpoint = open_checkpoint(directory, expert, spec)
    checkpoint.check_tied_head()
    wanted = dtype or checkpoint.dtype
    tensors = {
        name: checkpoint.read_rows(name, cut.matrix_columns, cut.rows, cut.columns).to(device, wanted).view(cut.shape)
        for name, cut in cuts_of(spec, mesh.shape, mesh.replica_rank).items()
    }
    return RankModel(spec, tensors, mesh, expert)


def _weights(spec: ArchSpec, tensors: Mapping[str, Tensor], name: str) -> MlpWeights | None:
    if f"{name}.up" not in tensors:
        return None
    up, down = tensors[f"{name}.up"], tensors[f"{name}.down"]
    return MlpWeights(spec.mlp, up, down, tensors.get(f"{name}.up_bias"), tensors.get(f"{name}.down_bias"))
