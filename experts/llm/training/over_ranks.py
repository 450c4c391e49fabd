"""Training over ranks, each with its share of a batch: losses, gradients and their norm are one process's.

Multi-expert and multi-data parallelism (DeepSpeed-MoE, arXiv 2201.05596, section 4.1.3): each layer's moe_experts are
shared out among as many ranks as there are moe_experts, so a pyramid has a degree for each layer, and the other ranks
hold copies. Gradients of moe_experts are summed over the ranks that hold the same ones, those of the rest over all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.functional import one_hot

from experts.llm.dispatch import MlpWeights
from experts.llm.files.names import EXPERTS, layer_of
from experts.llm.model import LanguageModel
from experts.llm.parallel.groups import Mesh, total
from experts.llm.parallel.rank_moe import RankMoe
from experts.llm.parallel.shape import MeshShape
from experts.llm.parallel.slices import own_pieces
from experts.llm.training.staged import Training
from experts.llm.training.step import Losses, TextBatch, losses_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from experts.llm.files.config import ArchSpec, LayerSpec
    from experts.llm.parallel.groups import RankGroup


GRADIENTS, SHARES, WEIGHTS = "gradients", "shares", "weights"  # purposes in a TrafficRecord


class RankTraining(Training):
    """A rank's part of a model in training. ``start``: all tensors before it. All ranks call each method at once."""

    def __init__(self, spec: ArchSpec, start: Mapping[str, Tensor]) -> None:
        self._spec = spec
        self._ranks = dist.get_world_size()
        degrees = {self._degree(layer) for layer in spec.layers} | {1}
        self._meshes = {degree: self._mesh_of(degree) for degree in sorted(degrees)}
        self._all = self._meshes[1].data
        self._moe_experts_of = {name: len(tensor) for name, tensor in start.items() if EXPERTS in name}
        own = {name: tensor[self._own(name)].detach().clone().requires_grad_() for name, tensor in start.items()}
        super().__init__(spec, own)

    def share(self, batch: TextBatch) -> TextBatch:
        """This rank's texts; without any a token that does not count, for other ranks need its moe_experts."""
        rows = torch.arange(len(batch.token_ids))[dist.get_rank() :: self._ranks]
        if len(rows):
            return batch.picked(rows)
        return TextBatch(batch.token_ids[:1, :1], torch.zeros((1, 1), dtype=torch.bool))

    def loss_and_gradients(
        self, batch: TextBatch, alpha: float = 0.0, soft_labels: Tensor | None = None
    ) -> tuple[Losses, dict[str, Tensor]]:
        """Losses of all ranks' texts, and their total's gradients for this rank's tensors."""
        model = LanguageModel(self._spec, self.trained, self._moe_experts())
        own = losses_of(model, batch, soft_labels, self._unevenness)
        counted = batch.counted.sum()
        share = counted / total(self._all, counted, SHARES)
        hard, soft = (torch.where(counted > 0, mean, 0.0) * share for mean in (own.cross_entropy, own.divergence))
        losses = Losses(hard, soft, own.unevenness)
        names = list(self.trained)
        tensors = list(self.trained.values())
        found = torch.autograd.grad(losses.total(alpha), tensors, allow_unused=True, materialize_grads=True)
        gradients = {
            name: total(self._group_of(name), gradient, GRADIENTS) for name, gradient in zip(names, found, strict=True)
        }
        parts = (losses.cross_entropy, losses.divergence, losses.unevenness)
        return Losses(*(total(self._all, part.detach(), SHARES) for part in parts)), gradients

    def norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Norm of the whole model's gradients, for clipping."""
        squares = torch.zeros(())
        for name, gradient in gradients.items():
            own = gradient.float().square().sum()
            squares = squares + (total(self._mesh(name).replica, own, GRADIENTS) if EXPERTS in name else own)
        return squares.sqrt()

    def whole(self) -> dict[str, Tensor]:
        return {name: self._joined(name, tensor.detach()) for name, tensor in self.trained.items()}

    def _joined(self, name: str, own: Tensor) -> Tensor:
        if EXPERTS not in name:
            return own
        whole = own.new_zeros((self._moe_experts_of[name], *own.shape[1:]))
        whole[self._own(name)] = own
        return total(self._mesh(name).replica, whole, WEIGHTS)

    def _degree(self, layer: LayerSpec) -> int:
        """Ranks among which a layer's moe_experts are shared out: a divisor of all ranks."""
        most = 1 if layer.moe is None else min(layer.moe.moe_experts, self._ranks)
        return next(degree for degree in range(most, 0, -1) if self._ranks % degree == 0)

    def _mesh_of(self, degree: int) -> Mesh:
        return Mesh(MeshShape(data=self._ranks // degree, expert=degree))

    def _mesh(self, name: str) -> Mesh:
        return self._meshes[self._degree(self._spec.layers[layer_of(name)])]

    def _group_of(self, name: str) -> RankGroup:
        """Ranks that hold the same tensor."""
        return self._mesh(name).data if EXPERTS in name else self._all

    def _own(self, name: str) -> slice:
        if EXPERTS not in name:
            return slice(None)
        mesh = self._mesh(name)
        pieces = own_pieces(self._spec.layers[layer_of(name)], mesh.shape, mesh.replica_rank)
        return slice(pieces[0].moe_expert, pieces[-1].moe_expert + 1)

    def _moe_experts(self) -> dict[int, RankMoe]:
        found = {}
        for number, layer in enumerate(self._spec.layers):
            if layer.moe is not None:
                tensors, name = self.trained, f"layers.{number}.experts"
                biases = tensors.get(f"{name}.up_bias"), tensors.get(f"{name}.down_bias")
                weights = MlpWeights(self._spec.mlp, tensors[f"{name}.up"], tensors[f"{name}.down"], *biases)
                found[number] = RankMoe(self._meshes[self._degree(layer)], layer.moe, weights)
        return found

    def _unevenness(self, gate_logits: Tensor) -> Tensor:
        """This rank's part of the unevenness over all ranks' tokens."""
        shares = gate_logits.softmax(dim=-1)
        chosen = one_hot(shares.argmax(dim=-1), shares.shape[-1]).float().sum(dim=0)
        tokens = total(self._all, torch.tensor(float(len(shares))), SHARES)
        frequency = total(self._all, chosen, SHARES) / tokens
        return shares.shape[-1] * (frequency * shares.sum(dim=0) / tokens).sum()
