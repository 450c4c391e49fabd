"""transformers as the peer: static batching with ``generate``, and its continuous batching (``generate_batch``).

It is no dependency: ``is_there`` is asked first, and the library imported only then. Both ways have as many requests
at a time as ours. What stands for continuous batching is the manager that ``generate_batch`` makes, kept
between runs, because only there each request has a length of its own.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from proof.llm.text_jobs import TextJob

PAD = 0
ANSWER_LIMIT_S = 600.0


def is_there() -> bool:
    return find_spec("transformers") is not None


class TransformersPeer:
    """One model of a directory, in fp32 on the CPU."""

    def __init__(self, directory: Path, slots: int) -> None:
        self._library = _library()
        self._slots = slots
        self._model = self._library.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self._model.generation_config.eos_token_id = None
        self._manager: Any = None

    def static(self, jobs: Sequence[TextJob]) -> list[list[int]]:
        """Each job's tokens: batches padded on the left, which end when their longest job does."""
        tokens: list[list[int]] = []
        for start in range(0, len(jobs), self._slots):
            tokens += self._batch(jobs[start : start + self._slots])
        return tokens

    def continuous(self, jobs: Sequence[TextJob]) -> list[list[int]]:
        if self._manager is None:
            self._manager = self._started()
        names = [self._manager.add_request(list(job.prompt), max_new_tokens=job.output) for job in jobs]
        answered: dict[str, list[int]] = {}
        while len(answered) < len(names):
            result = self._manager.get_result(timeout=ANSWER_LIMIT_S)
            if result is None or getattr(result, "error", None):
                raise ValueError(f"transformers' continuous batching failed: {getattr(result, 'error', 'no answer')}")
            if result.is_finished():
                answered[result.request_id] = list(result.generated_tokens)
        return [answered[name] for name in names]

    def close(self) -> None:
        if self._manager is not None:
            self._manager.stop(block=True)
            self._manager = None

    def _batch(self, jobs: Sequence[TextJob]) -> list[list[int]]:
        longest = max(len(job.prompt) for job in jobs)
        ids = torch.tensor([[PAD] * (longest - len(job.prompt)) + list(job.prompt) for job in jobs])
        there = torch.tensor([[0] * (longest - len(job.prompt)) + [1] * len(job.prompt) for job in jobs])
        with torch.inference_mode():
            made = self._model.generate(
                ids,
                attention_mask=there,
                max_new_tokens=max(job.output for job in jobs),
                do_sample=False,
                pad_token_id=PAD,
            )
        return [row[longest : longest + job.output].tolist() for row, job in zip(made, jobs, strict=True)]

    def _started(self) -> Any:  # noqa: ANN401  an untyped library
        settings = self._library.GenerationConfig(do_sample=False, pad_token_id=PAD, eos_token_id=-1)
        batching = self._library.ContinuousBatchingConfig(
            max_requests_per_batch=self._slots, num_blocks=4 * self._slots, max_batch_tokens=512
        )
        manager = self._model.init_continuous_batching(generation_config=settings, continuous_batching_config=batching)
        manager.start()
        return manager


def _library() -> Any:  # noqa: ANN401  an untyped library
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it says of its own imports is not ours
        library: Any = import_module("transformers")
    library.utils.logging.set_verbosity_error()
    library.utils.logging.disable_progress_bar()
    return library
