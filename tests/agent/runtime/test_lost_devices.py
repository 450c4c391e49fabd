"""An emulated device that is lost, or fails to move its bytes: no verdict is wrong, and none is missing."""

import threading
import time
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch

from agent.core.performance import ExecutorSpec, PerformanceMatrix, tier_of
from agent.runtime import assembly
from agent.runtime.loop import LoopOptions
from agent.runtime.machine.device_loss import DeviceWatch
from agent.runtime.machine.memories import EmulatedMemory
from experts.backends.torch_backend import ModuleSkeleton
from experts.expert import Verdict
from experts.packed.weights import SegmentStore
from tests.agent.runtime.test_loop import Agent, expected_of
from tests.waiting import until

PATIENCE_S = 10.0
FAULTS = 2
FINDERS = ("executor-1", "executor-2", "executor-3", "load")
COMPONENTS = ("own-0", "own-1", "own-2", "own-3", "wide", "twin-0", "kin-0")
LOST = "CUDA error: an illegal memory access was encountered"


class SlowCpu(Agent):
    """The device's executors are chosen while there are any."""

    def profile(self, specs):
        found = super().profile(specs).experts
        slow = {
            name: replace(row, performance=replace(row.performance, K_s=10.0, B_s=10.0))
            for name, row in found["cpu"].items()
        }
        return PerformanceMatrix({**found, "cpu": slow})


class LostDevice:
    """The emulated device: each of its users waits in it, and finds it lost once ``found`` says so."""

    def __init__(self, monkeypatch):
        self.threads = {}
        self.inside = {name: threading.Event() for name in FINDERS}
        self.gates = {name: threading.Event() for name in FINDERS}
        self.takes_loads = True
        infer, fill = ModuleSkeleton.infer, EmulatedMemory.fill

        def run(skeleton, *arguments):
            name = threading.current_thread().name
            return self.lose(name) if name in FINDERS else infer(skeleton, *arguments)

        def take(memory, *arguments):
            return fill(memory, *arguments) if self.takes_loads else self.lose("load")

        monkeypatch.setattr(ModuleSkeleton, "infer", run)
        monkeypatch.setattr(EmulatedMemory, "fill", take)

    def lose(self, name):
        self.threads[name] = threading.current_thread()
        self.inside[name].set()
        assert self.gates[name].wait(PATIENCE_S)
        raise torch.AcceleratorError(LOST)

    def release(self):
        for gate in self.gates.values():
            gate.set()


def on_device(agent):
    return next(pool for pool in agent.loop.statistics().engine.pools if pool.name == "device")


def loading(agent):
    return [each for pool in agent.loop.statistics().engine.pools for each in pool.loading]


def has_posted(agent, device, name):
    if name == "load":
        return not agent.loop.here.transfers.statistics().in_flight
    return not device.threads[name].is_alive()


@pytest.mark.parametrize(
    "order",
    [
        pytest.param(order, id=",".join(order), marks=() if number % 5 == 0 else pytest.mark.slow)
        for number, order in enumerate(permutations(FINDERS))
    ],
)
def test_repeated_messages_about_a_lost_device_are_ignored(line, monkeypatch, request, order):
    device = LostDevice(monkeypatch)
    request.addfinalizer(device.release)
    with SlowCpu(line, device=3, room=4) as agent:
        asked = {agent.submit(name): name for name in COMPONENTS[:3]}
        for name in FINDERS[:3]:
            assert device.inside[name].wait(PATIENCE_S)
        until(lambda: not loading(agent))
        device.takes_loads = False
        absent = next(name for name in COMPONENTS if f"cls/{name}@fp32" not in on_device(agent).resident)
        asked[agent.submit(absent)] = absent
        assert device.inside["load"].wait(PATIENCE_S)
        for name in order:
            device.gates[name].set()
            until(lambda name=name: has_posted(agent, device, name))
        agent.settle()
        assert agent.loop.crash is None
        assert agent.loop.lost.keys() == {"emulated"}
        statistics = agent.loop.statistics().engine
    for number, component in asked.items():
        outcome = agent.outcomes[number]
        assert (outcome.verdict, outcome.label) == expected_of(line, component, line.pixels(0))
    assert {pool.name for pool in statistics.pools} == {"host"}
    assert statistics.quarantined == {}


def test_copies_whose_move_failed_judge_nothing_until_they_are_reloaded(line, monkeypatch):
    slide, copy, slides, faults = EmulatedMemory.slide, EmulatedMemory._copy, [], []

    def slide_with_faults(memory, region):
        slides.append(region)
        try:
            return slide(memory, region)
        finally:
            slides.append(None)

    def copy_half(memory, pairs):
        if slides and slides[-1] is not None and len(faults) < FAULTS:
            faults.append(next(iter(pairs))[0].fill_(255))
            raise RuntimeError("the copy engine failed")
        copy(memory, pairs)

    monkeypatch.setattr(EmulatedMemory, "slide", slide_with_faults)
    monkeypatch.setattr(EmulatedMemory, "_copy", copy_half)
    random, asked = np.random.default_rng(3), {}
    with SlowCpu(line, device=2, room=3) as agent:
        for number in range(5000):
            component = COMPONENTS[random.integers(len(COMPONENTS))]
            asked[agent.submit(component, number % 6)] = component, number % 6
            if number % 10 == 9:
                agent.settle()
                if len(faults) == FAULTS and number >= 120:
                    break
        agent.settle()
        later = {agent.submit(component, 0): (component, 0) for component in COMPONENTS}
        agent.settle()
    assert len(faults) == FAULTS
    for number, (component, seed) in (asked | later).items():
        outcome = agent.outcomes[number]
        met_each = number in asked and outcome.verdict is Verdict.UNKNOWN and "moving its bytes" in outcome.reason
        expected = expected_of(line, component, line.pixels(seed))
        assert met_each or (outcome.verdict, outcome.label) == expected, outcome


@pytest.mark.parametrize("has_own", [True, False], ids=["own memory", "shared memory"])
def test_device_whose_probe_hangs_is_probed_once_and_bound_no_more(line, monkeypatch, request, has_own):
    """An executor's error is unclear, and the probe never returns: the watchdog finds the loss."""
    late_s, released, probing = 0.0, threading.Event(), []
    infer, read, faults = ModuleSkeleton.infer, SegmentStore.read, []

    def probe():
        probing.append(threading.current_thread().name)
        released.wait()

    def run(skeleton, *arguments):
        if threading.current_thread().name == "executor-1":
            raise RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED")
        return infer(skeleton, *arguments)

    def read_with_a_fault(store, *arguments):
        if split.loop.lost and not faults:
            faults.append(OSError("the drive hiccuped"))
            raise faults[0]
        return read(store, *arguments)

    def watch(processor, context):
        return DeviceWatch(processor, None if tier_of(processor) == "cpu" else probe, context)

    request.addfinalizer(released.set)
    monkeypatch.setattr(ModuleSkeleton, "infer", run)
    monkeypatch.setattr(SegmentStore, "read", read_with_a_fault)
    monkeypatch.setattr(assembly, "watch_of", watch)
    monkeypatch.setattr(
        assembly, "watch_of_memory", lambda _, pool, context: DeviceWatch(pool, probe, context, outlives=True)
    )
    monkeypatch.setattr("agent.runtime.loop.STOP_S", 0.1)
    split = SlowCpu(line, device=1, room=3, has_own=has_own, clock=lambda: time.monotonic() + late_s)
    with split:
        asked = {split.submit(name): name for name in COMPONENTS[:2]}
        split.loop.here.text_engines.add(ExecutorSpec(9, "cpu", "ranks/host"), 4096)  # of a model's ranks
        until(lambda: probing and not loading(split))
        while not split.loop.lost:
            late_s += LoopOptions().ages.ended_s
            for _ in range(2):
                split.loop.statistics()
        assert {("ranks/host", "cpu")} <= split.loop.here.text_engines.arenas.keys()
        asked |= {split.submit(name): name for name in COMPONENTS}
        split.settle()
        stores = split.loop.here.stores
        devices = {device for copy in line.copies for device in stores["host"].devices_of(copy)}
    assert {number: split.outcomes[number].label for number in asked} == {
        number: expected_of(line, name, line.pixels(0))[1] for number, name in asked.items()
    }
    assert (split.loop.crash, len(faults), probing, devices) == (None, 1, ["executor-1"], {"cpu"})
