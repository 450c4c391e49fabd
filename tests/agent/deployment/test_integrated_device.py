"""Agents of a box whose accelerator shares the CPU's memory, which `device: integrated` emulates."""

import threading
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from agent.core.performance import (
    SSD,
    ExecutorSpec,
    ExpertProfile,
    Footprint,
    Limits,
    Performance,
    PerformanceMatrix,
    PoolSpec,
)
from agent.deployment import build
from agent.deployment.build import AgentOptions, build_agent
from agent.runtime.dispatcher import BatchWatch
from agent.runtime.loop import LoopOptions
from agent.runtime.machine.threads import LOWERED_BY
from agent.runtime.measuring.probe import Probed, estimated_matrix
from agent.runtime.text_engines import text_engines
from experts.backends.forms import form_of
from experts.backends.vision.classifier import write_random_weights
from experts.errors import MemoryExceeded
from experts.expert import Precision, Verdict
from experts.packed.weights import SegmentStore
from tests.agent.line_files import LineFile, expert, route
from tests.agent.runtime.native_threads import gives_way_here, nice_value
from tests.agent.runtime.text_line import TextAgent, TextLine, write_line

PATIENCE_S = 60.0
SIDE = 64
PHOTOGRAPHS = 3


@pytest.fixture(scope="module")
def line(tmp_path_factory):
    """A classifier in a form of the CPU alone; the device runs torch's form."""
    folder = tmp_path_factory.mktemp("integrated")
    write_random_weights(folder / "a.safetensors", "squeezenet1_1", 2, seed=0, image_size=SIDE)
    return LineFile(
        folder,
        experts={"cls/a": expert("a.safetensors", "squeezenet1_1", SIDE)},
        routes={"a": route("cls/a", passing=("ok", "bad"))},
        memory={"host": "256MiB"},
        device="integrated",
        executors={"integrated": 1, "cpu": 1},
        precision=str(Precision.ONEDNN_FP32),
    )


@pytest.mark.skipif(
    form_of(Precision.ONEDNN_FP32).why_absent() is not None,
    reason=f"it takes {form_of(Precision.ONEDNN_FP32).why_absent()}",
)
def test_form_of_the_cpu_is_bound_for_the_cpu_alone(line, monkeypatch):
    def equally_fast(box, copies, segments, usage, threads):
        return Probed(estimated_matrix(box, copies, usage), {})

    monkeypatch.setattr(build, "probe", equally_fast)  # each executor has its share of the images, however busy the box
    with line.built() as (agent, outcomes, _):
        columns = agent.setup.matrix.experts
        forms = {processor: column["cls/a"].copy for processor, column in columns.items()}
        assert forms == {"integrated": "cls/a@fp32", "cpu": "cls/a@onednn-fp32"}
        assert {spec.pool for spec in agent.setup.executors} == {"host"}
        image = np.zeros((SIDE, SIDE, 3), np.uint8)
        for _ in range(40):
            agent.loop.submit(image, component="a")  # all are there before any is answered
        agent.start()
        assert agent.loop.wait_until_idle(PATIENCE_S)
        told = agent.loop.statistics()
    assert {outcome.verdict for outcome in outcomes.values()} == {Verdict.OK}
    assert all(executor.images for executor in told.executors)
    assert told.transfers.failed == 0


@gives_way_here
@pytest.mark.parametrize(("processor", "gives_way"), [("integrated", False), ("cpu", True)])
def test_photographs_for_the_device_do_not_give_way_to_the_cpu_s_executors(line, processor, gives_way):
    alone = line.config.having(executors={processor: 1})
    options = AgentOptions(loop=LoopOptions(ssd_bytes_per_s=1e3))  # the first batch waits for its expert for an hour
    values, are_told = [], threading.Event()

    @contextmanager
    def preparing(request):
        values.append(nice_value())
        if len(values) == PHOTOGRAPHS:
            are_told.set()
        yield

    agent = build_agent(alone, lambda *_: None, lambda *_: None, options)
    agent.loop.watch_batches(BatchWatch(lambda _: None, lambda _: None, preparing))
    agent.start()
    photograph = np.zeros((1000, 1000, 3), np.uint8)
    for _ in range(PHOTOGRAPHS):
        agent.loop.submit(photograph, component="a")
    assert are_told.wait(PATIENCE_S)
    agent.stop()
    assert set(values) == {nice_value() + (LOWERED_BY if gives_way else 0)}


def test_each_device_of_a_memory_has_an_arena_of_its_own(tmp_path):
    segments = SegmentStore(tmp_path / "packed")
    pool = PoolSpec("host", 1000, 1000, lease_bytes=8 * 2**20)
    processors = ("integrated", "integrated", "cpu", "cpu")
    specs = [ExecutorSpec(number, processor, "host") for number, processor in enumerate(processors)]
    row = ExpertProfile("t", Performance(1.0, 1.0, 1, 0, lease_bytes=1), Footprint(1), {SSD: 1.0})
    both = PerformanceMatrix({"integrated": {"t": row}, "cpu": {"t": row}})
    engines = text_engines(specs, Limits((pool,)), segments, both)
    assert engines.arenas.keys() == {("host", "cpu:0"), ("host", "cpu")}
    assert engines.by_executor.keys() == {0, 1, 2, 3}
    matrix = PerformanceMatrix({"integrated": {"t": row}, "cpu": {}})
    alone = text_engines(specs, Limits((pool,)), segments, matrix)  # nothing is taken for one that runs none
    assert (alone.by_executor.keys(), alone.arenas.keys()) == ({0, 1}, {("host", "cpu:0")})
    engines.set_budget("host", 4 * 2**20)
    assert {arena.budget_bytes for arena in engines.arenas.values()} == {4 * 2**20}
    segments.close()


def test_texts_on_a_gpu_lease_from_one_arena_there_as_large_as_its_memory_s_share(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr("agent.runtime.text_engines.arena_for", lambda *given, **_: made.append(given))
    pools = (PoolSpec("host", 9, 9), PoolSpec("device", 9, 9, cache="host", lease_bytes=2**20))
    specs = [ExecutorSpec(number, "cuda", "device") for number in range(3)]
    row = ExpertProfile("t", Performance(1.0, 1.0, 1, 0, lease_bytes=1), Footprint(1), {SSD: 1.0})
    engines = text_engines(specs, Limits(pools), SegmentStore(tmp_path), PerformanceMatrix({"cuda": {"t": row}}))
    assert (made, engines.by_executor.keys()) == ([("cuda", 2**20)], {0, 1, 2})

    def exhausted(*given, **_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("agent.runtime.text_engines.arena_for", exhausted)
    with pytest.raises(MemoryExceeded, match="device, for keys and values"):
        text_engines(specs, Limits(pools), SegmentStore(tmp_path), PerformanceMatrix({"cuda": {"t": row}}))


def test_texts_are_equal_on_both_processors(tmp_path):
    line = TextLine.packed(tmp_path, write_line(tmp_path))
    agent = TextAgent(line, processors=("integrated", "cpu"), lease_tokens=40_000)
    asked = [agent.ask("llm/code", (1, 2, 3 + number), 12) for number in range(8)]  # before any is answered
    with agent:
        agent.settle()
        told = agent.loop.statistics()
    for number, (_, reader) in enumerate(asked):
        assert reader.tokens == line.greedy("llm/code", (1, 2, 3 + number), 12)
    assert all(executor.texts for executor in told.executors)
