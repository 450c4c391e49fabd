"""Three language models, memory for one and a half: one agent, against one process for each model.

Rounds of requests: in each, all models are asked, by turns, and a round begins when the one before has its answers. The
agent holds what fits and loads what it needs beside what runs. The peer is what model-swapping servers do: the process
of a model is started when its turn comes, loads its checkpoint, answers all that waits for it, and is ended for the
next one. It is served in the order that is best for it: what is in memory at the end of a round comes first in the
next. Its processes run our own loader and engine, and transformers', one after the other; the weights are in the page
cache for them, and are read past it by the agent.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from experts.errors import CoServeError
from profiler.targets import Target, at_least
from proof.llm.part import TRANSFORMERS as TRANSFORMERS_MISSING
from proof.llm.part import Part
from proof.llm.peer_process import OURS, STATIC, PeerProcess
from proof.llm.random_models import write_random_model
from proof.llm.text_jobs import mixed_lengths
from proof.llm.texts_on_agent import Ask, TextAgent
from proof.llm.transformers_peer import is_there

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from proof.llm.random_models import QwenShape
    from proof.llm.text_jobs import TextJob

MODELS = ("llm/a", "llm/b", "llm/c")
FITTING = 1.5  # of the models
WAYS = (OURS, STATIC)
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
    ways: Sequence[str] = WAYS,
) -> Part:
    """All systems on the same requests. Raises CoServeError where answers differ.

    ``each``: requests to each model in a round; ``ways``: what the processes run; the target is over the fastest.
    """
    directories = {
        name: write_random_model(folder / f"swap-{number}", shape, seed=number) for number, name in enumerate(models)
    }
    asked = [_round(models, shape, number, each) for number in range(rounds + 1)]
    ours, ours_s, loads = _by_agent(folder / "swap-agent", directories, asked)
    theirs_s = {}
    for way in [way for way in ways if way == OURS or is_there()]:
        theirs, theirs_s[way] = _by_processes(directories, asked, way)
        if ours != theirs:
            raise CoServeError(
                f"the agent and processes with {way} write different tokens: they are not to be compared"
            )
    tokens = sum(ask.job.output for each in asked[1:] for ask in each)
    rates = ", ".join(f"processes with {way} {tokens / seconds:.1f}" for way, seconds in theirs_s.items())
    return Part(
        "swapping",
        _swapping_targets(len(models), ours_s, theirs_s),
        {"coserve_s": ours_s, "processes_s": theirs_s, "tokens": tokens, "loads": loads},
        (
            f"{shape.name}, {rounds} rounds of {each} requests to each model, tokens/s: coserve {tokens / ours_s:.1f} "
            f"with {loads} loads, {rates}",
        ),
        tuple(f"processes with {way}: {TRANSFORMERS_MISSING}" for way in ways if way not in theirs_s),
    )


def _swapping_targets(models: int, ours_s: float, theirs_s: Mapping[str, float]) -> tuple[Target, ...]:
    what = f"{models} LLM experts, memory for {FITTING:g}: over a process each"
    fastest = min(theirs_s, key=lambda way: theirs_s[way])
    others = [way for way in theirs_s if way != fastest]
    return (
        at_least(f"{what}, {fastest}", theirs_s[fastest] / ours_s, TARGET),
        *(Target(f"the same, {way}", "-", f"{theirs_s[way] / ours_s:.2f}", None) for way in others),
    )


def measure_backbone(folder: Path, shape: QwenShape, each: int = EACH) -> Part:
    """Ledger's bytes of models that differ in their attention alone, once all were asked."""
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
        self._process: PeerProcess | None = None

    def __enter__(self) -> _Swapper:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def write(self, name: str, jobs: Sequence[TextJob]) -> list[list[int]]:
        """These jobs' tokens, after a swap where another model is in memory."""
        if self._process is None or self._name != name:
            self._end()
            self._process, self._name = PeerProcess(self._directories[name], self._way, torch.get_num_threads()), name
        return self._process.write(jobs)

    def _end(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None
