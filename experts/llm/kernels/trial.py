"""Trial of Triton's kernels on a device: they are used once they have computed there what torch does.

Triton needs a C compiler and Python's header files, once for a box: it keeps what it compiles in ``TRITON_CACHE_DIR``.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

TOLERANCE = 0.01  # relative, of results in bf16
log = logging.getLogger(__name__)


def takes_kernel(rows: Tensor, trial: Callable[..., tuple[Tensor, Tensor]]) -> bool:
    """True if Triton runs on the device of these rows, and ``trial``'s results, found and exact, agreed there.

    Tried once for each device and dtype, which waits for the device. Fake tensors have no bytes for a kernel.
    """
    return rows.device.type == "cuda" and type(rows) is torch.Tensor and is_right(trial, rows.device, rows.dtype)


@cache
def is_right(trial: Callable[..., tuple[Tensor, Tensor]], device: torch.device, dtype: torch.dtype) -> bool:
    """``takes_kernel`` of a device."""
    if find_spec("triton") is None:
        return False
    try:
        found, exact = (one.float().cpu() for one in trial(device, dtype))
    except Exception as error:  # noqa: BLE001 - of a compiler, an assembler or a driver: torch's way is there
        log.warning("Triton's kernels do not run on this device, torch's slower operators do their work: %s", error)
        return False
    return bool((found - exact).norm() <= TOLERANCE * exact.norm())
