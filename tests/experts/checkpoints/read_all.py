"""Run in a process of its own: FOLDER. Reads each file as experts.checkpoints.conversion does, and reports it.

Prints JSON: of each file how it ended and in how many seconds; what the interpreter was asked to do meanwhile that is
no reading; the most memory that was taken; and whether the environment is as it was.
"""

import json
import os
import resource
import sys
import time
import traceback
from pathlib import Path

import numpy as np

from experts.checkpoints.conversion import convert
from experts.checkpoints.reading import MEMORY_BYTES
from experts.children.bounded import ResourceLimits
from experts.errors import WeightsCorrupt, WeightsRefused

PERMITTED = (
    "open",
    "os.stat",
    "os.remove",
    "mmap.__new__",
    "object.__getattr__",
    "gc.",
    "marshal.",
    "builtins.id",
    "sys.excepthook",
)  # the last where CPython prints that a bytearray was refused its memory
READING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def own_peak_bytes():
    """Of this program alone: after an exec getrusage goes on from the peak of whoever started it."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (peak,) = (line for line in status.read_text("ascii").splitlines() if line.startswith("VmHWM:"))
    return int(peak.split()[1]) * 1024


def main(folder):
    scratch = folder / "weights.safetensors"
    seen = []
    np.ascontiguousarray(
        np.zeros((2, 2)).T
    )  # what is loaded when it is first used is loaded before anything is watched
    b"a".decode("cp437").encode("raw-unicode-escape")

    def watch(event, arguments):
        if not watching or event.startswith(PERMITTED[1:]):
            return
        if event == "open" and (not arguments[2] & READING_FLAGS or str(arguments[0]) == str(scratch)):
            return
        seen.append(f"{event} {arguments[0]!s:.80}" if event == "import" else event)

    watching = False
    sys.addaudithook(watch)
    before, outcomes = dict(os.environ), {}
    ResourceLimits(MEMORY_BYTES, 256_000_000, 600, 600).keep()
    for path in sorted(folder.glob("*.pt")):
        started = time.perf_counter()
        watching = True
        try:
            outcome = f"read: {convert(path, scratch)['where']}"
        except (WeightsRefused, WeightsCorrupt) as error:
            outcome = f"{type(error).__name__}: {error.message}"
        except MemoryError:
            outcome = "WeightsRefused: memory"
        except Exception as error:  # noqa: BLE001  a fault of the reader, which the test tells
            outcome = f"{type(error).__name__}: {traceback.format_exc()[-300:]}"
        watching = False
        outcomes[path.name] = outcome, time.perf_counter() - started
    peak_bytes = own_peak_bytes()
    same = before == dict(os.environ)
    told = {"outcomes": outcomes, "seen": seen, "peak_bytes": peak_bytes, "same_environment": same}
    sys.stdout.write(json.dumps(told))


main(Path(sys.argv[1]))
