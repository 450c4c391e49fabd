"""Binding a module to memory that it does not own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from torch.nn import Module


@dataclass(frozen=True, slots=True)
class _Place:
    """One entry of one submodule's table of parameters or buffers, and the tensor's full name."""

    table: dict[str, Tensor | None]
    key: str
    name: str


class ModuleBinding:
    """The places of a module that weights go to, looked up once: rebinding walks a list, not a tree of modules."""

    def __init__(self, module: Module) -> None:
        wanted = weight_names(module)
        self._places = [
            _Place(table, key, name)
            for prefix, owner in module.named_modules()
            for table in (owner._parameters, owner._buffers)
            for key in table
            if (name := f"{prefix}.{key}" if prefix else key) in wanted
        ]

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Put the very tensors given in the module's places. ValueError if the names are not exactly the module's."""
        names = {place.name for place in self._places}
        if names != tensors.keys():
            raise ValueError(f"tensors do not fit the skeleton: {sorted(names ^ tensors.keys())[:5]}")
        for place in self._places:
            place.table[place.key] = tensors[place.name]


def weight_names(module: Module) -> set[str]:
    return {name for name in module.state_dict() if not name.endswith("num_batches_tracked")}
