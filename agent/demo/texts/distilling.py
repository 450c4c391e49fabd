"""A Mixture-of-Students: a network with fewer layers learns from one that knows, then goes on alone.

Source: DeepSpeed-MoE (arXiv 2201.05596), section 4.2. The student begins as the teacher without some of its layers;
those that stay keep their moe_experts. Its loss is what it says of the text (CE) + ALPHA * how far it is from the
teacher (KL), and staged: after ``stop_step`` steps the teacher is no longer listened to, for a small student that
imitates to the end does not reach what it could.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import kl_div

from agent.demo.texts.network import PrMoe
from agent.demo.training.learning import Descent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from agent.demo.texts.training import TrainingTexts
    from agent.demo.training.learning import Pace

ALPHA = 1.0
WEIGHT_DECAY = 0.01


@dataclass(frozen=True, slots=True)
class StudentPlan:
    """``layers``: of the teacher's, those that stay; ``stop_step``: the first step without the teacher."""

    layers: tuple[int, ...]
    pace: Pace
    stop_step: int

    def alpha(self, step: int) -> float:
        return ALPHA if step < self.stop_step else 0.0


def student_of(teacher: PrMoe, layers: Sequence[int]) -> PrMoe:
    """The teacher's copy with these of its layers alone. ValueError for one that it has not, or none."""
    experts = teacher.shape.moe_experts
    if not layers or not set(layers) <= set(range(len(experts))) or list(layers) != sorted(set(layers)):
        raise ValueError(
            f"layers {list(layers)} of a teacher with {len(experts)}: name some, in their order, each once"
        )
    shape = replace(teacher.shape, moe_experts=tuple(experts[layer] for layer in layers))
    student = PrMoe(shape, torch.Generator())
    with torch.no_grad():
        for key, tensor in student.tensors.items():
            tensor.copy_(teacher.tensors[_teacher_key(key, layers)])
    return student


def distil(teacher: PrMoe, draw: Callable[[], TrainingTexts], plan: StudentPlan) -> PrMoe:
    """A trained student. ``draw``: the texts of the next step."""
    student = student_of(teacher, plan.layers)
    descent = Descent(student.parameters(), plan.pace, WEIGHT_DECAY)
    for step in range(plan.pace.steps):
        descent.step(staged_loss(student, teacher, draw(), plan.alpha(step)))
    student.requires_grad_(False)
    return student


def staged_loss(student: PrMoe, teacher: PrMoe, texts: TrainingTexts, alpha: float) -> Tensor:
    """Section 4.2.2: CE, and while ``alpha`` is above 0 the divergence from the teacher over the counted tokens."""
    logits, _ = student(texts.token_ids)
    loss = texts.loss(logits)
    if not alpha:
        return loss
    with torch.no_grad():
        wanted, _ = teacher(texts.token_ids)
    counted = texts.counted[:, 1:]
    own, theirs = (one[:, :-1][counted].log_softmax(dim=-1) for one in (logits, wanted))
    return loss + alpha * kl_div(own, theirs, reduction="batchmean", log_target=True)


def _teacher_key(key: str, layers: Sequence[int]) -> str:
    head, layer, rest = key.partition("model/layers/")
    if not layer:
        return key
    number, _, name = rest.partition("/")
    return f"{head}{layer}{layers[int(number)]}/{name}"
