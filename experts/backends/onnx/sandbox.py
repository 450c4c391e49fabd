"""Packs and tries ONNX graphs in a separate process, see ``apart``.

Folding constants and trying images run the graph, which may contain an endless loop or a tensor larger than any memory.
Guarantees: a graph beyond the limits is refused, only that expert; this process never runs the graph.
"""

from __future__ import annotations

import atexit
import math
import pickle
import tempfile
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file

from experts.backends.base import Packable
from experts.children.child import Child
from experts.children.limits import ResourceLimits, answered
from experts.children.messages import unpacked
from experts.errors import LoadError, WeightsRefused

if TYPE_CHECKING:
    from experts.expert import Expert

PROCESS = "experts.backends.onnx.apart"
LIMIT_S_PER_GB = 120  # of processor time
WAITING = 10  # times that by the clock
MEMORY_BYTES = 6_000_000_000  # for constants and activations, beside COPIES of the weights
COPIES = 8  # as read, in sessions, written


class _Packer:
    """The packing process: one graph at a time."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: Child | None = None

    def done(self, job: bytes) -> tuple[bytes | None, int]:
        """What the fork of a job has answered, and its exit code."""
        with self._lock:
            with suppress(OSError):
                return self._send(job)
            return self._send(job)  # an idle process has ended

    def _send(self, job: bytes) -> tuple[bytes | None, int]:
        """Raises OSError if the process has ended."""
        self._process = process = self._process or Child(PROCESS, is_quiet=True)
        said: Any = None
        try:
            process.send(job)
            answer = None
            while (message := process.receive()) is not None:
                said, _ = unpacked(message)
                if isinstance(said, int):
                    return answer, said
                answer = message
        except OSError as error:
            said = str(error)
        self.end()
        raise OSError(f"the process that packs graphs has ended: {said}")

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.close()
            self._process = None


_packer = _Packer()
atexit.register(_packer.end)


def packed_apart(expert: Expert) -> Packable:
    """Raises as packing does, and WeightsRefused for a graph that exceeds the bounds."""
    try:
        size_bytes = expert.weights.stat().st_size if expert.weights.is_file() else 0
        limit_s = LIMIT_S_PER_GB * max(1, math.ceil(size_bytes / 1e9))
        memory_bytes = MEMORY_BYTES + COPIES * size_bytes
        limits = ResourceLimits(memory_bytes, memory_bytes, limit_s, WAITING * limit_s)
        with tempfile.TemporaryDirectory(prefix="coserve-pack-") as name:
            folder = Path(name)
            answer, code = _packer.done(pickle.dumps((expert, folder, limits)))
            if answer is not None:
                answered(answer, expert.id)
            if answer is None or code:
                raise WeightsRefused(
                    expert.id,
                    f"{expert.weights}: packing and trying it took over {limit_s} s of the processor or "
                    f"{memory_bytes / 1e9:.0f} GB of memory, and was ended ({code}): no model does",
                )
            return Packable(load_file(folder / "tensors"), program=(folder / "program").read_bytes())
    except OSError as error:
        raise LoadError(expert.id, f"cannot be packed: {error}") from error
