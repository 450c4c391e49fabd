"""The matrix of a line from measured kinds."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.performance import ExecutorSpec, Footprint, SharedTensors
from agent.deployment.performance_matrix import core_share, families, load_time_s, matrix, unmeasured
from agent.device_profile.records import LinkSpeed
from agent.runtime.expert_copy import ExpertCopy
from agent.runtime.machine.box import Box, MemorySize, threads_per_executor
from experts.expert import Expert, InputSpec
from experts.packed.weights import SLOT_QUANTUM_BYTES, PackedExpert, Segment
from tests.profiler.lines import box_of, kind_of, profile_of

UNIT = SLOT_QUANTUM_BYTES
BOX = Box("cuda", "RTX", ("cuda", "cpu"), 8, MemorySize(16, 16), MemorySize(12, 12), (("torch", "2"),))


def kind(processor="cpu", precision="fp32", **changes):
    times = {"threads": 8, "K_s": 0.01, "B_s": 0.002, "max_batch": 6, "load_s": {"ssd": 0.5, "host": 0.2}}
    sizes = {"weight_bytes": 10 * UNIT, "workspace_base_bytes": 7, "workspace_bytes": 5}
    given = {"architecture": "resnet18", "processor": processor} | times | sizes | changes
    return kind_of("resnet18 64x64 imagenet", precision, **given)


def profile(*kinds, speedups=None):
    links = (LinkSpeed("ssd", 100.0 * UNIT), LinkSpeed("host", 1000.0 * UNIT))
    return profile_of(box=box_of(cores=8), links=links, kinds=kinds, speedups=speedups or {})


def copy(name="cls/a", precision="fp32", units=10, shared=(), **changes):
    expert = replace(Expert(name, "resnet18", Path("w"), ("ok",), InputSpec(64, 64)), **changes)
    parts = tuple(Segment(part, size * UNIT, ()) for part, size in shared)
    packed = PackedExpert(name, expert.architecture, precision, "", "", Segment(name, units * UNIT, ()), parts)
    return ExpertCopy(f"{name}@{precision}", expert, packed)


def executors(**counts):
    listed = [name for name, count in counts.items() for _ in range(count)]
    return [ExecutorSpec(number, name, BOX.pool_of(name)) for number, name in enumerate(listed)]


def test_expert_takes_its_kinds_times_and_its_own_bytes():
    copies = {"cuda": [copy(precision="bf16", shared=(("trunk", 4),))], "cpu": [copy()]}
    found = matrix(profile(kind("cuda", "bf16", K_s=0.001), kind()), BOX, copies, {"cls/a": 0.5})
    assert found.usage == {"cls/a": 0.5}
    on_cuda, on_cpu = found.experts["cuda"]["cls/a"], found.experts["cpu"]["cls/a"]
    assert (on_cuda.copy, on_cpu.copy) == ("cls/a@bf16", "cls/a@fp32")
    assert on_cuda.footprint == Footprint(10 * UNIT, (SharedTensors("trunk", 4 * UNIT),))
    assert (on_cuda.performance.K_s, on_cpu.performance.K_s) == (0.001, 0.01)
    assert on_cpu.performance.latency_s(6) == pytest.approx(0.062)
    assert (on_cpu.performance.max_batch, on_cpu.performance.workspace_for(2)) == (6, 17)
    assert on_cuda.load_s.keys() == {"ssd", "host"}
    assert on_cpu.load_s.keys() == {"ssd"}


def test_unmeasured_expert_has_no_row_but_a_reason():
    copies = {"cpu": [copy(), copy("cls/wide", input=InputSpec(96, 96)), copy("cls/half", "bf16")], "cuda": [copy()]}
    found = matrix(profile(kind()), BOX, copies, {})
    assert {processor: list(column) for processor, column in found.experts.items()} == {"cpu": ["cls/a"], "cuda": []}
    kinds = {each.expert.id: each.kind for listed in copies.values() for each in listed}
    reasons = unmeasured(found, kinds)
    assert reasons.keys() == {"cls/wide", "cls/half"}
    assert "resnet18 96x96 imagenet" in reasons["cls/wide"]


def test_load_time_is_the_measured_one_scaled_to_the_experts_bytes():
    """0.5 s for 10 units over a link of 100 units/s: 0.4 s are not the link's."""
    links = {"ssd": 100.0 * UNIT}
    assert load_time_s(kind(), "ssd", Footprint(10 * UNIT), links) == pytest.approx(0.5)
    assert load_time_s(kind(), "ssd", Footprint(30 * UNIT), links) == pytest.approx(0.7)
    assert load_time_s(kind(load_s={"ssd": 0.05}), "ssd", Footprint(30 * UNIT), links) == pytest.approx(0.3)
    assert load_time_s(kind(load_s={}), "ssd", Footprint(30 * UNIT), links) == pytest.approx(0.3)
    assert load_time_s(kind(), "ssd", Footprint(20 * UNIT), {}) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="neither"):
        load_time_s(kind(load_s={}), "host", Footprint(UNIT), links)


def test_cpu_executors_that_share_the_cores_take_longer():
    stored = profile(kind(), speedups={"cpu": (1.0, 1.6)})
    assert core_share(stored, kind(), executors(cpu=1)) == 1.0
    assert core_share(stored, kind(), executors(cpu=2)) == pytest.approx(2 / 1.6)
    assert core_share(stored, kind(), executors(cpu=4)) == pytest.approx(4 / 1.6)
    assert core_share(stored, kind(), executors(cuda=3, cpu=1)) == 1.0
    found = matrix(stored, BOX, {"cpu": [copy()]}, {}, executors(cpu=2))
    assert found.experts["cpu"]["cls/a"].performance.K_s == pytest.approx(0.0125)
    assert found.experts["cpu"]["cls/a"].performance.B_s == pytest.approx(0.0025)
    halved = kind(threads=4)  # measured as one of two executors
    assert core_share(stored, halved, executors(cpu=2)) == 1.0
    assert core_share(stored, halved, executors(cpu=1)) == pytest.approx(1.6 / 2)


def test_executors_on_one_gpu_slow_down_and_cpu_executors_do_not_count():
    stored = profile(speedups={"cuda": (1.0, 1.2)})
    assert core_share(stored, kind("cuda"), executors(cuda=1, cpu=1)) == 1.0
    assert core_share(stored, kind("cuda"), executors(cuda=3, cpu=1)) == pytest.approx(3 / 1.2)
    assert core_share(profile(), kind("cuda"), executors(cuda=3)) == 3.0


@pytest.mark.parametrize(
    ("counts", "threads"), [({"cpu": 2}, 4), ({"cuda": 3, "cpu": 1}, 5), ({"cuda": 9, "cpu": 1}, 1), ({"cuda": 3}, 8)]
)
def test_cpu_executors_leave_a_core_to_each_executor_of_a_device(counts, threads):
    assert threads_per_executor(BOX, executors(**counts)) == threads


@given(st.lists(st.floats(0.5, 8), min_size=1, max_size=6), st.integers(1, 8), st.integers(1, 8))
def test_core_share_is_reversible(speedups, then, now):
    stored = profile(speedups={"cpu": tuple(speedups)})
    there = core_share(stored, kind(threads=8 // then), executors(cpu=now))
    back = core_share(stored, kind(threads=8 // now), executors(cpu=8 // (8 // then)))
    if 8 // (8 // now) == now:
        assert there * back == pytest.approx(1)


def text(name, *shared, precision="bf16", **changes):
    return copy(name, precision, 1, shared, **{"architecture": "llm", "input": None} | changes)


def test_families_are_language_models_that_share_a_segment():
    trunk, tail = ("trunk", 100), ("tail", 10)
    found = families([text("a", trunk), text("b", trunk), text("c", tail), text("d")])
    assert found.keys() == {"a@bf16", "b@bf16"}
    assert len(set(found.values())) == 1
    for other in ({"precision": "fp32"}, {"architecture": "resnet18", "input": InputSpec(8, 8)}):
        assert families([text("a", trunk), text("b", trunk, **other)]) == {}
