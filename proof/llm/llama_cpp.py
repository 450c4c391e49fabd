"""llama.cpp's server in a separate process, by the wheel ``xllamacpp``, which is no dependency.

``python -m`` this, GGUF, THREADS, SLOTS, CONTEXT, FOLDER sends its version once the weights are loaded; FOLDER: where
the wheel is installed, or empty. A line of its stdin has texts, and a late one or null; a line of its stdout the times
of all. Only threads, slots and context differ from the server's own settings, and no prompt is remembered.
"""

from __future__ import annotations

import json
import sys
from dataclasses import astuple
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from agent.environment import SPINNING_VARIABLES
from experts.errors import CoServeError
from proof.llm.peers import AnsweringProcess, send
from proof.llm.random_models import TextJob
from proof.llm.text_times import TimedTexts, TokenTimes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

LLAMA = "llama.cpp"
ABSENT = "not run: xllamacpp is not installed"
HOW = "`pip install --no-deps --target FOLDER xllamacpp`, then --llama-cpp FOLDER"
ASKED = {"ignore_eos": True, "temperature": 0, "cache_prompt": False, "stream": True}


def has_llama(folder: Path | None) -> bool:
    return find_spec("xllamacpp") is not None if folder is None else (folder / "xllamacpp").is_dir()


class LlamaProcess(AnsweringProcess):
    """A server of ``slots`` with ``context`` tokens each. Its threads wait as its own library has it."""

    def __init__(self, folder: Path | None, weights: Path, threads: int, slots: int, context: int) -> None:
        given = (weights, threads, slots, context, folder or "")
        super().__init__("proof.llm.llama_cpp", *given, without=sorted(SPINNING_VARIABLES))

    def timed(self, jobs: Sequence[TextJob], late: TextJob | None = None) -> list[TokenTimes]:
        asked = [astuple(job) for job in jobs], late and astuple(late)
        times = [TokenTimes(*each) for each in self.ask(asked)]
        if not all(each.tokens_s for each in times):
            raise CoServeError(f"{LLAMA} wrote no token of a text: its output above has the reason")
        return times


def _server(library: Any, weights: str, threads: int, slots: int, context: int) -> Any:  # noqa: ANN401 - untyped
    params = library.CommonParams()
    params.model.path = weights
    params.n_parallel, params.n_ctx = slots, slots * context
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_ram_mib, params.fit_params, params.verbosity = 0, False, 0
    return library.Server(params)


def _timed(server: Any, jobs: Sequence[TextJob], late: TextJob | None) -> list[TokenTimes]:  # noqa: ANN401 - untyped
    threads: list[Thread] = []
    all_began = Event()

    def begin(number: int, job: TextJob) -> None:
        asked = {"prompt": list(job.prompt), "max_tokens": job.output, **ASKED}
        threads.append(Thread(target=server.handle_completions, args=(asked, partial(wrote, number))))
        threads[-1].start()

    def wrote(number: int, chunk: Any) -> bool:  # noqa: ANN401 - JSON
        all_began.wait()
        return chunk["choices"][0]["finish_reason"] is None and course.wrote(number)

    course = TimedTexts(jobs, late, begin)
    all_began.set()
    for thread in threads:  # another one adds a late one, before it ends itself
        thread.join()
    return course.times


def main(weights: str, threads: int, slots: int, context: int, folder: str) -> None:
    if folder:
        sys.path.insert(0, folder)
    library: Any = import_module("xllamacpp")
    server = _server(library, weights, threads, slots, context)
    send(f"xllamacpp {library.__version__}, {library.get_system_info()}")
    for line in sys.stdin:
        jobs, late = json.loads(line)
        send([astuple(each) for each in _timed(server, [TextJob(*job) for job in jobs], late and TextJob(*late))])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
