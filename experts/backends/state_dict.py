"""State dicts checked against an architecture by names and shapes, then cast to a form's dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from experts.backends.modules.binding import is_count
from experts.backends.outputs import is_finite
from experts.errors import WeightsCorrupt, WeightsMismatch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from experts.backends.forms.base import Form
    from experts.expert import Expert

NAMES_SHOWN = 4


def fit(expert: Expert, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Cast to the dtypes of ``expected``, which may be on meta. Raises WeightsMismatch, WeightsCorrupt for NaN."""
    wanted, given = fitting(expert, found, expected)
    for name, tensor in given.items():
        if not is_finite(tensor):
            raise WeightsCorrupt(expert.id, f"{expert.weights}: {name} holds NaN or infinity")
    return {name: given[name].to(like.dtype) for name, like in wanted.items()}


def fitting(
    expert: Expert, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors ``expected`` and ``found``, of equal names and shapes; either may be on meta. Raises WeightsMismatch."""
    wanted = {name: tensor for name, tensor in expected.items() if not is_count(name)}
    given = {name: tensor for name, tensor in found.items() if not is_count(name)}
    reshaped = [name for name in wanted if name in given and wanted[name].shape != given[name].shape]
    _refuse_other_labels(expert, reshaped, given, wanted)
    shapes = [f"{name} {tuple(given[name].shape)} instead of {tuple(wanted[name].shape)}" for name in reshaped]
    complaints = [
        _complaint("missing", [name for name in wanted if name not in given]),
        _complaint("unexpected", [name for name in given if name not in wanted]),
        _complaint("of another shape", shapes),
    ]
    if text := "; ".join(complaint for complaint in complaints if complaint):
        raise WeightsMismatch(expert.id, f"{expert.weights} is not a {expert.architecture}: {text}")
    return wanted, given


def executable(expert: Expert, tensors: Mapping[str, Tensor], form: Form) -> dict[str, Tensor]:
    """Cast to the form's dtype, with weights of convolutions channels_last. Raises as ``cast``."""
    ready = {name: cast(expert.id, name, tensor.detach(), form) for name, tensor in tensors.items()}
    return {
        name: tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor.contiguous()
        for name, tensor in ready.items()
    }


def cast(expert: str, name: str, tensor: Tensor, form: Form) -> Tensor:
    """A tensor in the form's dtype. Raises WeightsMismatch where a value leaves the dtype's range."""
    found = tensor.to(form.dtype) if tensor.is_floating_point() else tensor
    if not is_finite(found):
        raise WeightsMismatch(expert, f"{name} is too large for {form.name}: choose bf16 or fp32 as precision")
    return found


def _refuse_other_labels(
    expert: Expert, reshaped: Sequence[str], given: Mapping[str, Tensor], wanted: Mapping[str, Tensor]
) -> None:
    """Name the numbers of labels where the number of outputs is the only difference."""
    label_count = len(expert.labels)
    outputs = {given[name].shape[0] for name in reshaped if given[name].dim()}
    is_heads_only = all(
        wanted[name].dim() > 0
        and wanted[name].shape[0] == label_count
        and wanted[name].shape[1:] == given[name].shape[1:]
        for name in reshaped
    )
    if reshaped and is_heads_only and len(outputs) == 1:
        raise WeightsMismatch(
            expert.id,
            f"{expert.weights} has {outputs.pop()} labels ({reshaped[0]}), the line names {label_count}",
        )


def _complaint(what: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{what}: {', '.join(names[:NAMES_SHOWN])}{more}"
