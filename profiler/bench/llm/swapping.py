"""Three language models, memory for one and a half: one agent, against one process for each model.

Rounds of requests: in each, all models are asked, by turns, and a round begins when the one before has its answers. The
agent holds what fits and loads what it needs beside what runs. The peer is what model-swapping servers do: the process
of a model is started when its turn comes, loads its checkpoint, answers all that waits for it, and is ended for the
next one. It is served in the order that is best for it: what is in memory at the end of a round comes first in the
next. Its processes run our own loader and engine or transformers, whichever swaps faster here; the weights are in the
page cache for it, and are read past it by the agent.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from experts.errors import CoServeError
from profiler.bench.llm.part import TRANSFORMERS as TRANSFORMERS_MISSING
from profiler.bench.llm.part import Part
from profiler.bench.llm.peer_process import OURS, TRANSFORMERS
from profiler.bench.llm.random_models import write_random_model
from profiler.bench.llm.text_jobs import TextJob, mixed_lengths
from profiler.bench.llm.texts_on_agent import Ask, TextAgent
from profiler.bench.llm.transformers_peer import is_there
from profiler.targets import Target, at_least

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from profiler.bench.llm.random_models import QwenShape

MODELS = ("llm/a", "llm/b", "llm/c")
FITTING = 1.5  # of the models
EACH = 4  # requests to each model in a round
TARGET = 3.0
TARGET_BACKBONE = 1.2
OWN_PARTS = "self_attn."  # of models on a common backbone


def measure_swapping(
    folder: Path,
    shape: QwenShape,
    rounds: int,
    models: Sequence[str] = MODELS,
    each: int = EACH,
    way: str | None = None,
) -> Part:
    """Both on the same requests, whose answers must be the same. Raises CoServeError where they are not.

    ``each``: requests to each model in a round; ``way``: what the processes run; None: whichever swaps faster.
    """
    directories = {
        name: write_random_model(folder / f"swap-{number}", shape, seed=number) for number, name in enumerate(models)
    }
    asked = [_round(models, shape, number, each) for number in range(rounds + 1)]
    ours, ours_s, loads = _by_agent(folder / "swap-agent", directories, asked)
    way, why = (way, None) if way else _faster_way(next(iter(directories.values())), asked[0][0].job)
    theirs, theirs_s = _by_processes(directories, asked, way)
    if ours != theirs:
        raise CoServeError("the agent and the processes write different tokens: they are not to be compared")
    what = f"{len(models)} LLM experts, memory for {FITTING:g}: over one process each"
    tokens = sum(ask.job.output for each in asked[1:] for ask in each)
    figures = {"coserve_s": ours_s, "processes_s": theirs_s, "tokens": tokens, "loads": loads, "peer": way}
    remarks = (
        f"{shape.name}, {rounds} rounds of {each} requests each: coserve {tokens / ours_s:.1f} tokens/s with {loads} "
        f"loads, processes {tokens / theirs_s:.1f} tokens/s, each with {way}",
    )
    skipped = () if why is None else (why,)
    return Part("swapping", (at_least(what, theirs_s / ours_s, TARGET),), figures, remarks, skipped)


def measure_backbone(folder: Path, shape: QwenShape, each: int = EACH) -> Part:
    """What the ledger holds of models that differ in their attention alone, once all were asked."""
    own = tuple(f"model.layers.{number}.{OWN_PARTS}" for number in range(shape.layers))
    directories = {
        name: write_random_model(folder / f"backbone-{number}", shape, own=own, own_seed=number + 1)
        for number, name in enumerate(MODELS)
    }
    room = len(MODELS) * sum(file.stat().st_size for file in directories[MODELS[0]].iterdir())
    agent = TextAgent(folder / "backbone-agent", directories, room)
    try:
        agent.write(_round(MODELS, shape, 0, each))
        held_bytes = sum(pool.used_bytes for pool in agent.statistics.engine.pools)
        one_bytes = max(agent.slot_bytes.values())
        resident = {name for pool in agent.statistics.engine.pools for name in pool.resident}
    finally:
        agent.close()
    if len(resident) != len(MODELS):
        raise CoServeError(f"only {sorted(resident)} are in memory, and all were to be weighed")
    share = held_bytes / one_bytes
    what = f"{len(MODELS)} experts on one backbone hold, of one's bytes"
    target = Target(what, f"under {TARGET_BACKBONE:g}", f"{share:.3f}", share < TARGET_BACKBONE)
    return Part(
        "backbone", (target,), {"held_bytes": held_bytes, "one_bytes": one_bytes},
        (f"{shape.name}: each has its own attention; all else is shared",),
    )  # fmt: skip


def _round(models: Sequence[str], shape: QwenShape, number: int, each: int) -> list[Ask]:
    jobs = mixed_lengths(each * len(models), shape.vocabulary, seed=number)
    return [Ask(models[place % len(models)], job) for place, job in enumerate(jobs)]


def _by_agent(
    folder: Path, directories: Mapping[str, Path], asked: Sequence[Sequence[Ask]]
) -> tuple[list[list[list[int]]], float, int]:
    """Each round's tokens, the seconds of all but the first, and their loads."""
    size = sum(file.stat().st_size for file in next(iter(directories.values())).iterdir())
    agent = TextAgent(folder, directories, int(FITTING * size))
    try:
        tokens = [agent.write(asked[0])]
        loads, began_s = agent.loads, time.perf_counter()
        tokens += [agent.write(each) for each in asked[1:]]
        return tokens, time.perf_counter() - began_s, agent.loads - loads
    finally:
        agent.close()


def _by_processes(
    directories: Mapping[str, Path], asked: Sequence[Sequence[Ask]], way: str
) -> tuple[list[list[list[int]]], float]:
    tokens: list[list[list[int]]] = []
    order, seconds = list(directories), 0.0
    with _Swapper(directories, way) as swapper:
        for number, each in enumerate(asked):
            began_s = time.perf_counter()
            answers: dict[int, list[int]] = {}
            for name in order:
                own = [place for place, ask in enumerate(each) if ask.model == name]
                answers |= zip(own, swapper.write(name, [each[place].job for place in own]), strict=True)
            order.reverse()
            seconds += (time.perf_counter() - began_s) if number else 0.0
            tokens.append([answers[place] for place in range(len(each))])
    return tokens, seconds


class _Swapper:
    """At most one process, of the model that was asked last."""

    def __init__(self, directories: Mapping[str, Path], way: str) -> None:
        self._directories = directories
        self._way = way
        self._name: str | None = None
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> _Swapper:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def write(self, name: str, jobs: Sequence[TextJob]) -> list[list[int]]:
        """These jobs' tokens, after a swap where another model is in memory."""
        if self._process is None or self._name != name:
            self._end()
            self._process, self._name = _started(self._directories[name], self._way), name
        return _asked(self._process, jobs)

    def _end(self) -> None:
        if self._process is not None:
            _ended(self._process)
            self._process = None


def _faster_way(directory: Path, job: TextJob) -> tuple[str, str | None]:
    """Which kind of process answers first, from its start on; and what was not tried."""
    if not is_there():
        return OURS, f"processes that swap with transformers: {TRANSFORMERS_MISSING}"
    return min((OURS, TRANSFORMERS), key=lambda way: _first_answer_s(directory, way, job)), None


def _first_answer_s(directory: Path, way: str, job: TextJob) -> float:
    began_s = time.perf_counter()
    with _process(directory, way) as process:
        _asked(process, [job])
        return time.perf_counter() - began_s


@contextmanager
def _process(directory: Path, way: str) -> Iterator[subprocess.Popen[str]]:
    process = _started(directory, way)
    try:
        yield process
    finally:
        _ended(process)


def _started(directory: Path, way: str) -> subprocess.Popen[str]:
    """A process that has its weights. Raises CoServeError where it ends instead."""
    command = [
        sys.executable,
        "-m",
        "profiler.bench.llm.peer_process",
        str(directory),
        way,
        str(torch.get_num_threads()),
    ]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        _answer(process)
    except BaseException:
        _ended(process)
        raise
    return process


def _asked(process: subprocess.Popen[str], jobs: Sequence[TextJob]) -> list[list[int]]:
    assert process.stdin is not None
    process.stdin.write(json.dumps([[job.prompt, job.output] for job in jobs]) + "\n")
    process.stdin.flush()
    tokens: list[list[int]] = json.loads(_answer(process))
    return tokens


def _answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise CoServeError(f"the process of a model ended by itself with {process.wait()}: see its words above")
    return line


def _ended(process: subprocess.Popen[str]) -> None:
    with process:
        process.kill()
