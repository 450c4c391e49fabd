"""One model in a process of its own, as servers that swap models have it; and how to talk with such a process.

`python -m` this, DIRECTORY, WAY, THREADS: it says `ready` when its weights are there; then each line of its stdin is a
list of jobs, [[prompt, tokens], ...], and each line of its stdout the tokens of their answers, all in JSON. Peers are
measured so wherever they take turns with us: the OpenMP teams of two systems in one process keep each other from
waiting actively (see ``agent.runtime.threads``), which halves both.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from agent.runtime.threads import end_team, use_threads
from experts.errors import CoServeError
from proof.llm.text_jobs import TextJob

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SLOTS = 8
OURS, STATIC, CONTINUOUS = "our loader and engine", "transformers", "transformers' generate_batch"


class PeerProcess:
    """A process that has a model's weights. Its methods raise CoServeError where it ends by itself."""

    def __init__(self, directory: Path, way: str, threads: int) -> None:
        command = [sys.executable, "-m", "proof.llm.peer_process", str(directory), way, str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def write(self, jobs: Sequence[TextJob]) -> list[list[int]]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([[job.prompt, job.output] for job in jobs]) + "\n")
        self._process.stdin.flush()
        tokens: list[list[int]] = json.loads(self._answer())
        return tokens

    def close(self) -> None:
        with self._process:
            self._process.kill()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise CoServeError(
                f"the process of a model ended by itself with {self._process.wait()}: see its words above"
            )
        return line


def main(directory: Path, way: str, threads: int) -> None:
    use_threads(threads)
    write = _writer(directory, way)
    end_team()  # of reading the weights: generate_batch runs on a thread of its own
    _tell("ready")
    for line in sys.stdin:
        _tell(write([TextJob(tuple(prompt), output) for prompt, output in json.loads(line)]))


def _writer(directory: Path, way: str) -> Callable[[Sequence[TextJob]], list[list[int]]]:
    """Only what a way needs is imported: that takes a part of its start."""
    if way != OURS:
        from proof.llm.transformers_peer import TransformersPeer

        peer = TransformersPeer(directory, SLOTS)
        return peer.continuous if way == CONTINUOUS else peer.static
    from experts.llm.model import load_model
    from proof.llm.our_engine import OurEngine

    return OurEngine(load_model(directory, directory.name), SLOTS).continuous


def _tell(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
