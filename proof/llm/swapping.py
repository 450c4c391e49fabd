"""Language models that share one memory: models swapped by one agent and by a process each, and a shared backbone.

A round has requests for all models, in turn; a round begins once the one before has its answers. The agent loads
models beside running ones. The peer is a model-swapping server: a model's process starts in its turn, loads its
checkpoint, answers all waiting requests, and ends for the next one. Its order is the best one: the model in memory at
the end of a round comes first in the next. Its weights come from the page cache; the agent reads past it.
"""

from __future__ import annotations

import itertools
import math
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import yaml

from agent.config import read_line
from agent.deployment.build import agent_with_requests
from agent.runtime.texts import TextSource
from experts.errors import CoServeError
from experts.llm.serving.generation import GREEDY, TextRequest
from experts.sizes import MEBIBYTE
from profiler.bench.measured import Target, at_least, without_target
from proof.llm.figures import Figure, LlmFindings, not_measured
from proof.llm.our_engine import Collected
from proof.llm.peers import OURS, STATIC, PeerProcess, has_transformers
from proof.llm.random_models import mixed_lengths, write_random_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from agent.deployment.build import Agent
    from agent.runtime.requests import Requests
    from proof.llm.random_models import QwenShape, TextJob

    Tokens = list[list[int]]
    Round = Sequence[tuple[str, TextJob]]

MODELS = ("llm/a", "llm/b", "llm/c")
FITTING = 1.5  # models that the memory holds
KV_BYTES, WORKSPACE_BYTES = 64 * MEBIBYTE, 64 * MEBIBYTE
DEVICE_WORKSPACE_BYTES = 256 * MEBIBYTE  # also for a part of the moe_experts as numbers, which devices multiply
MEMORIES = ("host", "device")
TARGET = 3.0
TARGET_BACKBONE = 1.2
OWN_PARTS = "self_attn."  # of models on a common backbone


@dataclass(frozen=True, slots=True)
class Asking:
    """Rounds of requests. ``each``: requests to each model in a round; ``ways``: how peer processes are run."""

    shape: QwenShape
    rounds: int
    models: Sequence[str] = MODELS
    each: int = 4
    ways: Sequence[str] = (OURS, STATIC)

    def round(self, number: int) -> Round:
        jobs = mixed_lengths(self.each * len(self.models), self.shape.vocabulary, seed=number)
        return list(zip(itertools.cycle(self.models), jobs))


@dataclass(frozen=True, slots=True)
class TextAgent:
    """Running agent with packed models, ledgers, leases and quanta, as in ``coserve serve``."""

    agent: Agent
    requests: Requests

    @property
    def loads(self) -> int:
        return sum(self.agent.loop.statistics().engine.loads.values())

    def write(self, asks: Round) -> Tokens:
        """Tokens of each request. Raises CoServeError for a request without an answer."""
        writers = [Collected() for _ in asks]
        for (model, job), writer in zip(asks, writers, strict=True):
            text = TextRequest(job.prompt, job.output, GREEDY, writer)
            source = TextSource(lambda _, text=text: text)  # type: ignore[misc]  # a default that binds it now
            self.requests.submit(source, expert=self.agent.expert(model))
        for end in self.requests.collect():
            if end.outcome.label is None:
                raise CoServeError(f"a text of the benchmark was not written: {end.outcome.reason}")
        return [writer.tokens for writer in writers]


@contextmanager
def text_agent(
    folder: Path, models: Mapping[str, Path], expert_bytes: int, device: str | None = None
) -> Iterator[TextAgent]:
    """An agent with ``expert_bytes`` of memory for weights, and its files in a new ``folder``. ``device``: of its only
    executor; default: all that the box has."""
    folder.mkdir()
    workspace_bytes = DEVICE_WORKSPACE_BYTES if device in {"cuda", "mps"} else WORKSPACE_BYTES
    whole_mib = math.ceil((expert_bytes + KV_BYTES + workspace_bytes) / MEBIBYTE)
    line = {
        "line": "bench-llm",
        "state": "./state",
        "precision": "fp32",
        "experts": {name: {"architecture": "llm", "weights": str(directory)} for name, directory in models.items()},
        "texts": {"kv": f"{KV_BYTES // MEBIBYTE}MiB", "prefix_cache": False},
        "memory": {"workspace": f"{workspace_bytes // MEBIBYTE}MiB", **dict.fromkeys(MEMORIES, f"{whole_mib}MiB")},
    } | ({} if device is None else {"device": device, "executors": {device: 1}})
    (folder / "line.yaml").write_text(yaml.safe_dump(line, sort_keys=False), "utf-8")
    config = read_line(folder / "line.yaml", environment={})
    with agent_with_requests(config, lambda stage, done, total: None) as (agent, requests):
        agent.start()
        yield TextAgent(agent, requests)


def measure_swapping(folder: Path, asking: Asking) -> LlmFindings:
    """Send all systems the same requests. Raises CoServeError where answers differ."""
    directories = {
        name: write_random_model(folder / f"swap-{number}", asking.shape, seed=number)
        for number, name in enumerate(asking.models)
    }
    rounds = [asking.round(number) for number in range(asking.rounds + 1)]
    with text_agent(folder / "swap-agent", directories, int(FITTING * _bytes_of(directories))) as agent:
        ours, ours_s, loads = [agent.write(rounds[0])], 0.0, -agent.loads
        for asks in rounds[1:]:
            began_s = time.perf_counter()
            ours.append(agent.write(asks))
            ours_s += time.perf_counter() - began_s
        loads += agent.loads
    theirs_s = {}
    for way in [way for way in asking.ways if way == OURS or has_transformers()]:
        theirs, theirs_s[way] = _by_processes(directories, rounds, way)
        if ours != theirs:
            raise CoServeError(f"the agent and processes with {way} write different tokens: not to be compared")
    tokens = sum(job.output for asks in rounds[1:] for _, job in asks)
    figures = [Figure("swapping", "coserve", tokens / ours_s, "tokens/s"), Figure("swapping", "loads", loads)]
    figures += [
        Figure("swapping", f"processes with {way}", tokens / each, "tokens/s") for way, each in theirs_s.items()
    ]
    absent = tuple(not_measured(f"processes with {way}") for way in asking.ways if way not in theirs_s)
    return LlmFindings(tuple(figures), _targets(len(asking.models), ours_s, theirs_s), absent)


def measure_backbone(folder: Path, asking: Asking) -> LlmFindings:
    """Bytes in the ledger of models that differ in their attention alone, once all have answered."""
    own = tuple(f"model.layers.{number}.{OWN_PARTS}" for number in range(asking.shape.layers))
    directories = {
        name: write_random_model(folder / f"backbone-{number}", asking.shape, own=own, own_seed=number + 1)
        for number, name in enumerate(asking.models)
    }
    models = len(asking.models)
    with text_agent(folder / "backbone-agent", directories, models * _bytes_of(directories)) as agent:
        agent.write(asking.round(0))
        pools = agent.agent.loop.statistics().engine.pools
        held_bytes = sum(pool.used_bytes for pool in pools)
        packed = agent.agent.packed.values()
        one_bytes = max(sum(segment.slot_bytes for segment in each.segments) for each in packed)
    resident = {name for pool in pools for name in pool.resident}
    if len(resident) != models:
        raise CoServeError(f"only {sorted(resident)} are in memory, and all were to be weighed")
    share = held_bytes / one_bytes
    what = f"{models} experts on one backbone hold, of one's bytes"
    target = Target(what, f"under {TARGET_BACKBONE:g}", f"{share:.3f}", share < TARGET_BACKBONE)
    figures = (
        Figure("backbone", "all models hold", held_bytes / 1e6, "MB"),
        Figure("backbone", "one model holds", one_bytes / 1e6, "MB"),
    )
    return LlmFindings(figures, (target,))


def _bytes_of(directories: Mapping[str, Path]) -> int:
    return sum(file.stat().st_size for file in next(iter(directories.values())).iterdir())


def _targets(models: int, ours_s: float, theirs_s: Mapping[str, float]) -> tuple[Target, ...]:
    fastest, *others = sorted(theirs_s, key=lambda way: theirs_s[way])
    what = f"{models} LLM experts, memory for {FITTING:g}: over a process each, {fastest}"
    slower = (without_target(f"the same, {way}", theirs_s[way] / ours_s) for way in others)
    return (at_least(what, theirs_s[fastest] / ours_s, TARGET), *slower)


def _by_processes(directories: Mapping[str, Path], rounds: Sequence[Round], way: str) -> tuple[list[Tokens], float]:
    """Tokens of each round, and the seconds of all but the first; at most one process runs."""
    tokens: list[Tokens] = []
    order, seconds = list(directories), 0.0
    process, running = None, None
    try:
        for number, asks in enumerate(rounds):
            began_s = time.perf_counter()
            answers: dict[int, list[int]] = {}
            for name in order:
                if process is None or running != name:
                    if process is not None:
                        process.close()
                    process, running = PeerProcess(directories[name], way, torch.get_num_threads()), name
                own = [place for place, (model, _) in enumerate(asks) if model == name]
                answers |= zip(own, process.write([asks[place][1] for place in own]), strict=True)
            order.reverse()
            seconds += (time.perf_counter() - began_s) if number else 0.0
            tokens.append([answers[place] for place in range(len(asks))])
    finally:
        if process is not None:
            process.close()
    return tokens, seconds
