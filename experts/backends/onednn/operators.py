"""oneDNN's operators as torch has them, and its opaque tensors as views of bytes that somebody else owns.

Both are torch's own but no part of its documented API: the operators that its compiler generates calls of, and the C
shim of its ahead-of-time compiler. So it is asked first whether they are here (``why_absent``), and what depends on
them is keyed by ``identity``: torch's version, this CPU and the cores that this process may use.

Guarantees: ``blocked_view`` copies nothing, and gives torch no description of bytes but one that torch told of a tensor
of its own in this very process; what a file says is compared with that, never passed on.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

NEEDED = (
    "_reorder_convolution_weight",
    "_reorder_linear_weight",
    "_convolution_pointwise",
    "_convolution_pointwise_",
    "_linear_pointwise",
    "_nbytes",
    "_get_mkldnn_serialized_md",
    "_is_mkldnn_bf16_supported",
    "data_ptr",
)
NEEDED_IN_EIGHT_BITS = ("qconv_prepack", "qconv2d_pointwise", "qlinear_prepack", "qlinear_pointwise")
ALIGNMENT_BYTES = 64  # of what oneDNN is given: a cache line, and the widest vector load
CPU_INFORMATION = Path("/proc/cpuinfo")
CPU_KEYS = ("model name", "cpu family", "model", "stepping", "cache size", "flags", "CPU part", "Features")


@cache
def why_absent(dtype: torch.dtype) -> str | None:
    """What is lacking for weights of that type, None where nothing is."""
    if not torch.backends.mkldnn.is_available():
        return "a torch that was built with oneDNN"
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "a CPU with instructions for bf16"
    if dtype == torch.int8 and not torch.cpu._is_vnni_supported():
        return "a CPU with instructions for eight bits (VNNI)"
    lacking = [name for name in NEEDED if not hasattr(torch.ops.mkldnn, name)]
    if dtype == torch.int8:
        lacking += [name for name in NEEDED_IN_EIGHT_BITS if not hasattr(torch.ops.onednn, name)]
    if lacking:
        return f"oneDNN's operators, of which torch {version('torch')} lacks {', '.join(lacking)}"
    try:
        _shim()
    except (OSError, AttributeError) as error:
        return f"torch's C shim for opaque tensors, which torch {version('torch')} has not as expected ({error})"
    return None


def cores() -> int:
    """How many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def identity() -> str:
    """What a layout depends on beside the shapes: torch, the CPU, and how many threads it may be run by."""
    told = _cpu()
    name = told.get("model name", platform.processor() or platform.machine())
    digest = hashlib.sha256(repr(sorted(told.items())).encode()).hexdigest()[:12]
    return f"torch {version('torch')}, {name} ({digest}), {cores()} cores"


@dataclass(frozen=True, slots=True)
class BlockedLayout:
    """How the bytes of an opaque tensor lie: made by ``layout_of`` alone, so that it is torch's own word."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    size_bytes: int
    description: bytes  # as oneDNN serialises it


def layout_of(blocked: Tensor) -> BlockedLayout:
    """How an opaque tensor lies."""
    operators = torch.ops.mkldnn
    description = bytes(operators._get_mkldnn_serialized_md(blocked).numpy())
    return BlockedLayout(tuple(blocked.shape), blocked.dtype, int(operators._nbytes(blocked)), description)


def blocked_bytes(blocked: Tensor) -> Tensor:
    """A copy of an opaque tensor's bytes, as a flat tensor of its dtype."""
    size_bytes = int(torch.ops.mkldnn._nbytes(blocked))
    flat = torch.empty(size_bytes // blocked.dtype.itemsize, dtype=blocked.dtype)
    ctypes.memmove(flat.data_ptr(), torch.ops.mkldnn.data_ptr(blocked), size_bytes)
    return flat


def blocked_view(flat: Tensor, layout: BlockedLayout) -> Tensor:
    """An opaque tensor over the bytes of a flat one; it holds no memory of its own.

    It must not be used once the flat one's memory is gone. Raises ValueError for bytes that are fewer or more than the
    layout's, of another dtype, with gaps or not aligned.
    """
    if flat.dtype != layout.dtype or flat.dim() != 1 or not flat.is_contiguous() or flat.nbytes != layout.size_bytes:
        raise ValueError(f"{layout.size_bytes} bytes of {layout.dtype} are needed, not {flat.nbytes} of {flat.dtype}")
    if flat.device.type != "cpu" or flat.data_ptr() % ALIGNMENT_BYTES:
        raise ValueError(f"oneDNN reads bytes in host memory that are aligned to {ALIGNMENT_BYTES}")
    rank = len(layout.shape)
    sizes, strides = (ctypes.c_int64 * rank)(*layout.shape), (ctypes.c_int64 * rank)()
    handle = ctypes.c_void_p()
    shim = _shim()
    failed = shim.create(
        flat.data_ptr(), rank, sizes, strides, 0, shim.dtypes[layout.dtype], shim.cpu, 0, ctypes.byref(handle),
        shim.opaque, layout.description, len(layout.description),
    )  # fmt: skip
    if failed:
        raise ValueError(f"torch makes no opaque tensor of {layout.size_bytes} bytes: its shim returned {failed}")
    made: Tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(shim.capsule(handle, None, None))
    return made


class _Shim:
    """The functions of torch's C shim that are needed, with their signatures. Raises OSError, AttributeError."""

    def __init__(self) -> None:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))

        def number(name: str) -> int:
            function = getattr(library, name)
            function.restype = ctypes.c_int32
            return int(function())

        self.opaque = number("aoti_torch_layout__mkldnn")
        self.cpu = number("aoti_torch_device_type_cpu")
        self.dtypes = {
            torch.float32: number("aoti_torch_dtype_float32"),
            torch.bfloat16: number("aoti_torch_dtype_bfloat16"),
            torch.int8: number("aoti_torch_dtype_int8"),
        }
        self.create = library.aoti_torch_create_tensor_from_blob_v2
        pointer, int64, int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
        self.create.restype = int32
        self.create.argtypes = [
            pointer, int64, pointer, pointer, int64, int32, int32, int32, pointer, int32, ctypes.c_char_p, int64,
        ]  # fmt: skip
        self.capsule = ctypes.pythonapi.PyCapsule_New
        self.capsule.restype, self.capsule.argtypes = ctypes.py_object, [pointer, ctypes.c_char_p, pointer]
        _ = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr  # asked for here, where its absence is told


_shim = cache(_Shim)


@cache
def _cpu() -> dict[str, str]:
    """What Linux tells of the first core; elsewhere nothing."""
    try:
        first = CPU_INFORMATION.read_text(encoding="utf-8").split("\n\n", 1)[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs if key.strip() in CPU_KEYS}
