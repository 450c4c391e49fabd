"""Memory of a forward pass without the weights, from shapes alone."""

from __future__ import annotations

import weakref
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from experts.backends.modules.compiler import compiler_left_out

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.nn import Module


def peak_bytes(module: Module, image: Tensor) -> int:
    """Most bytes of intermediate tensors at once, input included, on the meta device; kernels' own are not counted."""
    weights = {tensor.untyped_storage()._cdata for tensor in module.state_dict(keep_vars=True).values()}
    live = _LiveBytes(weights)
    live.track(image)
    with compiler_left_out(), torch.no_grad(), live:
        module(image)
    return live.peak_bytes


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory of a batch without the weights: a constant part, and a part per image."""

    fixed_bytes: int
    per_image_bytes: int

    def batch_bytes(self, batch_size: int) -> int:
        return self.fixed_bytes + self.per_image_bytes * batch_size


def workspace(module: Module, size: tuple[int, int], dtype: torch.dtype) -> Workspace:
    """Estimate for a module on the meta device, in that dtype, for images of that height and width."""
    module = deepcopy(module).to(dtype)
    image = torch.empty((1, 3, *size), dtype=dtype, device="meta")
    arrived_bytes = 4 * image.numel()  # the float32 image that the batch is cast from
    return Workspace(_reordered_bytes(module), arrived_bytes + peak_bytes(module, image))


def _reordered_bytes(module: Module) -> int:
    sizes = [tensor.numel() * tensor.element_size() for tensor in module.state_dict().values() if tensor.dim() == 4]
    return 2 * max(sizes, default=0)  # a kernel may reorder the largest before it starts


class _LiveBytes(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed by mypy here
    """Counts the storages that are alive between operations."""

    def __init__(self, ignored: set[int]) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._live_bytes = 0
        self._known = ignored

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # noqa: ANN401  torch's own signature
        result = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self.track, result)
        return result

    def track(self, tensor: Tensor) -> None:
        """Count the tensor's storage from now until it dies."""
        storage = tensor.untyped_storage()
        if tensor.device.type != "meta" or storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        self._live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes()).atexit = False

    def _forget(self, address: int, size_bytes: int) -> None:
        self._known.discard(address)
        self._live_bytes -= size_bytes
