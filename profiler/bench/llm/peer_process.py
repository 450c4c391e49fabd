"""One model in a process of its own, as servers that swap models have it: `python -m` this, DIRECTORY, WAY.

It says `ready` when its weights are there; then each line of its stdin is a list of jobs, [[prompt, tokens], ...], and
each line of its stdout the tokens of their answers, all in JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from agent.runtime.threads import use_threads
from profiler.bench.llm.text_jobs import TextJob

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SLOTS = 8
OURS, TRANSFORMERS = "our loader and engine", "transformers"


def main(directory: Path, way: str, threads: int) -> None:
    """Serve until stdin ends."""
    use_threads(threads)
    write = _writer(directory, way)
    _tell("ready")
    for line in sys.stdin:
        _tell(write([TextJob(tuple(prompt), output) for prompt, output in json.loads(line)]))


def _writer(directory: Path, way: str) -> Callable[[Sequence[TextJob]], list[list[int]]]:
    """Only what a way needs is imported: that takes a part of its start."""
    if way == TRANSFORMERS:
        from profiler.bench.llm.transformers_peer import TransformersPeer

        return TransformersPeer(directory, SLOTS).static
    from experts.llm.model import load_model
    from profiler.bench.llm.our_engine import OurEngine

    return OurEngine(load_model(directory, directory.name), SLOTS).continuous


def _tell(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
