"""Common part of the backends of torch's modules: each form packs, binds and runs their modules."""

from __future__ import annotations

from copy import deepcopy
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from experts.backends.base import require_images, require_tensors
from experts.backends.forms import executable_form, executable_forms, form_of
from experts.backends.forms.base import Modules
from experts.backends.modules.activations import Workspace, workspace
from experts.backends.modules.binding import ModuleBinding, output_list

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from torch import Tensor

    from experts.backends.base import Packable, Prepared, Skeleton
    from experts.backends.forms.base import Reader
    from experts.expert import Expert, Precision, Prediction


class TorchBackend(Modules):
    """Implements experts.backends.base.Backend but for ``prepare``."""

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

    def workspace_bytes(self, expert: Expert, precision: Precision, batch_size: int) -> int:
        self.prototype(expert)  # refuses what it cannot be built for
        found = _workspace(self, self.structure(expert), expert.pixels.size, form_of(precision).dtype)
        return found.batch_bytes(batch_size)


class ModuleSkeleton:
    """A module as torch runs it. ``placed``: what batches become."""

    def __init__(self, modules: Modules, expert: Expert, placed: Mapping[str, Any]) -> None:
        self._read: Reader = modules.reader(expert)
        self._outputs = modules.outputs
        self._module = deepcopy(modules.module(modules.structure(expert)))
        self._binding = ModuleBinding(self._module)
        self._placed = placed

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        require_tensors(tensors, self._binding.names)
        self._binding.bind(tensors)

    def infer(self, expert: Expert, batch: Sequence[Prepared]) -> tuple[Prediction, ...]:
        require_images(batch)
        with torch.inference_mode():
            images = torch.stack([prepared.tensor for prepared in batch]).to(**self._placed)
            return self._read(expert, output_list(self._module(images), self._outputs), batch)


@lru_cache(maxsize=256)
def _workspace(modules: Modules, structure: Hashable, size: tuple[int, int], dtype: torch.dtype) -> Workspace:
    return workspace(modules.module(structure), size, dtype)
