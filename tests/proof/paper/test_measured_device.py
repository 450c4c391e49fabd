"""A box's profile as a device of the paper's tasks: constants by hand, and what is said of a profile without them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agent.core.performance import SSD
from agent.device_profile.records import (
    Allocation,
    BatchTimes,
    BoxIdentity,
    KindProfile,
    LinkSpeed,
    PoolAllocation,
    UsageProfile,
)
from agent.device_profile.store import ProfileDraft, read_profile
from experts.errors import ConfigError
from proof.paper.measured_device import INSTEAD, device_of
from proof.paper.systems import Loading, System, device_profile, simulate
from proof.paper.task_devices import task_device
from proof.paper.tasks import PaperBoard, task_of
from tests.proof.paper.constants import constants

GIB = 2**30
CUDA = BoxIdentity("cuda", "RTX", ("cuda", "cpu"), 8, 32 * GIB, 16 * GIB, {"torch": "2.15.0"})
JETSON = replace(CUDA, device="jetson", model="Orin", device_bytes=None)
CPU_ONLY = BoxIdentity("cpu", "EPYC", ("cpu",), 2, 16 * GIB, None, {"torch": "2.15.0"})
LINKS = (LinkSpeed(SSD, 2e9), LinkSpeed("host", 1e10))
SPEEDUPS = {"cuda": (1.0, 1.3, 1.4)}
NUMBERS = {"resnet101": (178_000_000, 0.02), "yolov5m": (85_000_000, 0.03), "yolov5l": (187_000_000, 0.05)}
TASK = task_of(PaperBoard("T", 60, seed=5), 80, "T")


def kind_on(processor, architecture, px=224, **changed):
    """One kind; on a CPU ten times as slow, in fp32 there and in bf16 on the accelerator, and half as large."""
    weight_bytes, image_s = NUMBERS[architecture]
    is_cpu = processor == "cpu"
    kind = KindProfile(
        kind=f"{architecture} {px}x{px} unit",
        architecture=architecture,
        processor=processor,
        precision="fp32" if is_cpu else "bf16",
        threads=8,
        K_s=image_s * (10 if is_cpu else 1),
        B_s=0.01,
        fit_error=0.01,
        max_batch=4 if is_cpu else 16,
        weight_bytes=weight_bytes if is_cpu else weight_bytes // 2,
        workspace_base_bytes=16_000_001,
        workspace_bytes=40_000_000,
        load_s={SSD: weight_bytes / 2e9} if is_cpu else {SSD: weight_bytes / 1.5e9, "host": weight_bytes / 1e10},
        batches=(BatchTimes(1, (0.1,), 1),),
        samples="synthetic",
    )
    return replace(kind, **changed)


BOTH = tuple(kind_on(processor, architecture) for architecture in NUMBERS for processor in ("cuda", "cpu"))


def written(folder, box=CUDA, kinds=BOTH, links=LINKS, chosen=None, budgets=None):
    """A finished profile's file."""
    budgets = budgets or {"host": 20 * GIB, "device": 14 * GIB}
    pools = tuple(PoolAllocation(pool, size // 2, size - size // 2, 9) for pool, size in budgets.items())
    file = folder / "profile.db"
    with ProfileDraft.open(file, "line", box) as draft:
        draft.save_links(links)
        for kind in kinds:
            draft.save_kind(kind)
        for processor, factors in SPEEDUPS.items():
            draft.save_speedups(processor, factors)
        draft.save_precisions(chosen or {(kind.kind, kind.processor): kind.precision for kind in kinds})
        draft.save_packed({("cls/a", "fp32"): "aa"})
        draft.save_usage(UsageProfile({"cls/a": 1.0}, {}, "computed from quantities"))
        draft.save_allocation(Allocation("casual", budgets, pools, {box.processors[0]: 1}))
        draft.finish()
    return file


def device_in(file):
    return device_of(read_profile(file), file)


def refused(file):
    with pytest.raises(ConfigError) as error:
        device_in(file)
    assert str(error.value).startswith(f"{file}: ")
    return str(error.value)


def test_a_split_box_stands_in_the_place_of_the_papers(tmp_path):
    device = device_in(written(tmp_path))
    assert (device.device, device.name, device.layout, device.cores.value) == ("cuda", "RTX", "split", 8)
    assert (device.usable_bytes("host"), device.usable_bytes("device")) == (20 * GIB, 14 * GIB)
    assert device.memories.host.size_bytes.value == 32 * GIB
    assert (device.links.ssd_bytes_per_s.value, device.links.host_bytes_per_s.value) == (2e9, 1e10)
    assert device.processor("gpu").speedups.value == (1.0, 1.3, 1.4)
    assert device.processor("cpu").speedups.value == (1.0,)
    resnet = device.architectures["resnet101"]
    assert resnet.weight_bytes.value == 178_000_000
    assert (resnet.gpu.K_s.value, resnet.gpu.B_s.value, resnet.gpu.max_batch.value) == (0.02, 0.01, 16)
    assert (resnet.cpu.K_s.value, resnet.cpu.max_batch.value) == (0.2, 4)
    assert resnet.gpu.workspace_bytes.value == 41_000_001
    assert resnet.framework_load_s.ssd.value == 178_000_000 / 1.5e9
    assert resnet.framework_load_s.host.value == 178_000_000 / 1e10


def test_a_box_with_one_memory_is_unified(tmp_path):
    kinds = tuple(replace(kind, load_s={SSD: kind.load_s[SSD]}) for kind in BOTH)
    device = device_in(written(tmp_path, JETSON, kinds, LINKS[:1], budgets={"host": 20 * GIB}))
    assert (device.device, device.layout, device.pools) == ("jetson", "unified", ("host",))
    assert device.links.host_bytes_per_s is None
    assert device.architectures["yolov5l"].framework_load_s.host is None


def test_every_constant_says_what_was_measured_and_where_or_that_it_was_not(tmp_path):
    file = written(tmp_path)
    found = dict(constants(device_in(file)))
    assert len(found) > 30
    for key, constant in found.items():
        if constant.source == "measured":
            assert constant.derived.endswith(f"; {file}"), key
        else:
            assert constant.source == "not in the profile", key
            assert constant.derived.startswith("assumed"), key
    assert {key for key, constant in found.items() if constant.source != "measured"} == {
        "processors.gpu.executor_bytes",
        "processors.cpu.executor_bytes",
        "processors.cpu.speedups",
    }


@pytest.mark.parametrize("loading", list(Loading))
def test_every_load_takes_time_even_where_the_copy_was_as_slow_as_the_read(tmp_path, loading):
    """The host's part of a load onto the accelerator is all of it: then the CPU's takes what the link does."""
    kinds = [replace(kind, load_s=dict.fromkeys(kind.load_s, 0.09)) for kind in BOTH]
    columns = device_profile(device_in(written(tmp_path, kinds=kinds)), TASK, loading).experts
    assert min(seconds for column in columns.values() for row in column.values() for seconds in row.load_s.values()) > 0
    resnet = device_in(tmp_path / "profile.db").architectures["resnet101"].framework_load_s
    assert resnet.ssd.value == pytest.approx(0.09 + 89_000_000 / 2e9)
    assert "at the speeds of its links" in resnet.ssd.derived


def test_the_tasks_run_on_it_by_its_files_name(tmp_path):
    device = task_device(str(written(tmp_path)))
    samba, paper = (simulate(System(name, name, {"gpu": 2, "cpu": 1}), device, TASK) for name in ("samba", "paper"))
    assert (samba.device, samba.executors, paper.executors) == ("cuda", {"gpu": 1}, {"gpu": 2, "cpu": 1})
    assert paper.images_per_s > 0


def test_of_several_kinds_the_slowest_that_both_processors_have(tmp_path):
    larger = [kind_on(name, "yolov5m", px=640, K_s=0.3) for name in ("cuda", "cpu")]
    alone = kind_on("cuda", "yolov5m", px=1280, K_s=0.9)
    other_form = kind_on("cuda", "yolov5m", px=640, K_s=0.8, precision="fp32")
    kinds = (*BOTH, *larger, alone, other_form)
    chosen = {(kind.kind, kind.processor): kind.precision for kind in kinds if kind is not other_form}
    device = device_in(written(tmp_path, kinds=kinds, chosen=chosen))
    assert device.architectures["yolov5m"].gpu.K_s.value == 0.3
    assert "yolov5m 640x640 unit" in device.architectures["yolov5m"].gpu.K_s.derived


@pytest.mark.parametrize(
    ("is_kept", "said"),
    [
        (lambda kind: kind.architecture != "yolov5m", "lacks yolov5m on cuda, yolov5m on cpu - "),
        (lambda kind: (kind.architecture, kind.processor) != ("resnet101", "cpu"), "lacks resnet101 on cpu - "),
        (lambda kind: kind.processor == "cpu", "lacks resnet101 on cuda, yolov5m on cuda, yolov5l on cuda - "),
    ],
)
def test_every_kind_that_is_missing_is_named(tmp_path, is_kept, said):
    text = refused(written(tmp_path, kinds=tuple(kind for kind in BOTH if is_kept(kind))))
    assert said in text
    assert text.endswith(f"`coserve profile LINE.yaml`, or {INSTEAD}")
    assert "`coserve bench tasks --experts N`" in text


def test_kinds_links_and_loads_that_are_missing_are_named(tmp_path):
    unlike = (*BOTH[:-2], kind_on("cuda", "yolov5l", px=640), kind_on("cpu", "yolov5l", px=320))
    no_copy = (replace(BOTH[0], load_s={SSD: 0.1}), *BOTH[1:])
    for number, (lacking, changed) in enumerate(
        {
            "yolov5l with one input size on both cuda and cpu": {"kinds": unlike},
            "the speed of the host link": {"links": LINKS[:1]},
            "load times of resnet101 from host": {"kinds": no_copy},
        }.items()
    ):
        (folder := tmp_path / str(number)).mkdir()
        assert f"lacks {lacking}" in refused(written(folder, **changed))


def test_a_figure_that_no_device_can_have_is_named_by_its_key(tmp_path):
    kinds = (replace(BOTH[0], K_s=0.0), *BOTH[1:])
    said = refused(written(tmp_path, kinds=kinds))
    assert "architectures.resnet101.gpu.K_s.value: Input should be greater than 0" in said
