"""Requests of idle precedence beside real models."""

from __future__ import annotations

from dataclasses import replace
from queue import SimpleQueue

from agent.core.engine import Engine
from agent.core.performance import SSD, ExecutorSpec, ExpertProfile, Limits, PerformanceMatrix, PoolSpec
from agent.core.policy import PRESETS
from agent.core.request import Precedence
from agent.runtime.assembly import assemble
from agent.runtime.loop import AgentPlan, BatchWatch, LoopOptions
from agent.runtime.machine.detection import detect
from experts.graph import ExpertGraph, RouteStep
from tests.agent.runtime.test_loop import ANY, PATIENCE_S, PERFORMANCE


def test_a_shadow_predicts_as_it_does_alone_and_leaves_first_for_the_line(line):
    """Twins share their features; a third expert takes the shadow's room again and again."""
    outcomes, ran = SimpleQueue(), []
    names = ("cls/twin-0", "cls/twin-1", "cls/wide")
    routes = {name.removeprefix("cls/"): (RouteStep(name, ANY),) for name in names if name != "cls/twin-1"}
    graph = ExpertGraph(names, routes, {"cls/twin-0": "cls/twin-1"})
    copies = {f"{name}@fp32": line.copies[f"{name}@fp32"] for name in names}
    rows = {
        copy.expert.id: ExpertProfile(name, PERFORMANCE, copy.footprint, {SSD: 0.01}) for name, copy in copies.items()
    }
    matrix, specs = PerformanceMatrix({"cpu": rows}), [ExecutorSpec(0, "cpu", "host")]
    shared = {each.id: each.size_bytes for row in rows.values() for each in row.footprint.shared}
    all_bytes = sum(row.footprint.own_bytes for row in rows.values()) + sum(shared.values())
    limits = Limits((PoolSpec("host", all_bytes - 1, 64 * 1024 * 1024),))  # of three, two fit
    engine = Engine(graph, matrix, specs, PRESETS["samba"], limits)
    plan = AgentPlan(replace(detect("cpu"), cores=1), specs, limits, copies, matrix, graph)
    options = LoopOptions(checks_invariants=True)
    loop = assemble(engine, plan, line.segments, lambda _, outcome: outcomes.put(outcome), options)
    nothing = lambda _: None  # noqa: E731
    loop.watch_batches(BatchWatch(nothing, nothing, ran=lambda batch, seconds: ran.append((batch.expert, seconds))))
    loop.start()

    def ask(image, **asked):
        assert loop.wait_until_idle(PATIENCE_S)
        loop.submit(image, **asked)
        return outcomes.get(timeout=PATIENCE_S).steps[0].prediction

    try:
        for number in range(4):
            image = line.pixels(number)
            assert ask(image, component="twin-0") == line.predict("twin-0", image)
            loop.unwant("cls/wide")
            assert ask(image, expert="cls/twin-1", precedence=Precedence.IDLE) == line.predict("twin-1", image)
            ask(image, component="wide")
        assert loop.wait_until_idle(PATIENCE_S)
        statistics = loop.statistics().engine
        assert (statistics.arrived, statistics.batches) == (8, 8)  # the line's alone
        assert statistics.evictions == 4 + 3  # the shadow each time, and the copy that made room for it
        assert [expert for expert, _ in ran] == ["cls/twin-0", "cls/twin-1", "cls/wide"] * 4
        assert all(seconds > 0.0 for _, seconds in ran)
    finally:
        loop.stop()
