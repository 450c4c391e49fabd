"""Times of a language model's iterations: reading a prompt, and writing a token of several texts.

Guarantees: the model runs in a rig's memory, with keys and values in the agent's layout, on a thread like an
executor's. NaN or infinity raises LoadError with the expert's id. Prompts are random.
"""

from __future__ import annotations

import math
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median_low
from typing import TYPE_CHECKING, TypeVar

import torch

from agent.runtime.executor import own_stream
from agent.runtime.machine.box import exclusive
from agent.runtime.machine.threads import Team, end_team, lone_team, use_threads
from experts.errors import LoadError
from experts.expert import Rejected
from experts.llm.arenas.blocks import BLOCK_POSITIONS
from experts.llm.arenas.extents import arena_for
from experts.llm.arenas.key_values import KvArena, KvLayout
from experts.llm.serving.engine import LlmEngine
from experts.llm.serving.family import ModelFamily
from experts.llm.serving.generation import Sampling, TextRequest
from experts.llm.serving.texts import RunningText
from experts.llm.token_batch import Chunk, TokenBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from experts.llm.model import LanguageModel

Found = TypeVar("Found")
LEAST_TOKEN_S = 1e-7
LONG_TOKENS, SHORT_TOKENS = 128, 16  # tokens of prompts, limited by the model's context
FULL_TOKENS = 512  # tokens of prompts, at most an iteration's
OVERHEAD_TOKENS, LEAST_OVERHEAD_TOKENS = 12, 2
ROUNDED_TOKENS = 4096  # overhead of a request's extents: a page per head
HELD_TOKENS = 64  # tokens of each text that writes
AT_ONCE = 4  # concurrent texts assumed by predictions
FEW_ROWS = (1, 2, 4, 8, 16)
PLATEAU = 1.02  # more texts must save at least this part of a token's time


@dataclass(frozen=True, slots=True)
class TextTimes:
    """Seconds of iterations, one per repeat; the low median counts. ``read_s``: by tokens of a prompt; ``write_s``: by
    texts that write. ``overhead_s``: the engine's time, without the model. ``most_rows``: texts at once, given enough
    time.
    """

    read_s: Mapping[int, tuple[float, ...]]
    write_s: Mapping[int, tuple[float, ...]]
    overhead_s: float = 0.0
    most_rows: int = 0

    @property
    def per_prompt_token_s(self) -> float:
        short, long = min(self.read_s), max(self.read_s)
        if short == long:
            return max(median_low(self.read_s[long]) / long, LEAST_TOKEN_S)
        longer_s = median_low(self.read_s[long]) - median_low(self.read_s[short])
        return max(longer_s / (long - short), LEAST_TOKEN_S)

    @property
    def per_output_token_s(self) -> float:
        """Seconds per token, in an iteration of AT_ONCE texts or fewer."""
        rows = max(rows for rows in self.write_s if rows <= AT_ONCE)
        return max(self._writing_s(rows) / rows, LEAST_TOKEN_S)

    @property
    def fixed_s(self) -> float:
        """Seconds of an iteration of a single token, less that token."""
        return max(self._writing_s(1) - self.per_output_token_s, LEAST_TOKEN_S)

    @property
    def max_batch(self) -> int:
        """Texts at once beyond which a token gets hardly cheaper; at least AT_ONCE, ``most_rows`` if time ran out."""
        token_s = {rows: self._writing_s(rows) / rows for rows in sorted(self.write_s)}
        enough = next(rows for rows in token_s if token_s[rows] <= PLATEAU * min(token_s.values()))
        return max(enough if enough < max(token_s) else max(self.most_rows, enough), AT_ONCE)

    def _writing_s(self, rows: int) -> float:
        return median_low(self.write_s[rows]) + self.overhead_s


def on_executor_thread(work: Callable[[], Found], device: str, threads: int) -> Found:
    """Run ``work`` on a thread like an executor's."""
    team = lone_team(threads) if device == "cpu" else Team(threads)

    def streamed() -> Found:
        team.keep()
        with own_stream(device), exclusive(device):
            return work()

    end_team()  # as at the start of an agent
    with ThreadPoolExecutor(1, "text-times", use_threads, (threads,)) as thread:
        return thread.submit(streamed).result()


class TextTimer:
    """Times one model's iterations on the calling thread, in about ``limit_s``. ``expert``: for errors."""

    def __init__(self, expert: str, model: LanguageModel, limit_s: float, rows: Sequence[int] = FEW_ROWS) -> None:
        self._expert = expert
        self._model = model
        self._limit_s = limit_s
        self._rows = rows
        self._spent_s = 0.0
        self._chance = random.Random(0)

    def times(self, repeats: int) -> TextTimes:
        """Time ``repeats`` of each size after one to warm up, or only that one if slow. Raises LoadError.

        Always tries AT_ONCE texts, and two lengths of prompts; more texts and a long prompt while there is time.
        """
        short = min(SHORT_TOKENS, self._longest)
        read_s = {short: self._repeated(self.read_s, short, repeats)}
        timely = int(short * self._limit_s / min(read_s[short]))
        long = min(max(timely, 2 * short), LONG_TOKENS, self._longest)
        if long > short:
            read_s[long] = self._repeated(self.read_s, long, repeats)
        write_s: dict[int, tuple[float, ...]] = {}
        for rows in self._rows:
            if rows > AT_ONCE and self._spent_s + 2 * min(write_s[max(write_s)]) * (1 + repeats) > self._limit_s:
                break
            write_s[rows] = self._repeated(self.write_s, rows, repeats)
        overhead_tokens = int((self._limit_s - self._spent_s) / min(write_s[1]))
        return TextTimes(read_s, write_s, self.overhead_s(overhead_tokens), max(self._rows))

    def read_s(self, tokens: int) -> float:
        with self._holding({0: tokens}) as arena:
            return self._run([Chunk(0, 0, self._tokens(tokens))], arena)

    def write_s(self, rows: int) -> float:
        """Seconds of an iteration that writes a token of each of ``rows`` texts."""
        with self.writing(rows) as write:
            return write()

    @contextmanager
    def writing(self, rows: int) -> Iterator[Callable[[], float]]:
        """Run of ``write_s``, the same each time."""
        with self._holding(dict.fromkeys(range(rows), self._held + 1)) as arena:
            chunks = self._writing(rows, arena)
            yield lambda: self._run(chunks, arena)

    def overhead_s(self, tokens: int = OVERHEAD_TOKENS) -> float:
        """Seconds of the engine in an iteration, without the model, in about so many. Raises LoadError."""
        new = min(max(tokens, LEAST_OVERHEAD_TOKENS), OVERHEAD_TOKENS, self._longest - 1)
        with self._holding({}) as arena:
            engine = LlmEngine(arena)
            text = RunningText(0, self._expert, TextRequest(tuple(self._tokens(1)), new, Sampling(temperature=0.0)))
            while text.result is None:
                engine.run([text], [self._model], self._limit_s)
        if isinstance(text.result, Rejected):
            raise LoadError(self._expert, text.result.reason.removeprefix(f"expert {self._expert} "))
        return engine.statistics().overhead_s

    def full_iteration(self, rows: int) -> int:
        """Run the largest iteration with ``rows`` writing texts. Returns the bytes of its keys and values: a device
        allocates those of an arena at once."""
        prompt = min(FULL_TOKENS, self._longest)
        with self._holding({rows: prompt, **dict.fromkeys(range(rows), self._held + 1)}) as arena:
            writing = self._writing(rows, arena)
            self._run([Chunk(rows, 0, self._tokens(prompt)), *writing], arena)
            return arena.promised_bytes if self._model.device.type == "cpu" else arena.budget_bytes

    @property
    def _longest(self) -> int:
        return self._model.spec.max_positions

    @property
    def _held(self) -> int:
        return min(HELD_TOKENS, self._longest - 1)

    def _repeated(self, run: Callable[[int], float], size: int, repeats: int) -> tuple[float, ...]:
        first_s = run(size)
        if first_s > self._limit_s / (len(self._rows) + 2):
            return (first_s,)
        return tuple(run(size) for _ in range(repeats))

    def _writing(self, rows: int, arena: KvArena) -> list[Chunk]:
        """Texts that have read HELD_TOKENS; their keys and values are zeros, as to compute them takes longest."""
        device, layout = self._model.device, self._layout
        held = TokenBatch.of([Chunk(row, 0, self._tokens(self._held)) for row in range(rows)], device)
        reserved = arena.reserve(layout, held)
        zeros = torch.zeros((held.count, layout.kv_heads, layout.head_size), dtype=layout.dtype, device=device)
        for layer in range(layout.layers):
            reserved.append(layer, zeros, zeros)
        return [Chunk(row, self._held, self._tokens(1)) for row in range(rows)]

    def _run(self, chunks: Sequence[Chunk], arena: KvArena) -> float:
        batch = TokenBatch.of(chunks, self._model.device)
        key_values = arena.key_values(self._layout)
        started = time.monotonic()
        hidden = ModelFamily([self._model]).hidden(batch, key_values, [0] * len(chunks))
        total = self._model.logits(hidden[batch.last]).float().sum().item()  # waits for the device
        seconds = max(time.monotonic() - started, LEAST_TOKEN_S)
        self._spent_s += seconds
        if not math.isfinite(total):
            raise LoadError(self._expert, "what it answers is not a number: check its weights, then pack them again")
        return seconds

    def _tokens(self, count: int) -> list[int]:
        return [self._chance.randrange(self._model.spec.vocab_size) for _ in range(count)]

    @property
    def _layout(self) -> KvLayout:
        return KvLayout.of(self._model.spec, self._model.dtype)

    @contextmanager
    def _holding(self, tokens: Mapping[int, int]) -> Iterator[KvArena]:
        """Arena with room for these tokens of each request, and for one more text. Raises LoadError without memory."""
        rounded = ROUNDED_TOKENS if self._model.device.type == "cpu" else BLOCK_POSITIONS
        most = sum(tokens.values()) + min(FULL_TOKENS, self._longest) + (len(tokens) + 1) * rounded
        try:
            arena = arena_for(self._model.device, most * self._layout.token_bytes, keeps_prefixes=False)
            for request, count in tokens.items():
                arena.begin(request, self._layout, count)
            yield arena
        except torch.OutOfMemoryError as error:
            raise LoadError(self._expert, f"a text and its keys and values find no memory: {error}") from error
        for request in tokens:
            arena.release(request, is_sound=False)
