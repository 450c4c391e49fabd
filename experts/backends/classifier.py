"""Image classifiers: every classification family of torchvision.models, by its name there.

An expert is a state dict of the family with one output per label. Auxiliary heads (GoogLeNet, Inception) serve training
only and are left out. ``stem: 3x3`` gives a ResNet a first convolution of 3x3 with stride 1, for crops of about 64 px.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, lru_cache
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch.nn import Conv2d
from torchvision import models

from experts.backends.base import Packable
from experts.backends.forms import ONEDNN_FORMS, executable_forms, form_recipe, require_executable
from experts.backends.made_once import MadeOnce
from experts.backends.modules.activations import Workspace, workspace
from experts.backends.modules.batchnorm_folding import FoldablePair, fold_structure, fold_weights, foldable_pairs
from experts.backends.modules.binding import Binding
from experts.backends.modules.weightless import Weightless
from experts.backends.onednn.backend_forms import OnednnForms, image_size
from experts.backends.outputs import label_by_label, require_numbers, require_several_labels
from experts.backends.pixels import fitted
from experts.backends.state_dict import DTYPES, executable, fit
from experts.backends.weight_files import read_state_dict, saving
from experts.errors import WeightsMismatch
from experts.expert import Precision, Prediction, Task

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from torch import Tensor
    from torch.nn import Module

    from experts.backends.base import Prepared, Skeleton
    from experts.backends.onednn.calibrating import Ranges
    from experts.backends.onnx.layout import LaidOutGraph
    from experts.backends.onnx.runtime_form import Answered, Refused
    from experts.expert import Expert

AUXILIARY_HEADS = {"googlenet": ("aux1.", "aux2."), "inception_v3": ("AuxLogits.",)}
RESNETS = ("resnet", "resnext", "wide_resnet")  # the families that take another stem
FIXED_SIZE = ("vit_", "maxvit_")  # families whose weights depend on the size of the input
TRANSFORMERS = ("vit_", "swin_", "maxvit_")  # their activations are sequences: channels_last gains nothing
TEMPLATES_KEPT = 64  # beside those that are held: packing goes through the line's forms in turn
OUTPUTS = ("logits",)
ANY_SIZE = (224, 224)  # that every family without a size of its own takes


@dataclass(frozen=True, slots=True)
class _Form:
    """What decides on a module's structure. Experts of one form share the template that skeletons are copied from."""

    architecture: str
    label_count: int
    stem: str | None
    size: tuple[int, int] | None  # height and width where the weights depend on them


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _Template:
    """A module without memory: as its weights come, and as they are run."""

    original: Module
    pairs: tuple[FoldablePair, ...]
    folded: Module


class ClassifierSkeleton:
    def __init__(self, module: Module, precision: Precision, device: str, memory_format: torch.memory_format) -> None:
        self._module = module
        self._binding = Binding(module)
        self._dtype = DTYPES[precision]
        self._device = torch.device(device)
        self._memory_format = memory_format

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        self._binding.bind(tensors)

    def infer(self, expert: Expert, batch: Sequence[Prepared]) -> tuple[Prediction, ...]:
        if not batch:
            raise ValueError("an empty batch")
        with torch.inference_mode():
            images = torch.stack([prepared.tensor for prepared in batch])
            images = images.to(self._device, self._dtype, memory_format=self._memory_format)
            return _answered(expert, (self._module(images),), batch)


class ClassifierBackend:
    """See experts.backends.base.Backend."""

    @property
    def precisions(self) -> frozenset[Precision]:
        return executable_forms()

    def pack(self, expert: Expert, precision: Precision) -> Packable:
        require_executable(expert, precision)
        require_several_labels(expert)
        form = _form(expert)
        ready = _ready(expert, precision)
        if precision is Precision.ONNXRUNTIME:
            from experts.backends.onnx.runtime_form import packable

            return packable(expert, _runtime_form(form, image_size(expert)), ready)
        if precision in ONEDNN_FORMS:
            return _onednn_forms.pack(expert, precision, form, ready)
        return Packable(ready, _unseen_structure(expert))

    def template(self, expert: Expert, precision: Precision, program: bytes, device: str) -> object:
        if precision is Precision.ONNXRUNTIME:
            return self.skeleton(expert, precision, program, device)
        template = _template(_form(expert))
        if precision in ONEDNN_FORMS:
            return template, _onednn_forms.packed(expert, precision, _form(expert), program)
        return template

    def skeleton(self, expert: Expert, precision: Precision, program: bytes, device: str) -> Skeleton:
        if precision is Precision.ONNXRUNTIME:
            from experts.backends.onnx.runtime_form import RuntimeSkeleton

            return RuntimeSkeleton(expert, program, device, _answered)
        if precision in ONEDNN_FORMS:
            return _onednn_forms.skeleton(expert, precision, _form(expert), program, device, _answered)
        is_transformer = expert.architecture.startswith(TRANSFORMERS)
        memory_format = torch.contiguous_format if is_transformer else torch.channels_last
        return ClassifierSkeleton(deepcopy(_template(_form(expert)).folded), precision, device, memory_format)

    def prepare(self, expert: Expert, image: np.ndarray) -> Prepared:
        return fitted(image, expert.pixels)

    def recipe(self, expert: Expert, precision: Precision) -> str:
        return form_recipe(precision) or _unseen_structure(expert).decode()

    def token_bytes(self, expert: Expert, precision: Precision) -> int:
        return 0

    def workspace_bytes(self, expert: Expert, precision: Precision, batch_size: int) -> int:
        return _workspace(_form(expert), image_size(expert), precision).batch_bytes(batch_size)


def build_trainable(architecture: str, class_count: int, stem: str | None = None, image_size: int = 224) -> Module:
    """A fresh module in training mode, weights random. Raises ValueError for an unknown architecture or stem."""
    return _build(_form_of(architecture, class_count, stem, (image_size, image_size)), init_weights=True).train()


def weight_shapes(architecture: str, class_count: int, stem: str | None, image_size: int) -> dict[str, tuple[int, ...]]:
    """Build without memory, without auxiliary heads. Raises ValueError for an unknown architecture or stem."""
    form = _form_of(architecture, class_count, stem, (image_size, image_size))
    with Weightless():
        return {name: tuple(tensor.shape) for name, tensor in _build(form, init_weights=False).state_dict().items()}


def write_random_weights(path: Path, architecture: str, class_count: int, seed: int, image_size: int = 224) -> None:
    """Untrained weights, for measuring. Raises ValueError for an unknown architecture, OSError from the disk."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tensors = build_trainable(architecture, class_count, image_size=image_size).state_dict()
    with saving(path):
        save_file(tensors, path)


def observed_ranges(expert: Expert, batches: Iterable[Tensor]) -> Ranges:
    """Ranges of its layers' values on images, float32 (n, 3, height, width). Raises as ``pack``."""
    return _onednn_forms.ranges(expert, _form(expert), _ready(expert, Precision.ONEDNN_INT8), batches)


def reader_of(expert: Expert) -> Answered:
    return _answered


def predictions(expert: Expert, probabilities: Tensor) -> tuple[Prediction, ...]:
    """One prediction per row of (n, labels). Raises OutputInvalid where a row holds something that is not a number."""
    require_numbers(expert, probabilities)
    scores, winners = (values.tolist() for values in probabilities.max(dim=1))
    return tuple(Prediction(expert.labels[winner], score) for winner, score in zip(winners, scores, strict=True))


@cache
def _known_architectures() -> frozenset[str]:
    return frozenset(models.list_models(module=models))


def _form(expert: Expert) -> _Form:
    try:
        return _form_of(expert.architecture, len(expert.labels), expert.stem, image_size(expert))
    except ValueError as error:
        raise WeightsMismatch(expert.id, str(error)) from error


def _ready(expert: Expert, precision: Precision) -> dict[str, Tensor]:
    """Its weights as the folded module has them, in the precision's dtype."""
    template = _template(_form(expert))
    found = read_state_dict(expert)
    heads = AUXILIARY_HEADS.get(expert.architecture, ())
    found = {name: tensor for name, tensor in found.items() if not name.startswith(heads)} if heads else found
    fitted = fit(expert, found, template.original.state_dict())
    return executable(expert, fold_weights(fitted, template.pairs), precision)


def _unseen_structure(expert: Expert) -> bytes:
    if not expert.architecture.startswith("maxvit_"):  # a MaxViT cuts its windows by the input's size
        return b""
    return f"for images of {expert.pixels.height}x{expert.pixels.width}".encode()


def _form_of(architecture: str, label_count: int, stem: str | None, size: tuple[int, int]) -> _Form:
    if architecture not in _known_architectures():
        near = get_close_matches(architecture, _known_architectures())
        raise ValueError(f"torchvision has no classifier {architecture!r}; near: {', '.join(near) or 'none'}")
    if stem not in {None, "3x3"}:
        raise ValueError(f"stem is {stem!r}: only '3x3' is known")
    if stem is not None and not architecture.startswith(RESNETS):
        raise ValueError(f"{architecture} takes no other stem: leave `stem` out, or choose a ResNet")
    if architecture.startswith("vit_") and size[0] != size[1]:
        raise ValueError(f"{architecture} takes square images, not {size[0]}x{size[1]}")
    return _Form(architecture, label_count, stem, size if architecture.startswith(FIXED_SIZE) else None)


def _build(form: _Form, *, init_weights: bool) -> Module:
    arguments: dict[str, object] = {"num_classes": form.label_count}
    if form.architecture in AUXILIARY_HEADS:
        arguments |= {"aux_logits": False, "init_weights": init_weights}
    if form.size is not None:
        arguments |= {"image_size": form.size[0]} if form.architecture.startswith("vit_") else {"input_size": form.size}
    module: Module = models.get_model(form.architecture, weights=None, **arguments)
    if form.stem == "3x3":
        module.conv1 = Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
    return module


def _make_template(form: _Form) -> _Template:
    with Weightless():
        original = _build(form, init_weights=False).to("meta").eval().requires_grad_(False)
    pairs = foldable_pairs(original, form.size or ANY_SIZE)
    folded = deepcopy(original)
    fold_structure(folded, pairs)
    return _Template(original, pairs, folded)


_template = MadeOnce(_make_template, TEMPLATES_KEPT)


def _make_runtime_form(form: _Form, size: tuple[int, int]) -> LaidOutGraph | Refused:
    from experts.backends.onnx.runtime_form import runtime_form

    return runtime_form(_template(form).folded, size, OUTPUTS, _sample(form))


_runtime_form = MadeOnce(_make_runtime_form, TEMPLATES_KEPT)


def _sample(form: _Form) -> dict[str, Tensor]:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return fold_weights(_build(form, init_weights=False).state_dict(), _template(form).pairs)


_onednn_forms = OnednnForms[_Form](lambda form: _template(form).folded, _sample, OUTPUTS)


def _answered(expert: Expert, outputs: Sequence[Tensor], batch: Sequence[Prepared]) -> tuple[Prediction, ...]:
    """Reads the logits."""
    require_numbers(expert, *outputs)
    logits = outputs[0].float()
    if expert.task is Task.MULTILABEL:
        return label_by_label(expert, logits.sigmoid().tolist())
    return predictions(expert, logits.softmax(dim=1))


@lru_cache(maxsize=256)
def _workspace(form: _Form, size: tuple[int, int], precision: Precision) -> Workspace:
    return workspace(_template(form).folded, size, DTYPES[precision])
