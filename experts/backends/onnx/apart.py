"""Packs ONNX graphs in a separate process; run by file name, see experts.backends.onnx.sandbox.

Each line of stdin is a folder with a job, a pickle of the parent process. A fork packs it, memory and time bounded
before it reads the graph, and writes tensors and program into the folder, or the reason into error.json. Its exit
status goes to stdout. After IDLE_S without a line the process ends.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import select
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # isolated Python adds no path

from safetensors.torch import save_file

from experts.backends.onnx.backend import packed
from experts.errors import ExpertError, is_out_of_memory

IDLE_S = 20.0


def main() -> None:
    while select.select([sys.stdin], [], [], IDLE_S)[0] and (line := sys.stdin.readline()):
        child = os.fork()
        if not child:
            os._exit(_end(Path(line.rstrip("\n"))))
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


def _end(folder: Path) -> int:
    try:
        expert, memory_bytes, limit_s = pickle.loads((folder / "job").read_bytes())
        _bound(memory_bytes, limit_s)
        packable = packed(expert)
        save_file({name: tensor.contiguous() for name, tensor in packable.tensors.items()}, folder / "tensors")
        (folder / "program").write_bytes(packable.program)
    except Exception as error:  # noqa: BLE001  an untrusted graph: any fault is that one expert's
        if is_out_of_memory(error):
            _report(folder, "WeightsRefused", "packing and trying it takes more memory than a model may")
        elif isinstance(error, ExpertError):
            _report(folder, type(error).__name__, error.message)
        else:
            _report(folder, "WeightsCorrupt", f"it cannot be packed: {type(error).__name__}: {error}")
    return 0


def _bound(memory_bytes: int, limit_s: int) -> None:
    pages = Path("/proc/self/statm")
    if pages.is_file():  # Linux alone keeps this limit
        taken_bytes = int(pages.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken_bytes + memory_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(10 * limit_s)  # waiting takes no processor time


def _report(folder: Path, kind: str, message: str) -> None:
    (folder / "error.json").write_text(json.dumps({"kind": kind, "message": message}), "utf-8")


if __name__ == "__main__":
    main()
