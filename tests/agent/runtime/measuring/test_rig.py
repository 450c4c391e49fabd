"""The measuring rig: it runs what the agent would run, and passes off no failure as a time."""

import pytest
import torch

from agent.core.events import BatchFailed
from agent.core.performance import HOST, SSD
from agent.faults.errors import DeviceLost
from agent.runtime.machine.detection import detect
from agent.runtime.measuring.fits import LEAST_S
from agent.runtime.measuring.rig import MeasuringRig, noise
from agent.runtime.weights.slots import SlotStore
from experts.backends.torch_backend import ModuleSkeleton
from experts.errors import LoadError
from experts.expert import Rejected


@pytest.fixture
def rig_of(line):
    def build(name):
        box = detect("cpu")
        return MeasuringRig(box, box.processors[0], [line.copy(name)], line.segments, threads=1)

    return build


def test_lost_device_while_measuring_is_raised_and_blamed_on_no_expert(line, rig_of, monkeypatch):
    def lose(*_):
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    with rig_of("own-0").opened() as rig:
        rig.bring(line.copy("own-0"))
        monkeypatch.setattr(ModuleSkeleton, "infer", lose)
        with pytest.raises(DeviceLost, match="unspecified launch failure"):
            rig.run(line.copy("own-0"), [line.pixels(1)])
        rig.evict(line.copy("own-0"), HOST)
        monkeypatch.setattr(SlotStore, "materialise", lose)
        with pytest.raises(DeviceLost, match="unspecified launch failure"):
            rig.load(line.copy("own-0"), HOST, SSD)


def test_broken_image_is_rejected_while_measuring(line, rig_of, tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    copy = line.copy("own-0")
    with rig_of("own-0").opened() as rig:
        rig.bring(copy)
        good, bad = rig.run(copy, [line.pixels(0), broken]).results
        assert good == line.predict("own-0", line.pixels(0))
        assert isinstance(bad, Rejected)
        with pytest.raises(LoadError, match=r"broken\.png"):
            rig.timed_s(copy, [line.pixels(0), broken])
        with pytest.raises(LoadError, match=r"broken\.png"):
            rig.all_s([copy], [[line.pixels(0)], [broken]])
        assert rig.all_s([copy], []) == LEAST_S
        assert rig.all_s([copy], [[line.pixels(number)] for number in range(3)]) >= LEAST_S


def test_expert_that_is_not_loaded_cannot_be_measured(line, rig_of):
    copy = line.copy("own-0")
    with rig_of("own-0").opened() as rig:
        answer = rig.attempt(copy, [noise(copy)])
        assert isinstance(answer, BatchFailed)
        assert not answer.out_of_memory
        with pytest.raises(LoadError, match="absent"):
            rig.run(copy, [noise(copy)])
        with pytest.raises(LoadError, match="absent"):
            rig.all_s([copy], [[noise(copy)]])
