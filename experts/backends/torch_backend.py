"""Common part of the backends of torch's modules: each form packs, binds and runs their modules."""

from __future__ import annotations

from abc import abstractmethod
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from experts.backends.base import WeightBytes, require_images, require_tensors
from experts.backends.batches import stacked
from experts.backends.forms import executable_form, executable_forms, form_of
from experts.backends.forms.base import Modules
from experts.backends.made_once import MadeOnce
from experts.backends.modules.activations import Workspace, workspace
from experts.backends.modules.binding import ModuleBinding, output_list
from experts.backends.state_dict import executable, fit, fitting
from experts.devices.copies import copied_down
from experts.devices.graphs import graphs_here
from experts.errors import WeightsMismatch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from torch import Tensor
    from torch.nn import Module

    from experts.backends.base import Packable, Prepared, Skeleton
    from experts.backends.forms.base import Form, Reader
    from experts.expert import Expert, Precision, Prediction

MOST_REPLAYED = 4  # images: larger batches take longer than their launches
TEMPLATES_KEPT = 64  # beside those in use: packing alternates between the line's forms


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Template:
    """A module without memory, as trained and as it runs. ``fold`` turns weights of the one into the other's."""

    original: Module
    folded: Module
    fold: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


class TorchBackend(Modules):
    """Implements experts.backends.base.Backend but for ``prepare``."""

    @abstractmethod
    def build(self, structure: Any) -> Module:  # noqa: ANN401  a family's own
        """A fresh module. Raises ValueError for an unknown architecture."""

    @abstractmethod
    def make_template(self, structure: Any) -> Template:  # noqa: ANN401
        """Raises ValueError for an unknown architecture."""

    @abstractmethod
    def read_weights(self, expert: Expert, *, as_headers: bool = False) -> dict[str, Tensor]:
        """The expert's file, named as in the family's module. Raises as ``Backend.pack``. ``as_headers``: on meta."""

    def prototype(self, expert: Expert) -> Template:
        try:
            return _template(self, self.structure(expert))
        except ValueError as error:
            raise WeightsMismatch(expert.id, str(error)) from error

    def module(self, structure: Any) -> Module:  # noqa: ANN401
        return _template(self, structure).folded

    def sample(self, structure: Any) -> dict[str, Tensor]:  # noqa: ANN401
        template = _template(self, structure)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            return template.fold(self.build(structure).state_dict())

    def weights(self, expert: Expert, form: Form) -> dict[str, Tensor]:
        template = self.prototype(expert)
        fitted = fit(expert, self.read_weights(expert), template.original.state_dict())
        return executable(expert, template.fold(fitted), form)

    def check(self, expert: Expert) -> None:
        expected = self.prototype(expert).original.state_dict()
        fitting(expert, self.read_weights(expert, as_headers=True), expected)

    def plain_skeleton(self, expert: Expert, dtype: torch.dtype, device: str) -> Skeleton:
        placed = {"device": torch.device(device), "dtype": dtype, "memory_format": self.memory_format(expert)}
        return ModuleSkeleton(self, expert, placed)

    def memory_format(self, expert: Expert) -> torch.memory_format:
        return torch.channels_last

    def unseen_structure(self, expert: Expert) -> bytes:
        return b""

    @property
    def precisions(self) -> frozenset[Precision]:
        return executable_forms()

    def pack(self, expert: Expert, precision: Precision) -> Packable:
        return executable_form(expert, precision).pack(self, expert)

    def template(self, expert: Expert, precision: Precision, program: bytes, device: str) -> object:
        return form_of(precision).template(self, expert, program, device)

    def skeleton(self, expert: Expert, precision: Precision, program: bytes, device: str) -> Skeleton:
        return form_of(precision).skeleton(self, expert, program, device)

    def recipe(self, expert: Expert, precision: Precision) -> str:
        return form_of(precision).recipe() or self.unseen_structure(expert).decode()

    def token_bytes(self, expert: Expert, precision: Precision) -> int:
        return 0

    def weight_bytes(self, expert: Expert, precision: Precision) -> WeightBytes:
        weights = self.prototype(expert).folded.state_dict()
        return WeightBytes(sum(tensor.numel() for tensor in weights.values()) * form_of(precision).dtype.itemsize)

    def workspace_bytes(self, expert: Expert, precision: Precision, batch_size: int) -> int:
        self.prototype(expert)  # refuses an expert that it cannot be built for
        found = _workspace(self, self.structure(expert), expert.pixels.size, form_of(precision).dtype)
        return found.batch_bytes(batch_size)


class Bound:
    """Owner of the graphs that read what a skeleton is bound to."""


class ModuleSkeleton:
    """A module as torch runs it. ``placed``: device, dtype and memory format of batches."""

    def __init__(self, modules: Modules, expert: Expert, placed: Mapping[str, Any]) -> None:
        self._read: Reader = modules.reader(expert)
        self._condensed = modules.condensed
        self._outputs = modules.outputs
        self._is_replayable = modules.is_replayable
        self._bound = Bound()
        self._module = deepcopy(modules.module(modules.structure(expert)))
        self._binding = ModuleBinding(self._module)
        self._placed = placed

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        require_tensors(tensors, self._binding.names)
        self._binding.bind(tensors)
        self._bound = Bound()

    def infer(self, expert: Expert, batch: Sequence[Prepared]) -> tuple[Prediction, ...]:
        require_images(batch)
        with torch.inference_mode():
            outputs = self.outputs([prepared.tensor for prepared in batch])
            if self._placed["device"].type != "cpu":  # each value that the reader asked for would be a wait
                outputs = copied_down(self._condensed(outputs), self._placed["device"])
            return self._read(expert, outputs, batch)

    def outputs(self, images: Sequence[Tensor]) -> Sequence[Tensor]:
        batch = stacked(images, **self._placed)
        graphs = graphs_here() if self._is_replayable and len(images) <= MOST_REPLAYED else None
        replayed = None if graphs is None else graphs.run(self._bound, self._module, [batch], [batch.shape])
        return output_list(self._module(batch) if replayed is None else replayed, self._outputs)


def _make_template(backend: TorchBackend, structure: Hashable) -> Template:
    return backend.make_template(structure)


_template = MadeOnce(_make_template, TEMPLATES_KEPT)


@lru_cache(maxsize=256)
def _workspace(modules: Modules, structure: Hashable, size: tuple[int, int], dtype: torch.dtype) -> Workspace:
    return workspace(modules.module(structure), size, dtype)
