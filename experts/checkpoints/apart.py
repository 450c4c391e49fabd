"""Run by file name in a process of its own: SOURCE.pt DESTINATION.safetensors SECONDS; see experts.checkpoints.reading.

It writes the weights to DESTINATION and what the file tells, as JSON, to stdout. Exit code 0: done; 3: refused; 4: it
cannot be read; 5: the disk refuses. The last line of stderr says why. Its memory and its time are bounded before the
file is looked at.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it is run isolated: nothing else is added

from experts.checkpoints.archive import opened
from experts.checkpoints.selection import select
from experts.checkpoints.telling import tell
from experts.checkpoints.writing import WRITTEN_ALWAYS_BYTES, WRITTEN_MAXIMUM, write_weights
from experts.errors import WeightsCorrupt, WeightsRefused

DONE, REFUSED, CORRUPT, FAILED = 0, 3, 4, 5
MEMORY_BYTES = 2_000_000_000  # over the file's size, which it is mapped with


def main(source: Path, destination: Path, limit_s: int) -> int:
    gc.disable()  # what is read stays until the end, and looking through it again and again takes as long as reading
    try:
        _bound(source.stat().st_size, limit_s)
        print(json.dumps(convert(source, destination)))  # noqa: T201  the answer to the process that asked
    except WeightsRefused as error:
        return _answer(REFUSED, error.message)
    except WeightsCorrupt as error:
        return _answer(CORRUPT, error.message)
    except MemoryError:
        return _answer(REFUSED, f"takes over {MEMORY_BYTES / 1e9:.0f} GB of memory to read: no weights do")
    except OSError as error:
        return _answer(FAILED, str(error))
    return DONE


def convert(source: Path, destination: Path) -> dict[str, object]:
    """Write the weights, and return what is told of them. Raises WeightsRefused, WeightsCorrupt, OSError."""
    with opened(source) as checkpoint:
        selection = select(checkpoint.source, checkpoint.document)
        with destination.open("wb") as file:
            write_weights(file, selection.weights, checkpoint)
        facts = tell(checkpoint.document, selection)
        return {"where": selection.where, "said": selection.said, "facts": asdict(facts)}


def _bound(file_bytes: int, limit_s: int) -> None:
    """Nothing the file says may take more than this, whatever the checks before have missed."""
    pages = Path("/proc/self/statm")
    if pages.is_file():  # elsewhere there is no such limit, or it is not kept
        taken_bytes = int(pages.read_text().split()[0]) * resource.getpagesize()
        limit_bytes = taken_bytes + file_bytes + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    written_bytes = WRITTEN_MAXIMUM * file_bytes + 2 * WRITTEN_ALWAYS_BYTES
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
    resource.setrlimit(resource.RLIMIT_FSIZE, (written_bytes, written_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _answer(code: int, reason: str) -> int:
    text = " ".join(reason.split())
    sys.stderr.write(f"\n{text[:400]}\n")
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
