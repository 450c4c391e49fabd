"""Packs and tries ONNX graphs in a separate process.

Folding constants and trying images run the graph, which may contain an endless loop or a tensor larger than any memory.
Guarantees: a graph beyond the limits is refused, only that expert; this process never runs the graph.
"""

from __future__ import annotations

import atexit
import math
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import load_file, save_file

from experts.backends.base import Packable
from experts.children.bounded import BoundedProcess, BoundedWork, ResourceLimits
from experts.errors import LoadError

if TYPE_CHECKING:
    from collections.abc import Callable

    from experts.expert import Expert

LIMIT_S_PER_GB = 120  # of processor time
WAITING = 10  # times that by the clock
MEMORY_BYTES = 6_000_000_000  # for constants and activations, beside COPIES of the weights
COPIES = 8  # as read, in sessions, written

_packer = BoundedProcess()
atexit.register(_packer.close)


def packed_apart(expert: Expert, pack: Callable[[Expert], Packable]) -> Packable:
    """Result of ``pack`` in that process. Raises as it does, and WeightsRefused for a graph that exceeds the bounds."""
    try:
        size_bytes = expert.weights.stat().st_size if expert.weights.is_file() else 0
        limit_s = LIMIT_S_PER_GB * max(1, math.ceil(size_bytes / 1e9))
        memory_bytes = MEMORY_BYTES + COPIES * size_bytes

        def too_long(code: int) -> str:
            return (
                f"{expert.weights}: packing and trying it took over {limit_s} s of the processor or "
                f"{memory_bytes / 1e9:.0f} GB of memory, and was ended ({code}): no model does"
            )

        with tempfile.TemporaryDirectory(prefix="coserve-pack-") as name:
            folder = Path(name)
            work = BoundedWork(
                partial(_write, pack, expert, folder),
                ResourceLimits(memory_bytes, memory_bytes, limit_s, WAITING * limit_s),
                "packing and trying it takes more memory than a model may",
                too_long,
                "it cannot be packed: ",
            )
            _packer.result(work, expert.id)
            return Packable(load_file(folder / "tensors"), program=(folder / "program").read_bytes())
    except OSError as error:
        raise LoadError(expert.id, f"cannot be packed: {error}") from error


def _write(pack: Callable[[Expert], Packable], expert: Expert, folder: Path) -> None:
    packable = pack(expert)
    save_file({name: tensor.contiguous() for name, tensor in packable.tensors.items()}, folder / "tensors")
    (folder / "program").write_bytes(packable.program)
