"""Modules without memory of their own: built so, bound to borrowed tensors, their outputs in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor
    from torch.nn import Module

_HOLDERS = frozenset({torch.empty, torch.zeros, torch.ones})  # functions that modules make parameters and buffers with


class Weightless(TorchFunctionMode):  # type: ignore[misc]  # torch is not followed by mypy here
    """Builds parameters on meta; numbers that constructors compute (RegNet's widths, YOLO's strides) stay real."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # noqa: ANN401  torch's own signature
        named = dict(kwargs or {})
        if func in _HOLDERS:
            named["device"] = "meta"
        return func(*args, **named)


class ModuleBinding:
    """Locations of a module's weights, found once: rebinding walks a list, not a tree of modules."""

    def __init__(self, module: Module) -> None:
        wanted = weight_names(module)
        self._places: list[tuple[str, dict[str, Tensor | None], str]] = [
            (name, table, key)
            for prefix, owner in module.named_modules()
            for table in (owner._parameters, owner._buffers)
            for key in table
            if (name := f"{prefix}.{key}" if prefix else key) in wanted
        ]

    @property
    def names(self) -> set[str]:
        return {name for name, _, _ in self._places}

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        for name, table, key in self._places:
            table[key] = tensors[name]


def weight_names(module: Module) -> set[str]:
    return {name for name in module.state_dict() if not is_count(name)}


def is_count(name: str) -> bool:
    """True for BatchNorm's count of training batches, which inference does not read."""
    return name.endswith("num_batches_tracked")


def output_list(answer: Tensor | Mapping[str, Tensor], names: Sequence[str]) -> list[Tensor]:
    """A module's outputs in order. ``names``: entries of a mapping, or the one output's name."""
    return [answer] if isinstance(answer, torch.Tensor) else [answer[name] for name in names]
