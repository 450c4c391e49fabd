"""Models of DeepSpeed-MoE's evaluation: Table 6, and their PR-MoE and Mixture-of-Students forms.

Source: DeepSpeed-MoE (arXiv 2201.05596), sections 3.1, 4 and 5.5. Every second layer has moe_experts, one a token. An
attention has 4 h^2 parameters, a feed-forward network and a moe_expert 8 h^2.

Table 6 states 30 layers for 8B and 40 for 24B. Its sizes fit the opposite: 349.2 of 349.0 billion with 40 layers, and
1,047 of 1,064.9 billion with 30 (as printed: 262 and 1,396). The sizes are followed here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from experts.llm.parallel.shape import MeshShape, pieces_of

if TYPE_CHECKING:
    from experts.llm.parallel.shape import MoePiece

VOCABULARY = 51_200  # GPT-2's 50,257 (the GPT architecture, section 3.1), padded as Megatron-LM pads it
WEIGHT_BYTES = 2  # fp16
NODE_GPUS = 8  # Azure ND A100 v4 (learn.microsoft.com, "ND A100 v4-series"), as in section 3.2
STANDARD, PR_MOE, STUDENT = "MoE", "PR-MoE", "PR-MoE+MoS"


@dataclass(frozen=True, slots=True)
class MixtureModel:
    """``moe_experts``: of each MoE layer. ``tensor``: MP degree of Table 6."""

    name: str
    layers: int
    hidden: int
    tensor: int
    moe_experts: tuple[int, ...]
    form: str = STANDARD

    @property
    def networks(self) -> int:
        """Feed-forward networks that every token passes: in PR-MoE also beside moe_experts."""
        return self.layers - (len(self.moe_experts) if self.form == STANDARD else 0)

    @property
    def shared_parameters(self) -> int:
        """Everything but moe_experts."""
        return (4 * self.layers + 8 * self.networks) * self.hidden**2 + VOCABULARY * self.hidden

    @property
    def parameters(self) -> int:
        return self.shared_parameters + sum(self.moe_experts) * 8 * self.hidden**2

    def mesh(self, gpus: int) -> MeshShape:
        """Tensor-slicing by the model's degree, moe_experts over all GPUs."""
        return MeshShape(expert=gpus // self.tensor, tensor=self.tensor, node_ranks=min(gpus, NODE_GPUS))

    def pieces(self, gpus: int, moe_experts: int) -> tuple[MoePiece, ...]:
        return pieces_of(self.mesh(gpus), moe_experts, 4 * self.hidden)

    def piece_parameters(self, piece: MoePiece) -> int:
        return 2 * self.hidden * (piece.end - piece.begin)

    def gpu_bytes(self, gpus: int) -> float:
        """Weights of the GPU that holds most."""
        held = Counter[int]()
        for moe_experts, layers in Counter(self.moe_experts).items():
            for piece in self.pieces(gpus, moe_experts):
                held[piece.rank] += layers * self.piece_parameters(piece)
        return WEIGHT_BYTES * (self.shared_parameters / self.tensor + max(held.values()))


def _standard(name: str, layers: int, hidden: int, tensor: int) -> MixtureModel:
    return MixtureModel(name, layers, hidden, tensor, (128,) * (layers // 2))


TABLE_6 = (
    _standard("1.3B+MoE-128", 24, 2048, 1),
    _standard("2.4B+MoE-128", 16, 3584, 1),
    _standard("8B+MoE-128", 40, 4096, 4),
    _standard("24B+MoE-128", 30, 8192, 8),
    _standard("47B+MoE-128", 58, 8192, 8),
)


def forms_of(model: MixtureModel) -> tuple[MixtureModel, MixtureModel, MixtureModel]:
    """The model, its PR-MoE and its student, at the proportions of the 1.3B base (sections 4.1 and 4.2).

    PR-MoE: 64 moe_experts a layer, 128 in the last sixth of the MoE layers. The student has 7/8 of the layers.
    """
    return model, _pyramid(model, PR_MOE, model.layers), _pyramid(model, STUDENT, model.layers * 7 // 8)


def _pyramid(model: MixtureModel, form: str, layers: int) -> MixtureModel:
    wide = round(len(model.moe_experts) / 6)
    return replace(model, form=form, layers=layers, moe_experts=(64,) * (layers // 2 - wide) + (128,) * wide)
