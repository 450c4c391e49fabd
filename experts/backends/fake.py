"""Fake: an expert that declares its bytes and its time, so that the whole agent runs without a model.

Its weights file is YAML or JSON:
    weight_bytes   its own bytes; at least 1
    K_s, B_s       a batch of n images takes K_s * n + B_s seconds, by sleeping
    workspace_bytes   per image, default 0
    shared         {name: bytes} in common with every fake that names it too, default none
    label          the fixed answer; without it the label follows from the image's mean colour
The bytes are real, and derived from the expert's id and the names of the shared ones. A batch over other bytes is
WeightsCorrupt: a runtime that confuses experts cannot pass its tests.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import yaml

from experts.backends.base import Packable, WeightBytes, require_images, require_tensors
from experts.backends.forms import FORMS
from experts.backends.vision.pixels import fitted
from experts.errors import LoadError, WeightsCorrupt, WeightsMismatch, WeightsMissing
from experts.expert import Precision, Prediction

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from experts.backends.base import Prepared
    from experts.expert import Expert

OWN = "own"  # name of the tensor of unshared bytes; the shared ones are "shared.<name>"
WORD_BYTES = 8
SAMPLES = 16  # words that a batch compares with the expected ones, first and last among them
CHUNK_WORDS = 1 << 20
SCORE = 0.9


@dataclass(frozen=True, slots=True)
class FakeModel:
    """Declaration of a fake; see the module for its fields."""

    weight_bytes: int
    K_s: float = 0.0
    B_s: float = 0.0
    workspace_bytes: int = 0
    shared: dict[str, int] = field(default_factory=dict)
    label: str | None = None

    def __post_init__(self) -> None:
        sizes = [self.weight_bytes, *self.shared.values()]
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            raise ValueError(f"sizes of weights are whole numbers above 0, not {sizes}")
        if not isinstance(self.workspace_bytes, int) or self.workspace_bytes < 0:
            raise ValueError(f"workspace_bytes is a whole number, not {self.workspace_bytes!r}")
        if not all(isinstance(seconds, int | float) and seconds >= 0 for seconds in (self.K_s, self.B_s)):
            raise ValueError(f"K_s and B_s are seconds from 0, not {self.K_s!r} and {self.B_s!r}")


class FakeSkeleton:
    """Sleeps and answers, over the bytes of the given expert alone."""

    def __init__(self, model: FakeModel) -> None:
        self._model = model
        self._tensors: Mapping[str, Tensor] = {}

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        require_tensors(tensors, (OWN, *(f"shared.{name}" for name in self._model.shared)))
        self._tensors = dict(tensors)

    def infer(self, expert: Expert, batch: Sequence[Prepared]) -> tuple[Prediction, ...]:
        require_images(batch)
        for name, tensor in self._tensors.items():
            if not _is_sound(tensor, _seed(expert.id, name)):
                raise WeightsCorrupt(expert.id, f"the memory it runs from does not hold its tensor {name}")
        time.sleep(self._model.K_s * len(batch) + self._model.B_s)
        return tuple(Prediction(self._model.label or _label_of(expert, prepared), SCORE) for prepared in batch)


class FakeBackend:
    """Implements ``experts.backends.base.Backend`` for declared fakes."""

    precisions = frozenset(name for name, form in FORMS.items() if not form.needs_calibration)  # none are observed

    def pack(self, expert: Expert, precision: Precision) -> Packable:
        model = _declared(expert)
        sizes = {OWN: model.weight_bytes, **{f"shared.{name}": size for name, size in model.shared.items()}}
        tensors = {name: _pseudo_random(_seed(expert.id, name), size) for name, size in sizes.items()}
        return Packable(tensors, program=json.dumps(asdict(model), sort_keys=True).encode())

    def check(self, expert: Expert) -> None:
        _declared(expert)

    def template(self, expert: Expert, precision: Precision, program: bytes, device: str) -> object:
        return self.skeleton(expert, precision, program, device)

    def skeleton(self, expert: Expert, precision: Precision, program: bytes, device: str) -> FakeSkeleton:
        return FakeSkeleton(FakeModel(**json.loads(program)))

    def prepare(self, expert: Expert, image: np.ndarray) -> Prepared:
        return fitted(image, expert.pixels)

    def recipe(self, expert: Expert, precision: Precision) -> str:
        return ""

    def token_bytes(self, expert: Expert, precision: Precision) -> int:
        return 0

    def weight_bytes(self, expert: Expert, precision: Precision) -> WeightBytes:
        model = read_fake(expert)
        return WeightBytes(model.weight_bytes + sum(model.shared.values()))

    def workspace_bytes(self, expert: Expert, precision: Precision, batch_size: int) -> int:
        return read_fake(expert).workspace_bytes * batch_size


def _declared(expert: Expert) -> FakeModel:
    model = read_fake(expert)
    if model.label is not None and model.label not in expert.labels:
        raise WeightsMismatch(expert.id, f"{expert.weights}: label {model.label!r} is not a label of the line")
    return model


def read_fake(expert: Expert) -> FakeModel:
    """Read an expert's declaration. Raises WeightsMissing, LoadError, WeightsCorrupt."""
    try:
        document: Any = yaml.safe_load(expert.weights.read_text())
        return FakeModel(**document)
    except FileNotFoundError as error:
        raise WeightsMissing(
            expert.id, f"{expert.weights} is not there: copy it there, or correct `weights`"
        ) from error
    except OSError as error:
        raise LoadError(expert.id, f"{expert.weights} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, TypeError, ValueError) as error:
        raise WeightsCorrupt(expert.id, f"{expert.weights} does not declare a fake: {error}") from error


def _label_of(expert: Expert, prepared: Prepared) -> str:
    colour = prepared.tensor.mean(dim=(1, 2)).mul(64).round().to(torch.int32).tolist()
    return expert.labels[int.from_bytes(hashlib.sha256(repr(colour).encode()).digest()[:8]) % len(expert.labels)]


def _seed(expert: str, name: str) -> int:
    text = name if name != OWN else f"{name} {expert}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:WORD_BYTES])


def _pseudo_random(seed: int, size_bytes: int) -> Tensor:
    count = -(-size_bytes // WORD_BYTES)
    words = np.empty(count, dtype=np.uint64)
    for start in range(0, count, CHUNK_WORDS):
        stop = min(start + CHUNK_WORDS, count)
        words[start:stop] = _words(seed, np.arange(start, stop, dtype=np.uint64))
    return torch.from_numpy(words.view(np.uint8)[:size_bytes])


def _is_sound(tensor: Tensor, seed: int) -> bool:
    last = (tensor.numel() - 1) // WORD_BYTES
    places = np.linspace(0, last, num=min(SAMPLES, last + 1)).astype(np.uint64)
    expected = torch.from_numpy(_words(seed, places).view(np.uint8))  # the last word may be cut
    words = [tensor[place * WORD_BYTES : (place + 1) * WORD_BYTES] for place in places.tolist()]
    found = torch.cat(words).cpu()  # one copy from a device
    is_same: bool = torch.equal(found, expected[: found.numel()])
    return is_same


def _words(seed: int, places: np.ndarray) -> np.ndarray:
    """Pseudo-random words at these places (the finalizer of SplitMix64), each computed independently."""
    mixed = places * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
