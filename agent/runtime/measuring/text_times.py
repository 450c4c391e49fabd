"""How long a language model's iterations take: those that read a prompt, and those that write a token of several texts.

Guarantees: what is timed is the model over the very memory that a rig has loaded it into, on a thread of its own with
an executor's number of threads and its stream; an answer that is no number raises LoadFailed with the expert's id, it
is never timed. Prompts are made up: what a token costs does not depend on which one it is, but for experts inside the
model, which random tokens use evenly.
"""

from __future__ import annotations

import math
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.runtime.executor import own_stream
from agent.runtime.threads import use_threads
from experts.errors import LoadError
from experts.llm.key_values import ContiguousKeyValues
from experts.llm.token_batch import Chunk, TokenBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from experts.llm.model import Model

LEAST_TOKEN_S = 1e-7  # no token takes less: not even one of a model of a single layer
LONG_TOKENS, SHORT_TOKENS = 128, 16  # prompts, as far as the model's context goes
HELD_TOKENS = 64  # of each text that writes
AT_ONCE = 4  # texts that run together, as predictions count: one alone takes longer for a token, many take less
ROWS = (1, 2, 4, 8, 16)
PLATEAU = 1.02  # more texts have to make a token at least this much cheaper


@dataclass(frozen=True, slots=True)
class TextTimes:
    """Seconds of iterations. ``read_s``: by tokens of one prompt; ``write_s``: by texts that each write one token."""

    read_s: dict[int, float]
    write_s: dict[int, float]

    @property
    def per_prompt_token_s(self) -> float:
        """By two lengths: what an iteration costs beside them is no token's."""
        short, long = min(self.read_s), max(self.read_s)
        if short == long:
            return max(self.read_s[long] / long, LEAST_TOKEN_S)
        return max((self.read_s[long] - self.read_s[short]) / (long - short), LEAST_TOKEN_S)

    @property
    def per_output_token_s(self) -> float:
        """A token's part of an iteration of AT_ONCE texts, or of as many as were measured."""
        rows = max(rows for rows in self.write_s if rows <= AT_ONCE)
        return max(self.write_s[rows] / rows, LEAST_TOKEN_S)

    @property
    def fixed_s(self) -> float:
        """What an iteration costs whatever is in it: one that writes a single token, less what that is counted for."""
        return max(self.write_s[1] - self.per_output_token_s, LEAST_TOKEN_S)

    @property
    def max_batch(self) -> int:
        """So many texts at once that more of them make a token no cheaper worth mentioning; AT_ONCE at least."""
        cheapest_s = min(seconds / rows for rows, seconds in self.write_s.items())
        enough = (rows for rows, seconds in sorted(self.write_s.items()) if seconds / rows <= PLATEAU * cheapest_s)
        return max(next(enough), AT_ONCE)


def text_times(expert: str, model: Model, device: str, threads: int, repeats: int, limit_s: float) -> TextTimes:
    """All of a model: the fastest of so many runs of each size, after one to warm up, in about ``limit_s``.

    ``expert``: whose it is, for errors. Raises LoadFailed.
    """
    with ThreadPoolExecutor(1, "text-times", use_threads, (threads,)) as thread:
        return thread.submit(_in_stream, device, TextTimer(expert, model, limit_s), repeats).result()


class TextTimer:
    """Times one model's iterations on the calling thread."""

    def __init__(self, expert: str, model: Model, limit_s: float) -> None:
        self._expert = expert
        self._model = model
        self._limit_s = limit_s
        self._chance = random.Random(0)

    def times(self, repeats: int) -> TextTimes:
        """See ``text_times``; fewer texts at once where few of them take long."""
        lengths = {min(length, self._longest) for length in (SHORT_TOKENS, LONG_TOKENS)}
        read_s = {length: self._measured(self.read_s, length, repeats) for length in sorted(lengths)}
        write_s: dict[int, float] = {}
        for rows in ROWS:
            if rows > AT_ONCE and write_s[max(write_s)] * (1 + repeats) > self._limit_s / len(ROWS):
                break
            write_s[rows] = self._measured(self.write_s, rows, repeats)
        return TextTimes(read_s, write_s)

    def read_s(self, tokens: int) -> float:
        """The seconds of an iteration that reads one prompt of so many tokens."""
        return self._run([Chunk(0, 0, self._tokens(tokens))], self._key_values())

    def write_s(self, rows: int) -> float:
        """The seconds of an iteration that writes a token of each of so many texts, each HELD_TOKENS long or less."""
        key_values = self._key_values()
        held = min(HELD_TOKENS, self._longest - 1)
        self._run([Chunk(row, 0, self._tokens(held)) for row in range(rows)], key_values)
        return self._run([Chunk(row, held, self._tokens(1)) for row in range(rows)], key_values)

    @property
    def _longest(self) -> int:
        return self._model.spec.max_positions

    def _measured(self, run: Callable[[int], float], size: int, repeats: int) -> float:
        """The first run warms up; one that alone takes its part of the time is not repeated."""
        first_s = run(size)
        if first_s > self._limit_s / (len(ROWS) + 2):
            return first_s
        return min(run(size) for _ in range(repeats))

    def _run(self, chunks: Sequence[Chunk], key_values: ContiguousKeyValues) -> float:
        batch = TokenBatch.of(chunks, self._model.device)
        started = time.monotonic()
        total = self._model.forward(batch, key_values).float().sum().item()  # waits for the device
        seconds = time.monotonic() - started
        if not math.isfinite(total):
            raise LoadError(self._expert, "what it answers is not a number: check its weights, then pack them again")
        return max(seconds, LEAST_TOKEN_S)

    def _tokens(self, count: int) -> list[int]:
        return [self._chance.randrange(self._model.spec.vocab_size) for _ in range(count)]

    def _key_values(self) -> ContiguousKeyValues:
        return ContiguousKeyValues(self._model.spec, self._model.dtype, self._model.device)


def _in_stream(device: str, timer: TextTimer, repeats: int) -> TextTimes:
    with own_stream(device):
        return timer.times(repeats)
