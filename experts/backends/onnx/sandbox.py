"""Packs and tries ONNX graphs in a separate process, see ``apart``.

Folding constants and trying images run the graph, which may contain an endless loop or a tensor larger than any memory.
Guarantees: a graph beyond the limits is refused, only that expert; this process never runs the graph.
"""

from __future__ import annotations

import atexit
import json
import math
import pickle
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from safetensors.torch import load_file

from experts import errors
from experts.backends.base import Packable

if TYPE_CHECKING:
    from experts.expert import Expert

SCRIPT = Path(__file__).with_name("apart.py")
LIMIT_S_PER_GB = 120  # of processor time
MEMORY_BYTES = 6_000_000_000  # for constants and activations, beside COPIES of the weights
COPIES = 8  # as read, in sessions, written


class _Packer:
    """The packing process: one graph at a time."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[str] | None = None

    def ended(self, folder: Path) -> int:
        """Exit status of the fork that packed this folder."""
        with self._lock:
            answer = self._send(folder) or self._send(folder)  # an idle process ends after that
        if not answer:
            raise OSError("the process that packs graphs cannot be started")
        return int(answer)

    def _send(self, folder: Path) -> str:
        """The process's answer; empty where it has ended."""
        self._process = self._process or subprocess.Popen(
            [sys.executable, "-I", str(SCRIPT)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None, "they are pipes"  # noqa: PT018
        answer = ""
        with suppress(BrokenPipeError):
            print(folder, file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        if not answer:
            self.end()
        return answer

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


_packer = _Packer()
atexit.register(_packer.end)


def packed_apart(expert: Expert) -> Packable:
    """Raises as packing does, and WeightsRefused for a graph that exceeds the bounds."""
    try:
        size_bytes = expert.weights.stat().st_size if expert.weights.is_file() else 0
        limit_s = LIMIT_S_PER_GB * max(1, math.ceil(size_bytes / 1e9))
        memory_bytes = MEMORY_BYTES + COPIES * size_bytes
        with tempfile.TemporaryDirectory(prefix="coserve-pack-") as name:
            folder = Path(name)
            (folder / "job").write_bytes(pickle.dumps((expert, memory_bytes, limit_s)))
            ended = _packer.ended(folder)
            if (folder / "error.json").is_file():
                found = json.loads((folder / "error.json").read_text("utf-8"))
                raise getattr(errors, found["kind"])(expert.id, found["message"])
            if ended:
                raise errors.WeightsRefused(
                    expert.id,
                    f"{expert.weights}: packing and trying it took over {limit_s} s of the processor or "
                    f"{memory_bytes / 1e9:.0f} GB of memory, and was ended ({ended}): no model does",
                )
            return Packable(load_file(folder / "tensors"), program=(folder / "program").read_bytes())
    except OSError as error:
        raise errors.LoadError(expert.id, f"cannot be packed: {error}") from error
