"""A real line in miniature: SqueezeNets at 64 px, packed once for all tests of the runtime."""

import shutil
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torchvision import models

from agent.runtime.expert_copy import ExpertCopy
from experts.expert import Expert, InputSpec, Precision, Prediction
from experts.packed.weights import SegmentStore
from tests.agent.core.conftest import constants  # noqa: F401  a fixture
from tests.experts.conftest import answers, packed_in

LABELS = ("ok", "missing", "tombstone")
SIZE = InputSpec(64, 64)


class Served:
    def __enter__(self):
        self.loop.start()
        return self

    def __exit__(self, *_):
        self.loop.stop()

    def settle(self):
        assert self.loop.wait_until_idle(60.0)


@dataclass(frozen=True, slots=True)
class Line:
    """Packed experts: ``own-*`` share nothing, ``twin-*`` share their features, ``kin-*`` share others of the same
    layout, ``wide`` is of another architecture."""

    segments: SegmentStore
    copies: dict
    predicted: dict  # by expert and image, over the whole session

    def copy(self, name):
        return self.copies[f"cls/{name}@fp32"]

    def file_of(self, name):
        return self.segments.segment_path(self.copy(name).packed.own.sha256)

    def load(self, store, name):
        copy = self.copy(name)
        slot = store.reserve(copy)
        store.materialise(slot)
        for segment in copy.packed.segments:
            self.segments.read(segment, slot.region_of(segment).buffer, copy.expert.id)
        store.commit(slot)
        return slot

    def pixels(self, seed):
        """A synthetic image, larger than the experts' input: every seed has a colour of its own, under noise."""
        random = np.random.default_rng(seed)
        colour = random.integers(0, 256, 3)
        return np.clip(colour + random.integers(-60, 60, (70, 80, 3)), 0, 255).astype(np.uint8)

    def predict(self, name, image):
        """What an expert says without the runtime: a module of its own, made from its owner's file."""
        key = name, image.tobytes()
        if key not in self.predicted:
            (self.predicted[key],) = answers(self.copy(name).expert, image)
        known = self.predicted[key]
        return Prediction(known.label, pytest.approx(known.score, rel=1e-3), known.boxes)


@pytest.fixture(scope="session")
def packed_directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("line")
    _write_weights(directory)
    with closing(SegmentStore(directory / "packed")) as segments:
        copies_of(experts_in(directory), segments)
    return directory


@pytest.fixture(scope="session")
def predicted():
    return {}


@pytest.fixture
def line(packed_directory, predicted):
    yield from opened(packed_directory, predicted)


@pytest.fixture
def breakable_line(packed_directory, predicted, tmp_path):
    shutil.copytree(packed_directory, tmp_path / "line", copy_function=shutil.copy2)
    yield from opened(tmp_path / "line", predicted)


def experts_in(directory):
    return [
        Expert(f"cls/{file.stem}", "shufflenet_v2_x0_5" if "wide" in file.stem else "squeezenet1_1", file, LABELS, SIZE)
        for file in sorted(directory.glob("*.safetensors"))
    ]


def copies_of(experts, segments):
    """A copy in fp32 of each expert, by its name."""
    packed = packed_in(segments, experts, Precision.FP32)
    return {f"{each.id}@fp32": ExpertCopy(f"{each.id}@fp32", each, packed[each.id][Precision.FP32]) for each in experts}


def opened(directory, predicted):
    with closing(SegmentStore(directory / "packed")) as segments:
        yield Line(segments, copies_of(experts_in(directory), segments), predicted)


def _write_weights(directory):
    for number in range(4):
        save_file(_squeezenet(number), directory / f"own-{number}.safetensors")
    for family, seed in (("twin", 100), ("kin", 200)):
        trunk = {name: tensor for name, tensor in _squeezenet(seed).items() if name.startswith("features")}
        for number in range(3 if family == "twin" else 2):
            save_file(_squeezenet(seed + 1 + number) | trunk, directory / f"{family}-{number}.safetensors")
    torch.manual_seed(0)
    module = models.shufflenet_v2_x0_5(num_classes=len(LABELS))
    save_file(module.state_dict(), directory / "wide.safetensors")


def _squeezenet(seed):
    """Random weights, scaled so that different images get different labels."""
    torch.manual_seed(seed)
    state = models.squeezenet1_1(num_classes=len(LABELS)).state_dict()
    state["classifier.1.weight"] = state["classifier.1.weight"] * 40
    return {name: tensor.contiguous() for name, tensor in state.items()}
