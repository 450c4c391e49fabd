"""The paper's devices, tasks A1 to B2, and every system of the evaluation on a small board: each request is judged."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import BaseModel

from agent.core.performance import SSD
from agent.core.policy import PRESETS
from experts.errors import ConfigError
from proof.paper.devices import Constant, read_device
from proof.paper.systems import (
    Loading,
    System,
    device_profile,
    executor_specs,
    most_experts,
    pool_specs,
    simulate,
)
from proof.paper.tasks import (
    CLASSIFIER,
    DETECTORS,
    DETECTORS_OF_EACH,
    INTERVAL_S,
    PASS_RATE,
    TASKS,
    PaperBoard,
    paper_task,
    sample_of,
    task_of,
)

FOLDER = Path(__file__).parents[3] / "configs" / "devices"
NUMA, UMA = read_device(FOLDER / "numa-rtx3080ti.yaml"), read_device(FOLDER / "uma-apple-m2.yaml")
TASK = task_of(PaperBoard("T", 150, seed=5), 150, "T")
SMALL = System("paper", "paper", {"gpu": 2, "cpu": 1})
GIB = 2**30
NUMA_FILE, UMA_FILE = FOLDER / "numa-rtx3080ti.yaml", FOLDER / "uma-apple-m2.yaml"


def pools(system, device):
    return {pool.name: pool for pool in pool_specs(system, device, TASK, executor_specs(system, device))}


@pytest.mark.parametrize("device", [NUMA, UMA], ids=["numa", "uma"])
@pytest.mark.parametrize("policy", sorted(PRESETS))
def test_every_policy_runs_on_every_device(policy, device):
    row = simulate(replace(SMALL, name=policy, policy=policy), device, TASK)
    assert (row.task, row.device, row.policy, row.roofline_fraction) == ("T", device.device, policy, None)
    assert row.images_per_s == pytest.approx(150 / row.seconds)
    assert row.seconds >= TASK.trace[-1].at_s
    assert 0 <= row.switches <= row.loads
    assert row.batches > 0


@pytest.mark.parametrize("device", [NUMA, UMA], ids=["numa", "uma"])
@pytest.mark.parametrize("loading", list(Loading))
def test_no_system_beats_its_floor(loading, device):
    for policy in ("samba", "coserve"):
        row = simulate(replace(SMALL, policy=policy, loading=loading), device, TASK, with_roofline=True)
        assert 0.0 < row.images_per_s <= row.roofline_images_per_s
        assert row.roofline_fraction == pytest.approx(row.images_per_s / row.roofline_images_per_s)


def test_memories_are_split_as_in_the_paper():
    """Device: 12 GiB less a quarter of a GiB for the system, and half a GiB for each of two GPU executors; 75 to 25.

    Host: 16 GiB less 4 for the system and half a GiB for the executor; five images of 89 MB, and experts get the rest.
    """
    room, split = 12 * GIB - GIB // 4 - 2 * GIB // 2, pools(SMALL, NUMA)
    device, host = split["device"], split["host"]
    assert (device.expert_bytes, device.workspace_bytes) == (int(room * 0.75), room - int(room * 0.75))
    assert device.cache == "host"
    assert host.workspace_bytes == 5 * 89_000_000
    assert host.expert_bytes == 16 * GIB - 4 * GIB - GIB // 2 - host.workspace_bytes
    (unified,) = pools(replace(SMALL, expert_fraction=None), UMA).values()
    assert unified.workspace_bytes == (2 * 6 + 5) * 89_000_000  # the most that batches can use


def test_most_experts_just_fit():
    most = most_experts(SMALL, NUMA, TASK)
    assert pools(replace(SMALL, experts=most), NUMA)["device"].workspace_bytes >= 2 * 267_000_000
    with pytest.raises(ConfigError, match="take fewer of either"):
        pools(replace(SMALL, experts=most + 1), NUMA)


def test_samba_coe_has_one_executor_and_its_parallel_form_all():
    assert len(executor_specs(replace(SMALL, policy="samba"), NUMA)) == 1
    assert simulate(replace(SMALL, policy="samba"), NUMA, TASK).executors == {"gpu": 1}
    parallel = executor_specs(replace(SMALL, policy="samba-parallel"), NUMA)
    assert [(spec.processor, spec.pool) for spec in parallel] == [("gpu", "device"), ("gpu", "device"), ("cpu", "host")]


def expert_of(architecture):
    return next(expert for expert, kind in TASK.architectures.items() if kind == architecture)


def test_framework_loads_into_a_gpu_over_the_host():
    """0.9 s from the SSD in all, 0.06 s of them from the host's memory; the CPU's form is there after the first leg."""
    columns = device_profile(NUMA, TASK, Loading.FRAMEWORK).experts
    expert = expert_of("resnet101")
    assert columns["gpu"][expert].load_s == pytest.approx({SSD: 0.9, "host": 0.06})
    assert columns["cpu"][expert].load_s == pytest.approx({SSD: 0.84})
    assert columns["gpu"][expert].copy == columns["cpu"][expert].copy


def test_packed_weights_load_in_the_time_of_the_links():
    numa = device_profile(NUMA, TASK, Loading.PACKED).experts["gpu"][expert_of("resnet101")]
    assert numa.load_s == pytest.approx({SSD: 178 / 530, "host": 0.178 / 12})
    uma = device_profile(UMA, TASK, Loading.PACKED).experts
    expert = expert_of("yolov5m")
    assert uma["gpu"][expert].load_s == pytest.approx({SSD: 84.8 / 3000})
    assert uma["gpu"][expert].copy == uma["cpu"][expert].copy


def test_framework_keeps_forms_of_one_expert_apart_in_unified_memory():
    columns = device_profile(UMA, TASK, Loading.FRAMEWORK).experts
    expert = expert_of("yolov5l")
    assert columns["gpu"][expert].copy != columns["cpu"][expert].copy
    assert columns["gpu"][expert].load_s == pytest.approx({SSD: 0.94})


@pytest.mark.parametrize(
    ("name", "types", "requests"), [("A1", 352, 2500), ("A2", 352, 3500), ("B1", 342, 2500), ("B2", 342, 3500)]
)
def test_task_is_as_in_section_5_1(name, types, requests):
    task = paper_task(name)
    kinds = Counter(task.architectures.values())
    assert len(task.graph.routes) == kinds[CLASSIFIER] == types
    assert len(task.trace) == requests
    assert [arrival.at_s for arrival in task.trace[:3]] == pytest.approx([0.0, 0.004, 0.008])
    assert task.trace[-1].at_s == pytest.approx((requests - 1) * INTERVAL_S)
    assert {arrival.component for arrival in task.trace} <= set(task.graph.routes)
    assert set(kinds) == {CLASSIFIER, *DETECTORS}
    first = {steps[0].expert for steps in task.graph.routes.values()}
    after = Counter(steps[1].expert for steps in task.graph.routes.values() if len(steps) == 2)
    assert (len(first), len(after)) == (types, len(DETECTORS) * DETECTORS_OF_EACH)
    assert min(after.values()) > 1  # detectors are shared, and come after a classifier
    assert not first & set(after)


def test_task_is_reproducible_and_its_sample_another_one():
    assert TASKS == ("A1", "A2", "B1", "B2")
    first, again = paper_task("B1"), paper_task("B1")
    assert (first.trace, first.passes, first.usage) == (again.trace, again.passes, again.usage)
    assert first.trace == paper_task("B2").trace[:2500]
    sample = sample_of("B", 2500)
    assert (sample.usage, sample.architectures) == (first.usage, first.architectures)
    assert sample.trace != first.trace


def test_usage_follows_the_quantities_and_the_pass_rate():
    """All classifiers together are used once a request, all detectors as often as what leads to them passes."""
    task = task_of(PaperBoard("T", 9, seed=3), 4000, "T")
    classifiers = [expert for expert, kind in task.architectures.items() if kind == CLASSIFIER]
    assert sum(task.usage[expert] for expert in classifiers) == pytest.approx(1.0)
    for steps in task.graph.routes.values():
        if len(steps) == 2:
            assert task.usage[steps[1].expert] == pytest.approx(PASS_RATE * task.usage[steps[0].expert])
    counted = Counter(arrival.component for arrival in task.trace)
    for component, steps in task.graph.routes.items():
        assert counted[component] / 4000 == pytest.approx(task.usage[steps[0].expert], abs=0.03)


def test_classifier_passes_at_the_tasks_rate_and_a_detector_everything():
    task = paper_task("A1")
    assert sum(task.passes) / len(task.passes) == pytest.approx(PASS_RATE, abs=0.02)
    component = next(steps for steps in task.graph.routes.values() if len(steps) == 2)
    rejected = task.passes.index(False)
    assert task.predict(rejected, component[0].expert).label not in component[0].passing
    assert task.predict(rejected, component[1].expert).label in component[1].passing


def constants(value, path=""):
    """Each with its key."""
    if isinstance(value, Constant):
        yield path, value
    elif isinstance(value, BaseModel | dict):
        for key, below in dict(value).items():
            yield from constants(below, f"{path}.{key}")


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_constant_names_its_source(file):
    found = dict(constants(read_device(file)))
    assert len(found) > 30
    for key, constant in found.items():
        if constant.source == "not in the paper":
            assert constant.derived.startswith("assumed"), key
        else:
            assert any(word in constant.source for word in ("Section", "Table", "Figure")), key
            assert constant.derived, key


def test_device_files_hold_the_papers_values():
    numa, uma = read_device(NUMA_FILE), read_device(UMA_FILE)
    assert (numa.links.ssd_bytes_per_s.value, uma.links.ssd_bytes_per_s.value) == (530e6, 3000e6)
    resnet = uma.architectures["resnet101"]
    assert (resnet.gpu.max_batch.value, resnet.cpu.max_batch.value) == (6, 5)
    resnet = numa.architectures["resnet101"]
    assert resnet.weight_bytes.value == 44.5e6 * 4
    assert resnet.gpu.workspace_bytes.value == 1.5 * resnet.weight_bytes.value
    assert numa.usable_bytes("device") < 12 * 2**30
    assert (numa.pools, uma.pools) == (("host", "device"), ("host",))
    assert (numa.pool_of("gpu"), numa.pool_of("cpu"), uma.pool_of("gpu")) == ("device", "host", "host")


@pytest.mark.parametrize("file", [NUMA_FILE, UMA_FILE], ids=["numa", "uma"])
def test_shares_of_figure_1_hold(file):
    """From SSD, over 90 % of one image's latency is the switch; from host memory, 60 % at least."""
    for architecture in read_device(file).architectures.values():
        image_s = architecture.gpu.K_s.value + architecture.gpu.B_s.value
        assert image_s <= 0.040 + 1e-9
        load = architecture.framework_load_s
        assert load.ssd.value / (load.ssd.value + image_s) > 0.9
    host = read_device(NUMA_FILE).architectures["resnet101"].framework_load_s.host
    assert host is not None
    assert host.value / (host.value + 0.040) >= 0.6 - 1e-9


@pytest.mark.parametrize(
    ("written", "instead", "said"),
    [
        ("  source: \"Table 1: Apple M2\"\n  derived: an M2", "  derived: an M2", "cores.source: is missing"),
        ("    value: 3000e6", "    value: -1", "links.ssd_bytes_per_s.value"),
        ("layout: unified", "layout: split", "memories.device"),
        ("device: uma", "device: uma\ndevise: uma", "unknown key - did you mean 'device'"),
        ("      value: 8589934592", "      value: 25769803776", "the system takes all of it"),
        ("      value: [1.0, 1.075]", "      value: []", "processors.gpu.speedups.value"),
        ("        value: 6\n", "        value: 6.5\n", "max_batch.value"),
    ],
)  # fmt: skip
def test_impossible_device_file_is_refused(tmp_path, written, instead, said):
    text = UMA_FILE.read_text()
    assert written in text
    file = tmp_path / "broken.yaml"
    file.write_text(text.replace(written, instead, 1))
    with pytest.raises(ConfigError) as refused:
        read_device(file)
    assert said in str(refused.value)
    assert f"{file}:" in str(refused.value)
