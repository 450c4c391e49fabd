"""``coserve bench texts``: what the text runtime has to reach, beside llama.cpp, transformers or itself, by turns.

llama.cpp and ours read the same GGUF file of random weights, have as many threads and slots, and are called without
HTTP. A figure short of its target is followed by where its time goes. A row whose peer is not installed says so.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from contextlib import ExitStack
from cProfile import Profile
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise, product
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING

import torch

from agent.runtime.machine.threads import lone_team, use_threads
from experts.backends import backend_for
from experts.errors import ConfigError
from experts.expert import Expert, Precision
from experts.llm.files.config import read_spec
from experts.llm.gguf.program import gguf_program
from experts.llm.kernels.products import kernel
from experts.llm.model import LanguageModel
from experts.llm.text.tokenizer import TextModel
from experts.sizes import MEBIBYTE
from profiler.bench.measured import Plan, Target, at_least, by_turns
from profiler.workload.generated_line import removed_afterwards, require_disk
from proof.llm.beside_images import measure_beside_images
from proof.llm.figures import LlmFindings, median_of
from proof.llm.llama_cpp import ABSENT, HOW, LLAMA, LlamaProcess, has_llama
from proof.llm.offload import measure_offload
from proof.llm.our_engine import OurEngine
from proof.llm.peers import has_transformers
from proof.llm.random_models import DENSE, OLMOE, QwenShape, TextJob, mixed_lengths, write_random_gguf
from proof.llm.report import THREADS, measured_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from types import CodeType

    from torch import Tensor

    from profiler.bench.measured import Measured
    from proof.llm.figures import Figure
    from proof.llm.report import Progress
    from proof.llm.text_times import TokenTimes

    Run = Callable[[], list[TokenTimes]]
    Rate = Callable[[Sequence[TokenTimes]], float]

NAME, OURS = "llm/texts", "coserve"
FORMATS = {Precision.INT4: "Q4_0", Precision.INT8: "Q8_0"}
DECODE_LEAST = {Precision.INT4: 0.9, Precision.INT8: 1.0}
SLOTS = (8, 16)
CONTEXT = 2048  # of each slot of llama.cpp
STALL_MOST_MS = 20
FAMILIES_TEST = "tests/experts/llm/gguf/test_gguf_models.py"
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "README.md"
SHOWN = 5  # functions that take the most time


@dataclass(frozen=True, slots=True)
class Extent:
    """``decoded``: tokens of a text alone; ``each``: texts for a slot; ``several``: forms of several texts."""

    dense: QwenShape
    moe: QwenShape
    needed_bytes: int  # of disk
    rounds: int
    decoded: int
    each: float
    prompt: int
    several: tuple[Precision, ...] = tuple(FORMATS)
    long_prompt: int = 1024
    stall_bytes: int = 2 * MEBIBYTE
    boards: int = 100


FULL = Extent(DENSE, OLMOE, 21_000_000_000, 3, 64, 1.5, 512)
SHORT = Extent(
    replace(DENSE, name=f"{DENSE.name}, 8 of {DENSE.layers} layers", layers=8),
    replace(OLMOE, name=f"{OLMOE.name}, 2 of {OLMOE.layers} layers", layers=2),
    4_000_000_000, 3, 32, 1, 256, (Precision.INT4,),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TextBench:
    """Measures a row with each method of ROWS. ``llama``: folder of its wheel; ``weights``: a trained model's file."""

    folder: Path
    extent: Extent
    llama: Path | None = None
    weights: Path | None = None
    threads: int = THREADS

    def decode(self) -> Iterator[LlmFindings]:
        jobs = [TextJob((1,), self.extent.decoded + 1)]
        for precision, least in DECODE_LEAST.items():
            yield self._against("a text alone", precision, _decoded, least, jobs)
        if self.weights is not None:
            least = DECODE_LEAST[Precision.INT4]
            yield self._against("a text alone", Precision.INT4, _decoded, least, jobs, weights=self.weights)

    def slots(self) -> Iterator[LlmFindings]:
        for slots, precision in product(SLOTS, self.extent.several):
            jobs = mixed_lengths(int(slots * self.extent.each), self.extent.dense.vocabulary)
            yield self._against(f"{slots} texts at a time", precision, _written, 1.2, jobs, slots=slots)

    def first_token(self) -> Iterator[LlmFindings]:
        jobs = [replace(job, output=CONTEXT // 2) for job in mixed_lengths(SLOTS[0], self.extent.dense.vocabulary)]
        late = TextJob(tuple(range(1, 1 + self.extent.long_prompt)), 1)
        what, rate = f"a prompt until its first token, beside {len(jobs)} texts", partial(_read, late)
        for precision in self.extent.several:
            yield self._against(what, precision, rate, 1.0, jobs, late=late, slots=len(jobs) + 1)

    def prefill(self) -> Iterator[LlmFindings]:
        job = TextJob(tuple(range(1, 1 + self.extent.prompt)), 1)
        engines = {form: _Engine(self._gguf(Precision.INT8), form, 1) for form in (Precision.FP32, *FORMATS)}
        ways = {str(form): partial(engine.timed, [job]) for form, engine in engines.items()}
        part = f"{self.extent.dense.name}: a prompt until its first token"
        figures, medians = self._by_turns(part, ways, partial(_read, job))
        for form in FORMATS:
            target = at_least(f"{part}, {form} over fp32", medians[form] / medians[Precision.FP32], 0.9)
            yield LlmFindings(figures, (target,), engines[form].where_short(target, ways[form]))
            figures = ()

    def speculation(self) -> Iterator[LlmFindings]:
        """A trained model goes on with a page that it has read twice, a random one with its own loop."""
        weights, precision = self.weights or self._gguf(Precision.INT4), Precision.INT4
        drafting, plain = (_Engine(weights, precision, 1, is_drafting=one) for one in (True, False))
        if self.weights:
            quoted = self._words().encode(PAGE.read_text("utf-8"))[: self.extent.prompt] * 2
        else:
            quoted = (1, *plain.continuous([TextJob((1,), self.extent.prompt)])[0])
        jobs = [TextJob(quoted, self.extent.decoded + 1)]
        ways = {"with drafts": partial(drafting.timed, jobs), "without": partial(plain.timed, jobs)}
        part = f"{self.weights.stem if self.weights else self.extent.dense.name}: a text that quotes, {precision}"
        figures, medians = self._by_turns(part, ways, _decoded)
        target = at_least(f"{part}, with drafts over without", medians["with drafts"] / medians["without"], 1.5)
        yield LlmFindings(figures, (target,), drafting.where_short(target, ways["with drafts"]))

    def moe(self) -> Iterator[LlmFindings]:
        shape = self.extent.moe
        found = measure_offload(self.folder / "moe", shape, self.extent.rounds, Precision.INT4, 0.7)
        moved = ", ".join(f"{figure.what}: {figure.value:.4g} {figure.unit}" for figure in found.figures[-3:])
        note = f"SHORT: moe_experts: a token needs {shape.per_token} of {shape.moe_experts} in each layer; {moved}"
        yield found if found.targets[0].reached else replace(found, notes=(*found.notes, note))

    def beside_images(self) -> Iterator[LlmFindings]:
        weights, prompt = self.weights or self._gguf(Precision.INT4), self.extent.long_prompt
        yield measure_beside_images(self.folder / "beside", weights, Precision.INT4, prompt, self.extent.boards)

    def tokenising(self) -> Iterator[LlmFindings]:
        model, page = self._words(), PAGE.read_text("ascii", errors="ignore")
        text = page * math.ceil(self.extent.stall_bytes / len(page))
        runs = [_stall_of(partial(model.encode, text)) for _ in range(self.extent.rounds)]
        part = f"{len(text) / MEBIBYTE:.1f} MiB of prompt are tokenised"
        stall = median_of(part, "longest stall of another thread", [1e3 * stall_s for stall_s, _ in runs], "ms")
        took = median_of(part, "time", [seconds for _, seconds in runs], "s")
        is_met = stall.value <= STALL_MOST_MS
        target = Target(f"{part}: {stall.what}", f"at most {STALL_MOST_MS} ms", f"{stall.value:.1f} ms", is_met)
        note = f"SHORT: {part} in {took.value:.2f} s, of which the other thread waits for the interpreter's lock"
        yield LlmFindings((stall, took), (target,), () if is_met else (note,))

    def parity(self) -> Iterator[LlmFindings]:
        what = "families whose greedy tokens, of GGUF F16, are those of transformers"
        if not has_transformers():
            yield LlmFindings((), (Target(what, "all", "not run: transformers is not installed", None),))
            return
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", FAMILIES_TEST, "-k", "16_bits"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        yield LlmFindings((), (Target(what, "all", done.stdout.strip().rpartition("\n")[2], not done.returncode),))

    def _against(
        self, what: str, precision: Precision, rate: Rate, least: float, jobs: Sequence[TextJob], *,
        late: TextJob | None = None, slots: int = 1, weights: Path | None = None,
    ) -> LlmFindings:  # fmt: skip
        """Ours and llama.cpp's over one file."""
        part = f"{self.extent.dense.name if weights is None else weights.stem}: {what}, {precision}"
        file = weights or self._gguf(precision)
        engine = _Engine(file, precision, slots)
        ways = {OURS: partial(engine.timed, jobs, late)}
        note = f"{ABSENT}: {HOW}"
        with ExitStack() as peers:
            if has_llama(self.llama):
                peer = LlamaProcess(self.llama, file, self.threads, slots, CONTEXT)
                peers.callback(peer.close)
                ways[LLAMA], note = partial(peer.timed, jobs, late), f"{LLAMA}: {peer.greeting}"
            figures, medians = self._by_turns(part, ways, rate)
        target = _not_run(f"{part}, over {LLAMA}", least, ABSENT)
        if LLAMA in medians:
            target = at_least(target.what, medians[OURS] / medians[LLAMA], least)
        return LlmFindings(figures, (target,), (note, *engine.where_short(target, ways[OURS])))

    def _by_turns(self, part: str, ways: Mapping[str, Run], rate: Rate) -> tuple[tuple[Figure, ...], dict[str, float]]:
        times = by_turns(ways, Plan(self.extent.rounds, warming_up=1))
        rates = {way: list(map(rate, each.results)) for way, each in times.items()}
        figures = tuple(median_of(part, way, each, "tokens/s") for way, each in rates.items())
        return figures, {figure.what: figure.value for figure in figures}

    def _words(self) -> TextModel:
        return TextModel.of(gguf_program(self.weights or self._gguf(Precision.INT4), NAME), NAME)

    def _gguf(self, precision: Precision) -> Path:
        path = self.folder / f"{FORMATS[precision]}.gguf"
        return path if path.exists() else write_random_gguf(path, self.extent.dense, FORMATS[precision])


class _Engine(OurEngine):
    def __init__(self, weights: Path, precision: Precision, slots: int, *, is_drafting: bool = False) -> None:
        tensors = _tensors(weights, precision)
        super().__init__(LanguageModel(read_spec(weights, NAME), tensors), slots, is_drafting=is_drafting)
        self._read_bytes = sum(tensor.nbytes for tensor in tensors.values())  # by a pass; the embedding is the head
        self._team = lone_team(torch.get_num_threads())

    def timed(self, jobs: Sequence[TextJob], late: TextJob | None = None) -> list[TokenTimes]:
        self._team.keep()  # as an executor does before each batch
        return super().timed(jobs, late)

    def where_short(self, target: Target, run: Run) -> tuple[str, ...]:
        """Of a target that is not reached: its run again, under the profiler, with shares of functions' own time."""
        if target.reached is not False:
            return ()
        before, began_s = self.statistics.iterations, time.perf_counter()
        run()
        each_s = (time.perf_counter() - began_s) / (self.statistics.iterations - before)
        profile = Profile()
        profile.runcall(run)
        entries = sorted(profile.getstats(), key=lambda entry: -entry.inlinetime)
        whole_s = sum(entry.inlinetime for entry in entries)
        shares = (f"{entry.inlinetime / whole_s:.0%} {_name(entry.code)}" for entry in entries[:SHOWN])
        rate = f"{self._read_bytes / 1e6:.0f} MB of weights at {self._read_bytes / each_s / 1e9:.1f} GB/s"
        return (f"SHORT: {target.what}: {1e3 * each_s:.1f} ms an iteration, which reads {rate}: {', '.join(shares)}",)


@cache
def _tensors(weights: Path, precision: Precision) -> Mapping[str, Tensor]:
    return dict(backend_for("llm").pack(Expert(NAME, "llm", weights, (), None), precision).tensors)


def _name(code: CodeType | str) -> str:
    return code.partition(" of ")[0].strip("<>").split()[-1] if isinstance(code, str) else code.co_name


ROWS = ("decode", "slots", "first_token", "prefill", "speculation", "moe", "beside_images", "tokenising", "parity")


def measure_texts(directory: Path, progress: Progress, bench: TextBench, only: Collection[str] = ()) -> Measured:
    """Measure rows, one after the other; files in ``directory`` are removed afterwards. Raises ConfigError."""
    if unknown := set(only) - set(ROWS):
        raise ConfigError(f"--only {min(unknown)}: no such row - choose from {', '.join(ROWS)}")
    require_disk(directory, bench.extent.needed_bytes, "models with random weights and their packed files")
    use_threads(bench.threads)
    rows, found = [row for row in ROWS if row in (only or ROWS)], list[LlmFindings]()
    with removed_afterwards(directory, "bench-texts-") as folder:
        for number, row in enumerate(rows):
            progress(row, number, len(rows))
            found += getattr(replace(bench, folder=folder), row)()
    return measured_of(found, bench.threads, (f"coserve: products by {kernel() or 'torch'}",))


def _decoded(times: Sequence[TokenTimes]) -> float:
    return times[0].tokens_per_s


def _written(times: Sequence[TokenTimes]) -> float:
    last_s = max(each.tokens_s[-1] for each in times)
    return sum(len(each.tokens_s) for each in times) / (last_s - min(each.began_s for each in times))


def _read(job: TextJob, times: Sequence[TokenTimes]) -> float:
    """Of a prompt, until its first token."""
    return len(job.prompt) / times[-1].first_token_s


def _not_run(what: str, least: float, why: str) -> Target:
    return Target(what, f"at least {least:g}", why, None)


def _stall_of(work: Callable[[], object]) -> tuple[float, float]:
    """Longest time between two steps of another thread, which waits a millisecond after each; and the work's time."""
    done, steps_s = Event(), [time.perf_counter()]

    def step() -> None:
        while not done.wait(0.001):
            steps_s.append(time.perf_counter())
        steps_s.append(time.perf_counter())  # one at least

    other = Thread(target=step)
    other.start()
    work()
    done.set()
    other.join()
    return max(b - a for a, b in pairwise(steps_s)), steps_s[-1] - steps_s[0]
