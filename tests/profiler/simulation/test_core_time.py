"""The cores' time: by hand, monotone, and no Engine under virtual time runs more than the cores allow."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.performance import SSD, Performance, PoolSpec
from agent.core.request import Work
from profiler.simulation.bounds import RequestSteps
from profiler.simulation.core_time import CoreTime, compute_core_s, core_time
from tests.profiler.lines import arrivals, row, setup_of, simulator
from tests.profiler.lines import resources as resources_of

SECONDS = st.floats(1e-4, 1.0)
POOLS = (PoolSpec("host", 1_000, 1_000),)


def line(performances, *processors, **more):
    """``performances[processor][expert]``; an executor for each processor named."""
    columns = {
        processor: {name: row(name, each, load_s=1e-6) for name, each in column.items()}
        for processor, column in performances.items()
    }
    return setup_of(columns, processors, POOLS, **more)


def resources(performances, *processors):
    return resources_of(line(performances, *processors))


def of(K_s, B_s=0.0, max_batch=4):
    return Performance(K_s, B_s, max_batch, 0)


def requests(*experts):
    return [RequestSteps(0.0, tuple(steps)) for steps in experts]


def test_photographs_on_two_cores_equal_a_case_by_hand():
    """As measured: one image takes 129 ms to decode, and 62 ms of both cores to compute: 253 ms of one core."""
    found = core_time(requests(*[["a"]] * 100), resources({"cpu": {"a": of(0.062)}}, "cpu"), 2, 100 * 0.129)
    assert found.decoding_share == pytest.approx(0.129 / 0.253)
    assert found.images_per_s == pytest.approx(2 / 0.253)
    assert replace(found, cores=3).images_per_s == pytest.approx(3 / 0.253)
    assert replace(found, decoding_s=0.0).images_per_s == pytest.approx(1 / 0.062)


def test_every_step_is_computed_on_its_executors_share_of_the_cores():
    """Five of a in batches of 4 and 1, two of b; two executors on four cores have two each, on one a half."""
    asked = requests("a", "a", "a", "ab", "ab")
    given_ = resources({"cpu": {"a": of(0.01, 0.02), "b": of(0.1)}}, "cpu", "cpu")
    assert compute_core_s(asked, given_, 4) == pytest.approx(2 * (5 * 0.01 + 2 * 0.02 + 2 * 0.1))
    assert compute_core_s(asked, given_, 1) == pytest.approx((5 * 0.01 + 2 * 0.02 + 2 * 0.1) / 2)


def test_accelerator_takes_no_core_time_and_an_emulated_one_does():
    columns = {name: {"a": of(0.01)} for name in ("cuda", "cpu", "emulated")}
    asked = requests(*["a"] * 10)
    assert compute_core_s(asked, resources(columns, "cuda"), 8) == 0.0
    assert compute_core_s(asked, resources(columns, "cuda", "cpu"), 8) == 0.0
    assert compute_core_s(asked, resources(columns, "emulated"), 8) == pytest.approx(8 * 0.1)
    on_cpu_alone = resources(columns | {"cuda": {}}, "cuda", "cpu")
    assert compute_core_s(asked, on_cpu_alone, 8) == pytest.approx(8 * 0.1)


def test_texts_take_core_time_by_their_tokens():
    performance = Performance(0.0, 0.01, 4, 0, K_prompt_s=0.001, K_output_s=0.02, lease_bytes=1)
    asked = [RequestSteps(0.0, ("t",), Work(30, 5)), RequestSteps(0.0, ("t",), Work(10, 5))]
    assert compute_core_s(asked, resources({"cpu": {"t": performance}}, "cpu"), 2) == pytest.approx(
        2 * (0.01 + 40 * 0.001 + 10 * 0.02)
    )


def test_no_work_has_no_core_limit():
    nothing = CoreTime(2, 0, 0.0, 0.0)
    assert (nothing.images_per_s, nothing.decoding_share) == (math.inf, 0.0)


@given(st.integers(1, 64), st.integers(1, 1000), SECONDS, SECONDS, st.floats(1.0, 10.0))
def test_core_limit_falls_with_decoding_and_rises_with_cores(cores, count, decoding_s, compute_s, factor):
    found = CoreTime(cores, count, decoding_s, compute_s)
    slower = replace(found, decoding_s=factor * decoding_s)
    assert slower.images_per_s <= found.images_per_s <= replace(found, cores=cores + 1).images_per_s
    assert found.images_per_s <= count * cores / max(decoding_s, compute_s)
    assert 0.0 <= found.decoding_share <= slower.decoding_share <= 1.0


@given(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=30),
    st.lists(st.builds(of, SECONDS, SECONDS, st.integers(1, 4)), min_size=3, max_size=3),
    st.integers(1, 3),
    st.integers(1, 8),
    st.sampled_from(["coserve", "paper", "samba"]),
)
def test_no_policy_runs_more_than_the_cores_allow(experts, performances, executors, cores, policy):
    column = dict(zip("abc", performances, strict=True))
    setup = line({"cpu": column}, *["cpu"] * min(executors, cores), policy=policy)
    run = simulator(setup, link_bytes_per_s={SSD: 1e9}, speedups={}, check_every_step=False)
    finished_s = run.run(arrivals(experts)).finished_s
    allowed = core_time(requests(*experts), resources_of(setup), cores, 0.0)
    assert len(experts) / max(finished_s.values()) <= allowed.images_per_s * (1 + 1e-9)
