"""Capabilities of processors: the one table of what each has, asked of torch. Code that depends on one asks here.

Without Triton, attention over blocks is gathered torch. Without pinned memory, copies wait for the host. Without memory
of its own, a device and the CPU share one arena. Numbers that a processor does not multiply are computed in fp32.

Rows of CUDA and Metal have run on no hardware yet.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from experts.backends.forms import plain
from experts.expert import Precision

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

JETSON = Path("/etc/nv_tegra_release")
TF32 = "tf32"  # fp32 with a mantissa of 10 bits, in products
TRITON_SINCE = 7  # compute capability, as torch asks for it
HOPPER_AND_BLACKWELL = (9, 10)
LARGE_PRODUCTS_BYTES = 32 * 1024 * 1024  # torch's choice of CUBLAS_WORKSPACE_CONFIG there, :4096:8
PRODUCTS_BYTES = (2 * 4096 + 8 * 16) * 1024  # elsewhere, :4096:2:16:8
FP16_SINCE, BF16_SINCE = (5, 3), (8, 0)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Row of one processor. ``multiplied``: numbers with instructions of their own, beside fp32.

    ``has_streams``: work and copies in order on queues of the device, with events between them.
    ``products_bytes``: of its library of products (cuBLAS), for each stream, from torch's allocator.
    """

    multiplied: tuple[str, ...]
    has_own_memory: bool  # False: it runs from host memory
    has_triton: bool = False
    has_pinned_memory: bool = False
    has_streams: bool = False
    has_graphs: bool = False
    has_float64: bool = True
    products_bytes: int = 0

    @property
    def text(self) -> str:
        flags = {name: has for name, has in asdict(self).items() if isinstance(has, bool)}
        parts = {verb: [name for name in flags if flags[name] is (verb == "has")] for verb in ("has", "lacks")}
        parts = {"multiplies": [Precision.FP32, *self.multiplied]} | parts
        text = "; ".join(f"{verb} {', '.join(names)}" for verb, names in parts.items() if names)
        return text.replace("has_", "").replace("_", " ")


METAL = Capabilities((Precision.BF16, Precision.FP16), has_own_memory=False, has_float64=False)  # macOS 14 and newer
_supposed: ContextVar[Mapping[str, Capabilities]] = ContextVar("supposed")


def capabilities_of(processor: str) -> Capabilities:
    """Row of a processor of this box. CUDA of another box, a worker's, counts as Ampere."""
    name = processor.rpartition("/")[2]
    if (found := _supposed.get({}).get(name)) is not None:
        return found
    if name == "cuda":
        if not torch.cuda.is_available():
            return cuda_capabilities(BF16_SINCE)
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        is_integrated, has_triton = bool(properties.is_integrated) or JETSON.exists(), find_spec("triton") is not None
        return cuda_capabilities((properties.major, properties.minor), is_integrated, has_triton=has_triton)
    if name == "mps":
        return METAL
    multiplied = tuple(form for form in (Precision.BF16, Precision.FP16) if plain.is_multiplied(form))
    return Capabilities(multiplied, has_own_memory=name == "emulated")


def cuda_capabilities(
    compute: tuple[int, int], is_integrated: bool = False, *, has_triton: bool = True
) -> Capabilities:
    """Row of an NVIDIA GPU of this compute capability, such as (8, 6). ``has_triton``: torch's package is there."""
    multiplied = ((Precision.FP16, FP16_SINCE), (Precision.BF16, BF16_SINCE), (TF32, BF16_SINCE))
    return Capabilities(
        tuple(name for name, since in multiplied if compute >= since),
        has_own_memory=not is_integrated,
        has_triton=has_triton and compute[0] >= TRITON_SINCE,
        has_pinned_memory=True,
        has_streams=True,
        has_graphs=True,
        products_bytes=LARGE_PRODUCTS_BYTES if compute[0] in HOPPER_AND_BLACKWELL else PRODUCTS_BYTES,
    )


@contextmanager
def supposed(rows: Mapping[str, Capabilities]) -> Iterator[None]:
    """Context of a dry run: these processors have these rows, whatever is there."""
    token = _supposed.set(rows)
    try:
        yield
    finally:
        _supposed.reset(token)
