"""One trace of everything that an Engine is told, with an answer for all that it asks; writes a digest of its effects.

Run as a program: how Python hashes strings is settled when a process starts.
"""

from __future__ import annotations

import hashlib
import random
import sys

from agent.core import events
from agent.core.effects import StartBatch, StartLoad
from agent.core.engine import Engine
from agent.core.performance import (
    SSD,
    ExecutorSpec,
    ExpertProfile,
    Footprint,
    Limits,
    Performance,
    PerformanceMatrix,
    PoolSpec,
    PreparedForm,
    SharedTensors,
)
from agent.core.policy import PRESETS
from agent.core.request import IMAGE, Precedence, Work
from experts.expert import Prediction
from experts.graph import ExpertGraph, RouteStep

OK = frozenset({"ok", "fine", "good"})
FORMS = (PreparedForm("small", 1), PreparedForm("large", 5))
POOLS = (PoolSpec("host", 60, 16, lease_bytes=30), PoolSpec("device", 30, 16, cache="host", lease_bytes=30))
EXECUTORS = tuple(ExecutorSpec(number, name, pool) for number, (name, pool) in enumerate(
    [("gpu", "device"), ("gpu", "device"), ("cpu", "host"), ("cpu", "host")]
))  # fmt: skip


def line(generation: int) -> tuple[ExpertGraph, PerformanceMatrix, frozenset[str], frozenset[str]]:
    """Experts of images, their shadows and experts of texts; all of earlier generations are retired."""
    *before, served = (
        [f"{name}+{number}" for name in ("a", "b", "c", "d", "e", "f", "new-a", "new-b", "llm-1", "llm-2")]
        for number in range(1, generation + 1)
    )
    old = [name for names in before for name in names]
    *images, new_a, new_b, first, second = served
    routes = {f"one-{n}": (RouteStep(name, OK),) for n, name in enumerate(images)}
    routes |= {f"two-{n}": (RouteStep(name, OK), RouteStep(images[(n * 2 + 3) % 6], OK)) for n, name in
               enumerate(images) if n < (n * 2 + 3) % 6}  # fmt: skip
    routes |= {"text-0": (RouteStep(first, OK),), "text-1": (RouteStep(second, OK),)}
    names = [*old, *served]
    graph = ExpertGraph(names, routes, {images[0]: new_a, images[1]: new_b})
    columns = {
        processor: {name: _row(name, processor, place) for place, name in enumerate(names)}
        for processor in ("cpu", "gpu")
    }
    usage = dict.fromkeys(served, 0.1)  # alike: nothing but their names tells them apart
    return graph, PerformanceMatrix(columns, usage), frozenset(images[2:3]), frozenset(old)


def _row(name: str, processor: str, place: int) -> ExpertProfile:
    is_text = name.startswith("llm")
    performance = Performance(0.01, 0.02, 4, 1, K_output_s=0.01 if is_text else 0.0, lease_bytes=2 if is_text else 0)
    footprint = Footprint(5, (SharedTensors("trunk", 4), SharedTensors("stem", 2)) if place % 3 else ())
    form = None if is_text else FORMS[place % 2]
    return ExpertProfile(
        f"{name}@fp32", performance, footprint, {SSD: 0.2, "host": 0.05}, "family" if is_text else None, form
    )


def run(seed: int, steps: int = 1500) -> str:
    draw, now, requests, generation = random.Random(seed), 0.0, 0, 1
    graph, matrix, pinned, _ = line(generation)
    limits = Limits(POOLS, max_overtake_s=1.0, prepared_bytes=40, pinned=pinned)
    engine = Engine(graph, matrix, EXECUTORS, PRESETS["coserve"], limits)
    loads: list[StartLoad] = []
    batches: list[StartBatch] = []
    digest = hashlib.sha256()

    def handle(event) -> None:
        effects = engine.handle(event, now)
        loads.extend(effect for effect in effects if isinstance(effect, StartLoad))
        batches.extend(effect for effect in effects if isinstance(effect, StartBatch))
        digest.update(repr((now, effects)).encode())

    handle(events.Started())
    for step in range(steps):
        now += draw.choice((0.0, 0.01, 0.1))
        kind = draw.random()
        if kind < 0.4:
            requests += 1
            component = draw.choice(list(graph.routes))
            handle(events.Arrived(requests, component, work=Work(1, 3, 6) if "text" in component else IMAGE))
        elif kind < 0.45:
            requests += 1
            shadow = draw.choice(sorted(graph.in_shadow))
            handle(events.Arrived(requests, expert=shadow, precedence=Precedence.IDLE))
        elif kind < 0.6 and loads:
            load = loads.pop(draw.randrange(len(loads))).load
            is_bad = draw.random() < 0.1
            handle(
                events.LoadFailed(load, "I/O", out_of_memory=True, permanent=False) if is_bad else events.Loaded(load)
            )
        elif batches:
            handle(answer(batches.pop(0).batch, draw))
        if step % 300 == 299:
            generation += 1
            graph, matrix, pinned, retired = line(generation)
            handle(events.LineChanged(graph, matrix, pinned, retired))
    return digest.hexdigest()


def answer(batch, draw):
    if draw.random() < 0.05:
        return events.BatchFailed(batch.id, "broken", out_of_memory=draw.random() < 0.5)
    if batch.quantum_s is None:
        label = draw.choice(("ok", "ok", "bad"))
        return events.Finished(batch.id, (Prediction(label, 0.9),) * len(batch.requests))
    ended = [draw.random() < 0.5 for _ in batch.requests]
    told = list(zip(batch.requests, ended, strict=True))
    finished = tuple((request, Prediction("ok", 0.9)) for request, is_over in told if is_over)
    return events.Progressed(batch.id, finished, tuple((r, Work(0, 1, 6)) for r, is_over in told if not is_over))


if __name__ == "__main__":
    sys.stdout.write(run(int(sys.argv[1])))
