"""A thousand switches through the whole agent: nothing is constructed, memory stays flat, answers stay; all policies
judge alike. Squeezenets with memory for two of five, asked in turn: four requests of five are switches.
"""

import ctypes
import gc
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from agent.config import read_line
from agent.core.policy import PRESETS
from agent.runtime.machine.heap import give_back_unused
from experts.backends import backend_for, observed_ranges
from experts.calibrations import CalibrationFolder
from experts.expert import Precision
from experts.packed.calibrated import calibration_of
from profiler.bench.naive import NAIVE
from profiler.bench.policy_runs import RunOptions, run_line
from profiler.replay.host_load import CoresInUse
from profiler.replay.player import images_of, player
from profiler.workload.generated_line import LineRecipe, generate_line
from profiler.workload.traces import TracedArrival, read_trace
from tests.forms import needs

PX = 64
RECIPE = LineRecipe(classifiers=5, architecture="squeezenet1_1", requests=40, memory_for=2, classifier_px=PX, seed=3)
FORMS = [
    Precision.FP32,
    *(
        pytest.param(form, marks=(needs(form), pytest.mark.slow), id=form)
        for form in (Precision.ONEDNN_FP32, Precision.ONEDNN_BF16, Precision.ONEDNN_INT8)
    ),
]
WARM, SWITCHES = 200, 1000
MOST_BYTES_PER_SWITCH = 4096  # Python's and malloc's own rounding; a layer has 40 KB in the mean, 10 KB in eight bits
MOST_RESIDENT_BYTES_PER_SWITCH = 20 * 1024  # with what malloc keeps of what was given back, by megabytes at a time
ROOM_BYTES = 64 * 1024 * 1024  # of workspaces


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    return generate_line(tmp_path_factory.mktemp("switches") / "line", RECIPE)


@pytest.fixture(scope="module")
def images():
    chance = np.random.default_rng(5)
    return [chance.integers(0, 256, (PX, PX, 3), dtype=np.uint8) for _ in range(3)]


@pytest.fixture(params=FORMS)
def config(request, generated, images):
    """The line in a form, with memory for two of its experts."""
    form = request.param
    config = read_line(generated.line, {"COSERVE__DEVICE": "cpu"})
    if form is Precision.ONEDNN_INT8:
        calibrate(config, images)
    bytes_each = {Precision.ONEDNN_BF16: 2, Precision.ONEDNN_INT8: 1}.get(form, 4)
    expert_bytes = generated.footprint_bytes * bytes_each // 4 + 32 * 1024  # eight bits have scales and offsets, too
    memory = {"host": 2 * expert_bytes + ROOM_BYTES, "workspace": ROOM_BYTES}
    return config.having(precision=form, executors={"cpu": 1}, memory=memory)


def calibrate(config, images):
    """Every expert, on these images."""
    folder = CalibrationFolder.beside(config.packed_folder)
    for name, expert in config.catalog.experts.items():
        backend = backend_for(expert.architecture)
        batch = torch.stack([backend.prepare(expert, image).tensor for image in images])
        observe = partial(observed_ranges, expert, Precision.ONEDNN_INT8, [batch])
        folder.write(name, calibration_of(expert, "0" * 64, len(images), ("ok",), observe))


class HeapInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


def memory_now():
    """Bytes that malloc has given out, and anonymous resident ones, after free memory was given back."""
    gc.collect()
    give_back_unused()
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = HeapInfo
    heap = library.mallinfo2()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    resident = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))
    return heap.uordblks + heap.hblkhd, resident


def ask(stage, experts, images, number):
    """One request alone: a batch of one, so that every answer is the same however it is timed."""
    arrival = TracedArrival(0.0, expert=experts[number % len(experts)])
    (outcome,) = stage.play([arrival], [images[number % len(images)]]).outcomes
    return outcome.steps[0].prediction


def after_switches(stage, experts, images, count):
    """Statistics of the agent, and its memory, after so many switches."""
    before = stage.agent.loop.statistics().engine.switches
    for number in range(2 * count):
        ask(stage, experts, images, number)
        now = stage.agent.loop.statistics()
        if now.engine.switches - before >= count:
            return now, memory_now()
    raise AssertionError(f"{2 * count} requests led to {now.engine.switches - before} switches")


@pytest.mark.slow
def test_thousand_switches_leave_memory_flat_and_construct_nothing(config, images):
    experts = sorted(config.catalog.experts)
    with player(config, experts) as stage:
        asked = range(len(experts) * len(images))
        before = [ask(stage, experts, images, number) for number in asked]
        _, then = after_switches(stage, experts, images, WARM)
        now, grown = after_switches(stage, experts, images, SWITCHES)
        after = [ask(stage, experts, images, number) for number in asked]
    layouts = {packed.layout for packed in stage.agent.packed.values()}
    (host,) = now.slots
    in_use_bytes, resident_bytes = (late - early for late, early in zip(grown, then, strict=True))
    assert in_use_bytes < SWITCHES * MOST_BYTES_PER_SWITCH
    assert resident_bytes < SWITCHES * MOST_RESIDENT_BYTES_PER_SWITCH
    assert len(layouts) == 1
    assert now.skeletons_constructed == host.binds == host.regions_allocated == 2  # slots
    assert before == after
    assert len({str(prediction) for prediction in before}) == len(before)


def test_all_policies_judge_alike(config, generated):
    trace = read_trace(generated.trace, config.catalog)
    policies = (*PRESETS, NAIVE) if config.precision is Precision.FP32 else tuple(PRESETS)
    rows = run_line(config, trace, RunOptions(policies=policies, with_roofline=False)).rows
    assert [row.policy for row in rows] == list(policies)
    assert len({row.medians.outputs_sha256 for row in rows}) == 1
    assert sum(row.medians.switches for row in rows) > len(rows)
    assert all(row.medians.unknown == 0 for row in rows)
    with player(config, sorted(config.catalog.experts)) as stage:
        labels = stage.play(trace, images_of(trace, config.catalog)).labels
    assert len(set(labels)) > 1


def test_times_of_this_process_and_its_children_are_not_counted_as_others(monkeypatch):
    """By hand, of 100 s of all cores: 10 s idle, 20 s this process, 30 s its children, 40 s others."""
    cores = iter([(50.0, 10.0, 40.0), (130.0, 20.0, 50.0)])
    own = iter([(1, 1, 2, 2), (19, 3, 28, 6)])

    class Cores(tuple):
        idle = property(lambda self: self[2])

    def own_times():
        return SimpleNamespace(
            **dict(zip(("user", "system", "children_user", "children_system"), next(own), strict=True))
        )

    psutil = SimpleNamespace(cpu_times=lambda: Cores(next(cores)), Process=lambda: SimpleNamespace(cpu_times=own_times))
    monkeypatch.setattr("profiler.replay.host_load.psutil", psutil)
    assert CoresInUse().others_fraction() == pytest.approx(0.4)
