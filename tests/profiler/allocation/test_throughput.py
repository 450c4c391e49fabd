"""The sample of requests, and searches over real sources of throughput: the simulator, and an agent that runs."""

import itertools
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.core.performance import SSD, ExecutorSpec, PoolSpec
from agent.deployment.build import pack
from agent.deployment.deployment import planned
from agent.deployment.memory_split import casual_allocation
from agent.deployment.packed_copies import packed_manifests
from agent.device_profile.identity import identity_of
from agent.device_profile.records import LinkSpeed, UsageOrigin, UsageProfile
from agent.faults.errors import SampleUnfit
from agent.runtime.expert_copy import kind_name
from agent.runtime.machine.box import Box, MemorySize
from agent.runtime.machine.detection import detect
from agent.runtime.weights.drive import staging_bytes
from experts.errors import ConfigError
from experts.expert import Precision
from experts.packed.weights import SegmentStore
from profiler.allocation.search import SearchOptions
from profiler.allocation.step import AllocationStep
from profiler.allocation.throughput import (
    device_matrix,
    engine_throughput,
    sample_requests,
)
from profiler.usage import computed_usage
from profiler.workload.samples import LineSamples
from tests.profiler.lines import fakes, kind_of, profile_of, write_line

KIB = 1024
EXPERTS = 30
OWN_BYTES, WORKSPACE_BYTES = 64 * KIB, 48 * KIB
SIZE = MemorySize(10**9, 10**9)
SPLIT = Box("cuda", "made up", ("cuda", "cpu"), 4, SIZE, SIZE, ())


def line_in(folder, experts=EXPERTS, **changes):
    """Fakes, the first component the most frequent, every third one with a detector after its classifier."""
    document = fakes(experts + 1)
    detector = f"cls/f{experts}"
    del document["routes"][f"c{experts}"]
    for number in range(0, experts, 3):
        document["routes"][f"c{number}"].append({"expert": detector, "pass": ["ok"]})
    quantities = {f"c{number}": max(round(200 * 0.8**number), 1) for number in range(experts)}
    document |= {"boards": {"one": {"components": quantities}}} | changes
    return write_line(folder, document, weight_bytes=OWN_BYTES, workspace_bytes=WORKSPACE_BYTES)


def packed_line(folder, **changes):
    config = line_in(folder, **changes)
    precisions = {"cpu": dict.fromkeys(config.catalog.experts, Precision.FP32)}
    with closing(SegmentStore(config.packed_folder)) as segments:
        pack(config, segments, precisions, lambda *_: None)
    return config


def stored(config, box, rates=None):
    """Every kind on every processor: 2 ms an image, 4 ms a batch, at most 8; loads of 20 ms from the SSD."""
    packed = next(iter(packed_manifests(config)["cls/f0"])).packed
    kind = kind_of(
        kind_name(config.catalog.experts["cls/f0"], packed.program_sha256),
        threads=box.cores,
        B_s=0.004,
        max_batch=8,
        weight_bytes=OWN_BYTES,
        workspace_bytes=WORKSPACE_BYTES,
        load_s={SSD: 0.02, "host": 0.005},
    )
    return profile_of(
        box=identity_of(box),
        links=(LinkSpeed(SSD, 5e6), LinkSpeed("host", 2e7)),
        kinds=tuple(replace(kind, processor=name, K_s=0.002 if name == "cuda" else 0.008) for name in box.processors),
        usage=computed_usage(config, rates),
        allocation=casual_allocation(box, {}),
    )


def every(interval_s, trace):
    return tuple(replace(arrival, at_s=interval_s * number) for number, arrival in enumerate(trace))


@settings(max_examples=40)
@given(st.integers(1, 300), st.lists(st.integers(1, 1000), min_size=1, max_size=9))
def test_sample_deviates_by_less_than_one_request_per_component(tmp_path_factory, count, quantities):
    folder = tmp_path_factory.mktemp("line")
    components = {f"c{number}": quantity for number, quantity in enumerate(quantities)}
    config = line_in(folder, experts=len(quantities), boards={"one": {"components": components}})
    drawn = Counter(arrival.component for arrival in sample_requests(config, count))
    assert drawn.total() == count
    for component, quantity in components.items():
        assert abs(drawn[component] - count * quantity / sum(quantities)) < 1 + 1e-6


def test_sample_takes_images_in_turn_and_leaves_out_unservable_ones(tmp_path):
    config = line_in(tmp_path, experts=3, boards={"one": {"components": {"c0": 1, "c1": 1, "c2": 1}}})
    images = {"c1": [Path("a.png"), Path("b.png")], "c2": []}
    sample = sample_requests(config, 9, images=images)
    assert [each.image for each in sample if each.component == "c1"] == [Path("a.png"), Path("b.png"), Path("a.png")]
    assert {each.image for each in sample if each.component != "c1"} == {None}
    endless = itertools.count()
    sample_requests(config, 9, images={"c1": endless})
    assert next(endless) == 3
    without = sample_requests(config, 9, without={"cls/f3": "broken"})
    assert {each.component for each in without} == {"c1", "c2"}
    with pytest.raises(ConfigError, match=r"every route has an expert that cannot be served.*\n  - cls/f0: broken\n"):
        sample_requests(config, 9, without=dict.fromkeys(config.catalog.experts, "broken"))


def drawn(config, probabilities, requests=999, count=1000):
    """How often each component is drawn by this usage."""
    usage = UsageProfile(probabilities, {}, UsageOrigin.SERVED, requests)
    return Counter(arrival.component for arrival in sample_requests(config, count, usage=usage))


def test_sample_by_served_usage_follows_it_and_not_the_boards(tmp_path):
    """An expert without a record: one request beside 9, over three routes; and never above the rarest with a record."""
    config = line_in(tmp_path, experts=3, boards={"one": {"components": {"c0": 5, "c1": 3, "c2": 2}}})
    assert drawn(config, {"cls/f0": 0.1, "cls/f1": 0.2, "cls/f2": 0.7}) == {"c0": 100, "c1": 200, "c2": 700}
    few = drawn(config, {"cls/f0": 0.5, "cls/f1": 0.5}, requests=9, count=3100)
    assert few["c2"] in {100, 101}
    rare = drawn(config, {"cls/f0": 0.99, "cls/f1": 0.01, "cls/f2": 0.0}, requests=9, count=1010)
    assert rare["c2"] == rare["c1"] == 10


def simulated(config, box, profile, trace):
    return AllocationStep(config, box, LineSamples(), None, {}, SearchOptions()).simulated(profile, trace)


def test_simulated_search_leads_from_a_profile_to_an_allocation(tmp_path):
    """12 of 31 experts fit beside two images: more executors and larger batches cost experts."""
    config = packed_line(tmp_path, memory={"host": "4MiB", "device": "1MiB"})
    profile = stored(config, SPLIT)
    trace = every(0.0005, sample_requests(config, 300))
    found = simulated(config, SPLIT, profile, trace)
    assert found == simulated(config, SPLIT, profile, trace)
    slower = every(1.0, trace)  # would measure the clock, and is played faster
    assert simulated(config, SPLIT, profile, slower).images_per_s == pytest.approx(found.images_per_s, rel=0.2)
    assert found.allocation.origin == "searched in simulation"
    assert dict(found.allocation.budget_bytes) == {"host": 4 * 2**20 - staging_bytes(4 * 2**20), "device": 2**20}
    assert "memory:device" in {trial.search for trial in found.trials}
    tried = [trial.images_per_s for trial in found.trials if trial.search == "executors"]
    assert found.images_per_s >= max(tried)
    plan = planned(config, SPLIT, replace(profile, allocation=found.allocation))
    assert [(pool.name, pool.expert_bytes, pool.workspace_bytes) for pool in plan.pools] == [
        (pool.pool, pool.expert_bytes, pool.workspace_bytes) for pool in found.allocation.pools
    ]
    assert Counter(spec.processor for spec in plan.executors) == Counter(dict(found.allocation.executors))


def test_only_profiled_and_allowed_processors_are_searched(tmp_path):
    config = packed_line(tmp_path, experts=2, boards={})
    profile = stored(config, SPLIT)
    assert set(device_matrix(config, SPLIT, profile).experts) == {"cuda", "cpu"}
    no_cpu = replace(profile, kinds=tuple(kind for kind in profile.kinds if kind.processor != "cpu"))
    assert set(device_matrix(config, SPLIT, no_cpu).experts) == {"cuda"}
    only_cpu = config.having(executors={"cpu": 1, "cuda": 0})
    assert set(device_matrix(only_cpu, SPLIT, profile).experts) == {"cpu"}
    with pytest.raises(ConfigError, match="the device profile has no times on cpu - run `coserve profile` again"):
        device_matrix(only_cpu, SPLIT, no_cpu)


ONE_EXECUTOR = (ExecutorSpec(0, "cpu", "host"),)


def refusal(config, trace):
    """Why a sample measures nothing on one executor."""
    pools = (PoolSpec("host", 512 * KIB, 512 * KIB),)
    with pytest.raises(SampleUnfit) as caught:
        engine_throughput(config, stored(config, detect("cpu")), trace)(ONE_EXECUTOR, pools)
    return caught.value


def test_unjudged_requests_refuse_the_throughput_and_name_each_expert(tmp_path):
    config = packed_line(tmp_path, experts=3, device="cpu", memory={"host": "1MiB"}, boards={})
    damaged = {}
    for name in ("cls/f0", "cls/f2"):
        (manifest,) = packed_manifests(config)[name]
        path = config.state / "packed" / "segments" / f"{manifest.packed.own.sha256}.bin"
        path.write_bytes(b"0" * path.stat().st_size)
        anew = f"start again, and it is packed again from {config.catalog.experts[name].weights}"
        damaged[name] = f"{path} was not what was packed and has been removed: {anew}"
    found = refusal(config, sample_requests(config, 6))
    assert str(found).startswith("4 of 6 sample requests were not judged: ")
    assert (found.experts, found.images) == (damaged, {})


def test_unreadable_sample_image_is_named_and_blamed_on_no_expert(tmp_path):
    config = packed_line(tmp_path, experts=1, device="cpu", memory={"host": "1MiB"}, boards={})
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    found = refusal(config, sample_requests(config, 3, images={"c0": [broken]}))
    assert found.experts == {}
    assert list(found.images) == [broken]
    assert "broken.png" in str(found)
