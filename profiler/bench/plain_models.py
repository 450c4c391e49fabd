"""Experts as users of torch run them: built by their own constructor, nothing folded, packed or converted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from experts.backends import backend_for, family
from experts.backends.torch_backend import TorchBackend

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor
    from torch.nn import Module

    from experts.backends.base import Prepared
    from experts.backends.forms.base import Reader
    from experts.expert import Expert, Prediction


@dataclass(frozen=True, slots=True)
class PlainExpert:
    """A module in fp32 that runs batches as they come, channels first. ``answered`` reads outputs as our forms do."""

    expert: Expert
    module: Module
    answered: Reader

    def infer(self, batch: Sequence[Prepared], device: str = "cpu") -> Sequence[Prediction]:
        """One prediction per image. Raises OutputInvalid where an output is NaN or infinity."""
        with torch.inference_mode():
            output = self.module(torch.stack([prepared.tensor for prepared in batch]).to(device))
            outputs = (output,) if isinstance(output, torch.Tensor) else (output["boxes"], output["scores"])
            return self.answered(self.expert, [each.float().cpu() for each in outputs], batch)


def build(expert: Expert) -> Module:
    """A fresh model of the expert's architecture, its weights initialised as the constructor does."""
    if family(expert.architecture) == "detector":
        from experts.backends import detector

        return detector.build_trainable(expert.architecture, len(expert.labels))
    from experts.backends import classifier

    return classifier.build_trainable(expert.architecture, len(expert.labels), expert.stem, expert.pixels.height)


def plain_expert(expert: Expert, weights: Mapping[str, Tensor], *, strict: bool = True) -> PlainExpert:
    """Build the expert and fill it with these weights."""
    backend = backend_for(expert.architecture)
    assert isinstance(backend, TorchBackend), "asked for torch's architectures"
    module = build(expert)
    module.load_state_dict(weights, strict=strict)
    module.eval()
    if family(expert.architecture) == "detector":
        module.model[-1].training = True  # of the head alone: it answers with its raw outputs, as ours do
    return PlainExpert(expert, module, backend.reader(expert))
