"""Texts of many lengths: iteration-level scheduling against static batching, ours and transformers'.

Systems take turns over the same fp32 weights with as many rows at a time, and must write the same tokens in every
round. Peers have a process each.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import torch

from agent.line_file.texts import QUANTUM_S
from experts.errors import CoServeError
from experts.llm.model import load_model
from profiler.bench.measured import Plan, Target, at_least, by_turns, without_target
from proof.llm.figures import Figure, LlmFindings, not_measured
from proof.llm.our_engine import OurEngine
from proof.llm.peers import CONTINUOUS, SLOTS, STATIC, PeerProcess, has_transformers
from proof.llm.random_models import mixed_lengths, write_random_model

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from profiler.bench.measured import TimedTurns
    from proof.llm.random_models import QwenShape

OURS, OURS_BESIDE_IMAGES, OURS_STATIC, THEIR_STATIC, THEIR_CONTINUOUS = (
    "coserve",
    "coserve, in quanta as beside images",
    "coserve, static",
    "transformers, static",
    "transformers, generate_batch",
)
THEIRS = {THEIR_STATIC: STATIC, THEIR_CONTINUOUS: CONTINUOUS}
TARGET_STATIC, TARGET_CONTINUOUS = 2.0, 1.0


def measure_mixed(
    folder: Path, shape: QwenShape, rounds: int, progress: Callable[[int, int], None], requests: int
) -> LlmFindings:
    """Run a random model of this shape on all systems, below ``folder``. Raises CoServeError where tokens differ."""
    directory = write_random_model(folder / f"mixed-{shape.name}", shape)
    jobs = mixed_lengths(requests, shape.vocabulary)
    engine = OurEngine(load_model(directory, shape.name), SLOTS)
    systems = {
        OURS: partial(engine.continuous, jobs),
        OURS_BESIDE_IMAGES: partial(engine.continuous, jobs, QUANTUM_S),
        OURS_STATIC: partial(engine.static, jobs),
    }
    with ExitStack() as peers:
        for name, way in THEIRS.items() if has_transformers() else ():
            peer = PeerProcess(directory, way, torch.get_num_threads())
            peers.callback(peer.close)
            systems[name] = partial(peer.write, jobs)
        times = by_turns(systems, Plan(rounds, warming_up=1, progress=progress))
    require_same_tokens(times)
    tokens = sum(job.output for job in jobs)
    part = f"mixed lengths, {shape.name}"
    figures = tuple(Figure(part, name, tokens / each.median_s, "tokens/s") for name, each in times.items())
    note = f"{part}: {requests} requests, {SLOTS} rows at a time, every system the same tokens"
    absent = () if THEIR_STATIC in times else (not_measured("mixed lengths against transformers"),)
    seconds = {name: each.median_s for name, each in times.items()}
    return LlmFindings(figures, tuple(_targets(shape.name, seconds)), (note, *absent))


def require_same_tokens(times: Mapping[str, TimedTurns[list[list[int]]]]) -> None:
    """Raises CoServeError naming a system that wrote something else than ours, and for which requests."""
    expected = times[OURS].results[0]
    for name, each in times.items():
        for tokens in each.results:
            wrong = [number for number, pair in enumerate(zip(tokens, expected, strict=True)) if pair[0] != pair[1]]
            if wrong:
                raise CoServeError(
                    f"{name} writes other tokens than {OURS} for requests {wrong}: they are not to be compared"
                )


def _targets(shape: str, seconds: Mapping[str, float]) -> list[Target]:
    def over(system: str, other: str) -> float:
        return seconds[other] / seconds[system]

    def ratio(what: str, system: str, other: str) -> Target:
        return without_target(f"{shape}: {what}", over(system, other))

    scheduling = ratio("the same against our own static batching", OURS, OURS_STATIC)
    if THEIR_STATIC not in seconds:
        return [scheduling]
    return [
        at_least(f"{shape}: mixed lengths, over transformers' static", over(OURS, THEIR_STATIC), TARGET_STATIC),
        at_least(f"{shape}: the same over its generate_batch", over(OURS, THEIR_CONTINUOUS), TARGET_CONTINUOUS),
        ratio("in quanta as beside images, over transformers' static", OURS_BESIDE_IMAGES, THEIR_STATIC),
        scheduling,
        ratio("our static over transformers' static", OURS_STATIC, THEIR_STATIC),
    ]
