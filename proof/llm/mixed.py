"""Texts whose answers have many lengths: iteration-level scheduling against static batching, ours and transformers'.

Systems take turns, round by round, and medians are told; a first round counts for nothing. All run as many rows at a
time over the same fp32 weights, and must write the same tokens, which is checked in every round. Peers have a process
each: see ``peer_process``.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from agent.line_file.texts import QUANTUM_S
from experts.errors import CoServeError
from experts.llm.model import load_model
from profiler.targets import Target, at_least
from proof.llm.our_engine import OurEngine
from proof.llm.part import TRANSFORMERS, Part
from proof.llm.peer_process import CONTINUOUS, SLOTS, STATIC, PeerProcess
from proof.llm.random_models import write_random_model
from proof.llm.text_jobs import mixed_lengths
from proof.llm.transformers_peer import is_there

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from proof.llm.random_models import QwenShape
    from proof.llm.text_jobs import TextJob

    System = Callable[[Sequence[TextJob]], list[list[int]]]

REQUESTS = 24
OURS, OURS_BESIDE_IMAGES, OURS_STATIC, THEIR_STATIC, THEIR_CONTINUOUS = (
    "coserve",
    "coserve, in quanta as beside images",
    "coserve, static",
    "transformers, static",
    "transformers, generate_batch",
)
THEIRS = {THEIR_STATIC: STATIC, THEIR_CONTINUOUS: CONTINUOUS}
TARGET_STATIC, TARGET_CONTINUOUS = 2.0, 1.0


@dataclass(frozen=True, slots=True)
class MixedTimes:
    """Seconds of each system, medians; ``tokens``: that are of use, in all answers."""

    shape: str
    requests: int
    slots: int
    tokens: int
    seconds: Mapping[str, float]

    def tokens_per_s(self, system: str) -> float:
        return self.tokens / self.seconds[system]

    def over(self, system: str, other: str) -> float:
        return self.seconds[other] / self.seconds[system]

    @property
    def targets(self) -> tuple[Target, ...]:
        """Against the peers, where those ran; and what of it is scheduling alone."""
        scheduling = self._told("the same against our own static batching", OURS, OURS_STATIC)
        if THEIR_STATIC not in self.seconds:
            return (scheduling,)
        over = f"{self.shape}: mixed lengths, over"
        return (
            at_least(f"{over} transformers' static", self.over(OURS, THEIR_STATIC), TARGET_STATIC),
            at_least(
                f"{self.shape}: the same over its generate_batch", self.over(OURS, THEIR_CONTINUOUS), TARGET_CONTINUOUS
            ),
            self._told("in quanta as beside images, over transformers' static", OURS_BESIDE_IMAGES, THEIR_STATIC),
            scheduling,
            self._told("our static over transformers' static", OURS_STATIC, THEIR_STATIC),
        )

    def _told(self, what: str, system: str, other: str) -> Target:
        return Target(f"{self.shape}: {what}", "-", f"{self.over(system, other):.2f}", None)


def measure_mixed(
    folder: Path, shape: QwenShape, rounds: int, progress: Callable[[int, int], None], requests: int = REQUESTS
) -> Part:
    """A random model of this shape on all systems, below ``folder``. Raises CoServeError where tokens differ."""
    directory = write_random_model(folder / f"mixed-{shape.name}", shape)
    jobs = mixed_lengths(requests, shape.vocabulary)
    engine = OurEngine(load_model(directory, shape.name), SLOTS)
    systems: dict[str, System] = {
        OURS: engine.continuous,
        OURS_BESIDE_IMAGES: partial(engine.continuous, quantum_s=QUANTUM_S),
        OURS_STATIC: engine.static,
    }
    with ExitStack() as peers:
        for name, way in THEIRS.items() if is_there() else ():
            peer = PeerProcess(directory, way, torch.get_num_threads())
            peers.callback(peer.close)
            systems[name] = peer.write
        seconds = _turns(systems, jobs, rounds, progress)
    times = MixedTimes(shape.name, requests, SLOTS, sum(job.output for job in jobs), seconds)
    rates = ", ".join(f"{name} {times.tokens_per_s(name):.0f}" for name in systems)
    return Part(
        f"mixed lengths, {shape.name}",
        times.targets,
        {"tokens": times.tokens, "requests": requests, "slots": SLOTS, "seconds": dict(seconds)},
        (f"tokens/s: {rates}; {requests} requests, {SLOTS} rows at a time, every system the same tokens",),
        () if THEIR_STATIC in systems else (f"mixed lengths against transformers: {TRANSFORMERS}",),
    )


def _turns(
    systems: Mapping[str, System], jobs: Sequence[TextJob], rounds: int, progress: Callable[[int, int], None]
) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    expected: list[list[int]] | None = None
    for number in range(rounds + 1):
        for name, system in systems.items():
            began_s = time.perf_counter()
            tokens = system(jobs)
            if number:
                seconds[name].append(time.perf_counter() - began_s)
            expected = expected or tokens
            _check(name, tokens, expected)
        progress(number + 1, rounds + 1)
    return {name: statistics.median(each) for name, each in seconds.items()}


def _check(name: str, tokens: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> None:
    wrong = [number for number, pair in enumerate(zip(tokens, expected, strict=True)) if pair[0] != pair[1]]
    if wrong:
        raise CoServeError(f"{name} writes other tokens than {OURS} for requests {wrong}: they are not to be compared")
