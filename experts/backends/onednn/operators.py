"""oneDNN's operators in torch, and its opaque tensors as views of borrowed bytes.

Neither is documented API of torch: its compiler calls the operators, its ahead-of-time compiler the C shim. So they are
tried first (``why_absent``), and everything that depends on them is keyed by ``identity``.

Guarantees: ``blocked_view`` copies nothing, and gives torch only layout descriptions that torch made in this process.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from experts.backends.control_groups import cores

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

Result = TypeVar("Result")

NEEDED = (
    "_reorder_convolution_weight", "_reorder_linear_weight", "_convolution_pointwise", "_convolution_pointwise_",
    "_linear_pointwise", "_nbytes", "_get_mkldnn_serialized_md", "_is_mkldnn_bf16_supported", "data_ptr",
)  # fmt: skip
NEEDED_IN_EIGHT_BITS = ("qconv_prepack", "qconv2d_pointwise", "qlinear_prepack", "qlinear_pointwise")
WIDE, NARROW = 127, 63  # greatest weights: of 8 bits, and of 7, whose products in pairs fit into 16 bits
TRIED_DEVIATION_MAXIMUM = 0.01  # rounding to bf16 makes 0.004, saturation a half
ALIGNMENT_BYTES = 64  # a cache line, and the widest vector load
PADDED_BYTES = 772  # of a serialised layout, a C struct
PADDING = (108, 316)  # places of four bytes that oneDNN never writes: they differ in each process
CPU_INFORMATION = Path("/proc/cpuinfo")
CPU_KEYS = ("model name", "cpu family", "model", "stepping", "cache size", "flags", "CPU part", "Features")


@cache
def why_absent(dtype: torch.dtype) -> str | None:
    """Try the operators: torch checks the CPU, oneDNN its settings; nobody reports sums that saturate."""
    if not torch.backends.mkldnn.is_available():
        return "this torch was built without oneDNN"
    lacking = [name for name in NEEDED if not hasattr(torch.ops.mkldnn, name)]
    if dtype == torch.int8:
        lacking += [name for name in NEEDED_IN_EIGHT_BITS if not hasattr(torch.ops.onednn, name)]
    if lacking:
        return f"torch {version('torch')} lacks oneDNN's operators {', '.join(lacking)}"
    try:
        _shim()
    except (OSError, AttributeError) as error:
        return f"torch {version('torch')} has another C shim for opaque tensors ({error})"
    try:
        deviation = on_threads(1, lambda: _tried_deviation(dtype, weight_highest() if dtype == torch.int8 else WIDE))
    except RuntimeError as error:  # torch names the instructions that the CPU lacks
        return str(error).partition("\n")[0]
    is_right = deviation <= TRIED_DEVIATION_MAXIMUM
    return None if is_right else f"oneDNN's sums are off by {deviation:.0%} of the largest"


@cache
def weight_highest() -> int:
    """Greatest weight in eight bits: without VNNI, pairs of wider products saturate. Raises RuntimeError."""
    wide = on_threads(1, lambda: _tried_deviation(torch.int8, WIDE))
    return WIDE if wide <= TRIED_DEVIATION_MAXIMUM else NARROW


def on_threads(threads: int, call: Callable[[], Result]) -> Result:
    """Run a call on a new thread whose operators use so many threads; other threads keep their counts."""

    def counted() -> Result:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return call()
        finally:
            torch.set_num_threads(before)  # torch gives the latest count to threads that never set their own

    with ThreadPoolExecutor(1, "onednn-layouts") as thread:
        return thread.submit(counted).result()


def made_for(numbers: torch.dtype) -> str:
    """Box that packed bytes are for. Weights up to WIDE are not named."""
    is_narrow = numbers == torch.int8 and weight_highest() < WIDE
    return f"{identity()}, weights up to {weight_highest()}" if is_narrow else identity()


@cache
def identity() -> str:
    """Torch, CPU, cores and one weight's layout: settings may limit oneDNN to fewer instructions than the CPU has."""
    facts = _cpu()
    name = facts.get("model name", platform.processor() or platform.machine())
    layout = on_threads(1, _any_layout)
    digest = hashlib.sha256(repr((sorted(facts.items()), layout)).encode()).hexdigest()[:12]
    return f"torch {version('torch')}, {name} ({digest}), {cores()} cores"


@dataclass(frozen=True, slots=True)
class BlockedLayout:
    """Layout of an opaque tensor's bytes, made by ``layout_of`` alone."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    size_bytes: int
    description: bytes  # as oneDNN serialises it

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.description).hexdigest()


def layout_of(blocked: Tensor) -> BlockedLayout:
    operators = torch.ops.mkldnn
    description = bytearray(operators._get_mkldnn_serialized_md(blocked).numpy())
    for place in PADDING if len(description) == PADDED_BYTES else ():
        description[place : place + 4] = bytes(4)
    return BlockedLayout(tuple(blocked.shape), blocked.dtype, int(operators._nbytes(blocked)), bytes(description))


def blocked_bytes(blocked: Tensor) -> Tensor:
    """Copy an opaque tensor's bytes into a flat tensor of its dtype."""
    size_bytes = int(torch.ops.mkldnn._nbytes(blocked))
    flat = torch.empty(size_bytes // blocked.dtype.itemsize, dtype=blocked.dtype)
    ctypes.memmove(flat.data_ptr(), torch.ops.mkldnn.data_ptr(blocked), size_bytes)
    return flat


def blocked_view(flat: Tensor, layout: BlockedLayout) -> Tensor:
    """View ``flat`` as opaque, while ``flat`` lives. ValueError for another size or dtype, gaps, misalignment."""
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
    """Functions of torch's C shim with their signatures. Raises OSError, AttributeError."""

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
        _ = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr  # read here, where its absence is reported


_shim = cache(_Shim)


@cache
def _cpu() -> dict[str, str]:
    """Linux's facts about the first core; empty elsewhere."""
    try:
        first = CPU_INFORMATION.read_text(encoding="utf-8").split("\n\n", 1)[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs if key.strip() in CPU_KEYS}


# Nearly the largest numbers of eight bits: sums of their products saturate where the CPU adds them in 16 bits.
_TRIED_IMAGES = (255 - torch.arange(32 * 8 * 8) % 4).reshape(1, 32, 8, 8)
_TRIED_BELOW = (torch.arange(16 * 32 * 3 * 3) % 3).reshape(16, 32, 3, 3)  # of the greatest weight
_GEOMETRY = ([1, 1], [1, 1], [1, 1], 1)  # stride, padding, dilation, groups; operators differ in the first two's order
_PLAINLY: tuple[str, list[float], str] = ("none", [], "")  # without an activation


def _any_layout() -> BlockedLayout:
    weight, source = torch.zeros(64, 64, 1, 1), [16, 64, 14, 14]  # its layout differs by the CPU's instructions
    return layout_of(torch.ops.mkldnn._reorder_convolution_weight(weight, [0, 0], [1, 1], [1, 1], 1, source))


def _tried_deviation(dtype: torch.dtype, highest: int) -> float:
    """Largest deviation of a convolution and a linear layer from exact sums, in parts of the largest sum.

    Raises RuntimeError.
    """
    weight = highest - _TRIED_BELOW
    rows, matrix = _TRIED_IMAGES.reshape(-1, 64), weight.reshape(-1, 64)
    tried = _tried_in_eight_bits if dtype == torch.int8 else partial(_tried_in, dtype)
    found = tried(weight, rows, matrix)
    exact = (
        torch.conv2d(_TRIED_IMAGES.double(), weight.double(), None, *_GEOMETRY),
        rows.double() @ matrix.double().t(),
    )
    off = [(each.double() - sums).abs().max() / sums.max() for each, sums in zip(found, exact, strict=True)]
    return float(torch.stack(off).max())  # NaN if any of them is


def _tried_in(dtype: torch.dtype, weight: Tensor, rows: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    operators = torch.ops.mkldnn
    images = _TRIED_IMAGES.to(dtype).contiguous(memory_format=torch.channels_last)
    blocked = operators._reorder_convolution_weight(weight.to(dtype), *_GEOMETRY, list(images.shape))
    packed = operators._reorder_linear_weight(matrix.to(dtype), len(rows))
    convolved = operators._convolution_pointwise(images, blocked, None, *_GEOMETRY, *_PLAINLY)
    return convolved, operators._linear_pointwise(rows.to(dtype), packed, None, *_PLAINLY)


def _tried_in_eight_bits(weight: Tensor, rows: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    operators = torch.ops.onednn
    images = _TRIED_IMAGES.to(torch.uint8).contiguous(memory_format=torch.channels_last)
    scales, *others = _unscaled(weight)
    blocked = operators.qconv_prepack(weight.to(torch.int8), scales, 1.0, 0, *_GEOMETRY, list(images.shape))
    packed = operators.qlinear_prepack(matrix.to(torch.int8), list(rows.shape))
    answer = (1.0, 0, torch.float32, *_PLAINLY)  # scale, zero, type
    convolved = operators.qconv2d_pointwise(images, 1.0, 0, blocked, scales, *others, *_GEOMETRY, *answer)
    return convolved, operators.qlinear_pointwise(rows.to(torch.uint8), 1.0, 0, packed, *_unscaled(matrix), *answer)


def _unscaled(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    channels = len(weight)
    return torch.ones(channels), torch.zeros(channels, dtype=torch.int64), torch.zeros(channels)
