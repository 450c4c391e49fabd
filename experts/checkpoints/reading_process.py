"""Runs in its own process, started by file name from experts.checkpoints.reading:

    weights SECONDS SOURCE.pt DESTINATION.safetensors
    states SECONDS FOLDER SOURCE.pt ...

``weights`` writes the weights to DESTINATION, and the file's facts as JSON to stdout. ``states`` writes each training
state (see training_states) to FOLDER/<name>.safetensors, with its arguments in the metadata.

Exit codes: 0 done, 3 refused, 4 unreadable, 5 refused by the disk. The last line of stderr gives the reason. Memory and
time are limited before the process opens a file.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # python -I adds no path

from experts.checkpoints.archive import WRITTEN_ALWAYS_BYTES, WRITTEN_MAXIMUM, opened, write_weights
from experts.checkpoints.selection import select
from experts.checkpoints.trainer_facts import collected_facts
from experts.checkpoints.training_states import training_state
from experts.errors import WeightsCorrupt, WeightsRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DONE, REFUSED, CORRUPT, FAILED = 0, 3, 4, 5
MEMORY_BYTES = 2_000_000_000  # beyond the size of the mapped file


def main(kind: str, limit_s: int, paths: Sequence[Path]) -> int:
    gc.disable()  # objects live until the process ends; collecting takes as long as reading
    if kind == "weights":
        source, destination = paths
        return _read([source], limit_s, lambda _: sys.stdout.buffer.write(_text(convert(source, destination))))
    folder, *sources = paths
    return _read(sources, limit_s, lambda source: convert_state(source, folder), is_named=True)


def _read(sources: Sequence[Path], limit_s: int, read: Callable[[Path], object], *, is_named: bool = False) -> int:
    """Read files in order until the first error. ``is_named``: the error names its file."""
    about = ""
    try:
        _bound(max(source.stat().st_size for source in sources), limit_s)
        for source in sources:
            about = f"{source.name}: " if is_named else ""
            read(source)
            if len(sources) > 1:
                gc.collect()
    except WeightsRefused as error:
        return _answer(REFUSED, about + error.message)
    except WeightsCorrupt as error:
        return _answer(CORRUPT, about + error.message)
    except MemoryError:
        return _answer(REFUSED, f"{about}takes over {MEMORY_BYTES / 1e9:.0f} GB of memory to read: no weights do")
    except UnicodeEncodeError:
        return _answer(CORRUPT, f"{about}has a name or a label that is no Unicode text")
    except OSError as error:
        return _answer(FAILED, f"{about}{error}")
    return DONE


def _text(value: object) -> bytes:
    """JSON in UTF-8. Raises UnicodeEncodeError for a lone surrogate, which a pickle may contain."""
    return json.dumps(value, ensure_ascii=False).encode()


def convert(source: Path, destination: Path) -> dict[str, object]:
    """Write the weights, and return their facts. Raises WeightsRefused, WeightsCorrupt, OSError."""
    with opened(source) as checkpoint:
        selection = select(checkpoint.source, checkpoint.document)
        facts = collected_facts(checkpoint.document, selection)
        labels = {} if facts.labels is None else {"labels": json.dumps(facts.labels)}
        with destination.open("wb") as file:
            write_weights(file, selection.weights, checkpoint, labels)
        return {"where": selection.where, "said": selection.said, "facts": asdict(facts)}


def convert_state(source: Path, folder: Path) -> None:
    """Write one file's training state. Raises WeightsRefused, WeightsCorrupt, OSError."""
    with opened(source) as checkpoint:
        state = training_state(checkpoint.source, checkpoint.document)
        with (folder / f"{source.name}.safetensors").open("wb") as file:
            write_weights(file, state.weights, checkpoint, {"args": _text(state.arguments).decode()})


def _bound(file_bytes: int, limit_s: int) -> None:
    """Limit memory, time and output of this process: the last line of defence behind the checks."""
    pages = Path("/proc/self/statm")
    if pages.is_file():  # other systems lack the limit or ignore it
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
    sys.exit(main(sys.argv[1], int(sys.argv[2]), [Path(each) for each in sys.argv[3:]]))
