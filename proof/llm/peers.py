"""One model in a separate process, as in servers that swap models: our loader and engine, or transformers.

``python -m`` this, DIRECTORY, WAY, THREADS prints ``ready`` once the weights are loaded. Each line of its stdin is a
list of jobs, [[prompt, tokens], ...], and each line of its stdout the tokens of their answers, all in JSON. Peers run
in processes because the OpenMP teams of two systems in one process keep each other from waiting actively, which halves
both. transformers is no dependency: call ``has_transformers`` first.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.runtime.machine.threads import end_team, use_threads
from experts.errors import CoServeError
from proof.llm.random_models import TextJob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

SLOTS = 8
OURS, STATIC, CONTINUOUS = "our loader and engine", "transformers", "transformers' generate_batch"
PAD = 0
ANSWER_LIMIT_S = 600.0


def has_transformers() -> bool:
    return find_spec("transformers") is not None


class AnsweringProcess:
    """A module in a process: once ready it sends a greeting, then answers to lines of JSON.

    CoServeError where it ends by itself.
    """

    def __init__(self, module: str, *arguments: object, without: Iterable[str] = ()) -> None:
        """``without``: variables of the environment that it does not get."""
        python = [sys.executable, "-m", module, *map(str, arguments)]
        command = ["env", *(f"--unset={name}" for name in without), *python] if without else python
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self.greeting = json.loads(self._answer())
        except BaseException:
            self.close()
            raise

    def ask(self, question: object) -> Any:  # noqa: ANN401 - JSON
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return json.loads(self._answer())

    def close(self) -> None:
        with self._process:
            self._process.kill()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise CoServeError(f"the process of a model ended with exit code {code}: its output above has the reason")
        return line


class PeerProcess(AnsweringProcess):
    """A process that has a model's weights."""

    def __init__(self, directory: Path, way: str, threads: int) -> None:
        super().__init__("proof.llm.peers", directory, way, threads)

    def write(self, jobs: Sequence[TextJob]) -> list[list[int]]:
        tokens: list[list[int]] = self.ask([[job.prompt, job.output] for job in jobs])
        return tokens


class TransformersPeer:
    """One model of a directory, in fp32 on the CPU, with SLOTS requests at a time.

    Continuous batching is the manager that ``generate_batch`` makes, kept between runs, because only there each
    request has a length of its own.
    """

    def __init__(self, directory: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations of its own imports
            self._library: Any = import_module("transformers")
        self._library.utils.logging.set_verbosity_error()
        self._library.utils.logging.disable_progress_bar()
        self._model = self._library.AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval()
        self._model.generation_config.eos_token_id = None
        self._manager: Any = None

    def static(self, jobs: Sequence[TextJob]) -> list[list[int]]:
        """Each job's tokens: batches padded on the left, which end when their longest job does."""
        batches = (jobs[start : start + SLOTS] for start in range(0, len(jobs), SLOTS))
        return [tokens for batch in batches for tokens in self._batch(batch)]

    def continuous(self, jobs: Sequence[TextJob]) -> list[list[int]]:
        if self._manager is None:
            settings = self._library.GenerationConfig(do_sample=False, pad_token_id=PAD, eos_token_id=-1)
            batching = self._library.ContinuousBatchingConfig(
                max_requests_per_batch=SLOTS, num_blocks=4 * SLOTS, max_batch_tokens=512
            )
            self._manager = self._model.init_continuous_batching(
                generation_config=settings, continuous_batching_config=batching
            )
            self._manager.start()
        names = [self._manager.add_request(list(job.prompt), max_new_tokens=job.output) for job in jobs]
        answered: dict[str, list[int]] = {}
        while len(answered) < len(names):
            result = self._manager.get_result(timeout=ANSWER_LIMIT_S)
            if result is None or getattr(result, "error", None):
                raise ValueError(f"transformers' continuous batching failed: {getattr(result, 'error', 'no answer')}")
            if result.is_finished():
                answered[result.request_id] = list(result.generated_tokens)
        return [answered[name] for name in names]

    def _batch(self, jobs: Sequence[TextJob]) -> list[list[int]]:
        import torch

        longest = max(len(job.prompt) for job in jobs)
        padding = [longest - len(job.prompt) for job in jobs]
        ids = torch.tensor([[PAD] * pad + list(job.prompt) for pad, job in zip(padding, jobs, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])
        most = max(job.output for job in jobs)
        with torch.inference_mode():
            made = self._model.generate(
                ids, attention_mask=mask, max_new_tokens=most, do_sample=False, pad_token_id=PAD
            )
        return [row[longest : longest + job.output].tolist() for row, job in zip(made, jobs, strict=True)]


def main(directory: Path, way: str, threads: int) -> None:
    use_threads(threads)
    write = _writer(directory, way)
    end_team()  # of reading the weights: generate_batch runs on a thread of its own
    send("ready")
    for line in sys.stdin:
        send(write([TextJob(tuple(prompt), output) for prompt, output in json.loads(line)]))


def _writer(directory: Path, way: str) -> Callable[[Sequence[TextJob]], list[list[int]]]:
    if way != OURS:
        peer = TransformersPeer(directory)
        return peer.continuous if way == CONTINUOUS else peer.static
    from experts.llm.model import load_model  # imported here: its import is a part of a process's start
    from proof.llm.our_engine import OurEngine

    return OurEngine(load_model(directory, directory.name), SLOTS).continuous


def send(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
