"""Modules built without memory for their weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable

_HOLDERS = frozenset({torch.empty, torch.zeros, torch.ones})  # what modules make parameters and buffers with


class Weightless(TorchFunctionMode):  # type: ignore[misc]  # torch is not followed by mypy here
    """Parameters land on meta; what constructors compute and read (RegNet's widths, YOLO's strides) stays real."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # noqa: ANN401  torch's own signature
        named = dict(kwargs or {})
        if func in _HOLDERS:
            named["device"] = "meta"
        return func(*args, **named)
