"""Graphs in eight bits answer as the same rounding done in float64, to the level.

Each module says itself, with ``at``, where its values become levels: the expectation knows nothing of graphs or oneDNN.
"""

import json
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional

from experts.backends.base import RefusedModule
from experts.backends.onednn import calls, levels
from experts.backends.onednn.calibrating import observed
from experts.backends.onednn.form import (
    FusedModule,
    OnednnModule,
    OnednnSkeleton,
    decided_layouts,
    fused_module,
    packed_module,
)
from experts.backends.onednn.fusion import FusedCall
from experts.backends.onednn.operators import on_threads
from experts.errors import BackendUnavailable
from experts.expert import Precision
from tests.forms import needs

SIZE = (16, 16)
OUTPUTS = ("answer", "inside")
MIDDLE = 128  # zero of what is added, where it may be negative
SLIPS_MAXIMUM = 0.02  # the part of all values that may be the next level, as float32 rounds a tie otherwise
STEPS = (levels.to_levels, levels.to_values)


@dataclass
class Seen:
    """What the values at some places of a module, which share their levels, come to."""

    low: float = 0.0
    high: float = 0.0
    zero: int | None = None

    def note(self, values, zero):
        self.low, self.high = min(self.low, float(values.min())), max(self.high, float(values.max()))
        self.zero = zero

    @property
    def levels(self):
        if self.zero is None:
            scale = (self.high - self.low) / 255
            return scale, round(-self.low / scale)
        return max(self.high / (255 - self.zero), -self.low / self.zero if self.zero else 0), self.zero


class Module(nn.Module):
    """Layers for all; which are in eight bits. ``path`` answers with what ``last`` reads, and what else is to be told.

    ``at(name, values, zero)``: here values are levels, and share them with all of that name.
    """

    eight = ("first", "second", "third")
    channels = 8

    def __init__(self):
        super().__init__()
        channels = self.channels
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.third = nn.Conv2d(channels, channels, 1)
        self.last = nn.Conv2d(channels, 4, 1)
        self.at = lambda name, values, zero=None: values
        self.build()
        self.eval().requires_grad_(False)

    def build(self):
        """Change the layers."""

    def forward(self, images):
        inside = self.path(self.at("images", images) if "first" in self.eight else images)
        return {"answer": self.last(inside), "inside": inside}


class NegativePadding(Module):
    """What is padded has its zero between the levels, at every layer."""

    def build(self):
        self.third = nn.Conv2d(8, 8, 5, padding=(2, 1))

    def path(self, images):
        second = self.at("second", self.second(self.at("first", functional.silu(self.first(images)))))
        return self.third(second)


class ResidualInPlace(Module):
    def path(self, images):
        first = self.at("first", self.first(images).relu_(), 0)
        found = self.at("second", self.second(first).relu_(), 0)
        found = self.third(found)
        found += first
        return self.at("sum", found.relu_(), 0)


class ResidualOntoItself(Module):
    """The first is summand and source of one call, and written by it in the module."""

    eight = ("first", "second")

    def path(self, images):
        first = self.at("first", self.first(images), MIDDLE)
        first += self.second(first)
        return self.at("sum", first)


class TwoResiduals(Module):
    """A summand of two sums, the first of which must leave it as it is."""

    def path(self, images):
        first = self.at("first", self.first(images), MIDDLE)
        second = self.at("second", functional.relu(self.second(first) + first), 0)
        return self.at("sum", self.third(second) + first)


class FloatSummand(Module):
    """What is added was computed in float32, and is read by others too."""

    def path(self, images):
        first = functional.hardswish(self.first(images))
        first = self.at("float", first + first, MIDDLE)
        second = self.at("second", functional.relu(self.second(first) + first), 0)
        return self.at("sum", self.third(second) + first)


class SummandLaidOtherwise(Module):
    """What is added does not lie channels last."""

    eight = ("first", "second")

    def path(self, images):
        first = functional.hardswish(self.first(images))
        first = self.at("float", (first + first).contiguous(), MIDDLE)
        return self.at("sum", functional.relu(self.second(first) + first), 0)


class Joined(Module):
    """All that is joined has the same levels, and is read alone as well."""

    def build(self):
        self.third = nn.Conv2d(16, 8, 1)

    def path(self, images):
        first = self.at("joined", functional.silu(self.first(images)))
        second = self.at("joined", self.second(first))
        return functional.hardswish(self.third(torch.cat([first, second], 1)))


class JoinedWithFloat(Module):
    """One part is no call's answer: it is brought to the levels of the others."""

    def build(self):
        self.third = nn.Conv2d(16, 8, 1)

    def path(self, images):
        first = self.at("first", functional.silu(self.first(images)))
        second = self.at("joined", functional.silu(first + first))
        return self.third(torch.cat([self.at("joined", self.second(first)), second], 1))


class DividedAndJoinedWithFloat(Module):
    """As in a YOLOv8 with a shortcut: one half goes to a layer, the other only to where all is joined."""

    def build(self):
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.third = nn.Conv2d(12, 8, 1)

    def path(self, images):
        one, other = self.at("joined", functional.silu(self.first(images))).chunk(2, 1)
        summed = self.at("joined", other + functional.silu(self.second(other)))
        return functional.silu(self.third(torch.cat([one, other, summed], 1)))


class DividedAndAdded(Module):
    """A summand that is a part of another value, with gaps between its bytes."""

    def build(self):
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.third = nn.Conv2d(4, 8, 1)

    def path(self, images):
        one, other = self.at("first", self.first(images), MIDDLE).chunk(2, 1)
        second = self.at("second", functional.relu(self.second(other) + one), 0)
        return self.third(second)


class Pooled(Module):
    """As at the start of a ResNet."""

    def path(self, images):
        first = self.at("first", functional.relu(self.first(images)), 0)
        first = functional.max_pool2d(first, 3, 2, 1)
        second = self.at("second", functional.relu(self.second(first)), 0)
        return self.third(functional.dropout(second, 0.5, training=False))


class Grouped(Module):
    """Depthwise, in groups, and without offsets of their own."""

    def build(self):
        self.second = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.third = nn.Conv2d(8, 8, 3, padding=1, groups=2, bias=False)

    def path(self, images):
        first = self.at("first", functional.relu6(self.first(images)), 0)
        second = self.at("second", functional.hardswish(self.second(first)))
        return self.third(second)


class Dilated(Module):
    def build(self):
        self.second = nn.Conv2d(8, 16, 3, stride=2, padding=2, dilation=2)
        self.third = nn.Conv2d(16, 8, (1, 3), padding=(0, 1))

    def path(self, images):
        first = self.at("first", functional.silu(self.first(images)))
        return self.third(self.at("second", functional.relu(self.second(first)), 0))


class Twice(Module):
    """A weight of two calls stays as it is, and so do these."""

    eight = ("first", "third")

    def path(self, images):
        first = functional.relu(self.first(images))
        found = self.second(self.second(first))
        return self.third(self.at("found", found))


class Written(Module):
    """What is written to in place stays in float32, and whoever reads it reads it as it is then."""

    eight = ("second", "third")

    def path(self, images):
        first = self.first(images)
        second = self.at("second", self.second(self.at("before", first)), MIDDLE)
        first.relu_()
        return self.at("sum", self.third(self.at("after", first)) + second)


class Rows(Module):
    """Linear layers on the rows of pixels."""

    eight = ("first", "second", "third")

    def build(self):
        self.second = nn.Linear(8, 2048)
        self.third = nn.Linear(2048, 8, bias=False)
        self.last = nn.Linear(8, 4)

    def path(self, images):
        first = self.at("first", self.first(images)).flatten(2).transpose(1, 2)
        second = self.at("second", functional.gelu(self.second(first)))
        return functional.relu(self.third(second))


class SingleRow(Module):
    eight = ("first", "second", "third")

    def build(self):
        self.second = nn.Linear(8 * 256, 64)
        self.third = nn.Linear(64, 512)
        self.last = nn.Linear(512, 4)

    def path(self, images):
        first = self.at("first", self.first(images)).flatten(1)
        second = self.at("second", functional.relu(self.second(first)), 0)
        return functional.gelu(self.third(second))


MODULES = Module.__subclasses__()


@dataclass
class Tried:
    """A module, what eight bits make of it, and what it should answer."""

    module: Module
    images: torch.Tensor
    form: OnednnModule
    tensors: dict[str, torch.Tensor]
    seen: dict[str, Seen]

    def answers(self, count, threads):
        """What the form's graph answers with."""
        return outputs_of(bound_to(self.form, self.tensors), self.images[:count], threads)

    def emulated(self, count):
        """What the module answers with where its values and weights are rounded so, in float64."""
        module = deepcopy(self.module).double()
        for name in module.eight:
            layer = getattr(module, name)
            layer.weight.copy_(rounded_weight(getattr(self.module, name).weight.double()))
        with rounding(module, self._rounded):
            found = module(self.images[:count].double())
        return [found[name] for name in OUTPUTS]

    @property
    def scale(self):
        """Of the values inside, which are levels of."""
        return self.seen[self.module.told].levels[0]

    def _rounded(self, name, values, zero=None):
        scale, zero = self.seen[name].levels
        return ((values / scale).round() + zero).clamp(0, 255).sub(zero) * scale


@contextmanager
def rounding(module, at):
    """Within it, the module does this wherever its values become levels."""
    before, module.at = module.at, at
    yield
    module.at = before


def rounded_weight(weight):
    scales = weight.abs().flatten(1).amax(1).div(127).reshape(-1, *[1] * (weight.dim() - 1))
    return (weight / scales).round() * scales


def bound_to(form, tensors):
    skeleton = OnednnSkeleton(form, lambda expert, answers, batch: ())
    skeleton.bind(tensors)
    return skeleton


def outputs_of(skeleton, images, threads):
    def run():
        with torch.inference_mode():
            return skeleton.outputs(images.unbind())

    return on_threads(threads, run)


def fused_of(module, numbers):
    return fused_module(deepcopy(module).to("meta"), SIZE, OUTPUTS, numbers)


def ranges_of(module, weights, images):
    plain = fused_of(module, torch.float32)
    return observed(plain, weights, [images]).ranges


def form_of(module):
    fused = fused_of(module, torch.int8)
    assert isinstance(fused, FusedModule)
    return decided_layouts(fused)


@cache
def tried(kind):
    torch.manual_seed(0)
    module, images = kind(), torch.randn(8, 3, *SIZE)
    seen: dict[str, Seen] = {}

    def note(name, values, zero=None):
        seen.setdefault(name, Seen()).note(values, zero)
        module.told = name  # the last of them
        return values

    with rounding(module, note):
        module(images)
    weights = dict(module.state_dict())
    form = form_of(module)
    return Tried(module, images, form, form.tensors(weights, ranges_of(module, weights, images)), seen)


@pytest.fixture(params=MODULES, ids=lambda kind: kind.__name__)
def each(request):
    return tried(request.param)


def calls_of(form):
    return [part for part in form.module.inputs if isinstance(part, FusedCall)]


def levels_apart(found, expected, scale):
    """How many levels are between them; what float32 rounds otherwise is told as the part that it is of all."""
    apart = ((found - expected) / scale).abs()
    return float(apart.max()), float((apart > 0.5).double().mean())


def is_rounded_alike(each, count, threads):
    (_, found), (_, expected) = each.answers(count, threads), each.emulated(count)
    most, slips = levels_apart(found, expected, each.scale)
    return most < 1.01 and slips <= SLIPS_MAXIMUM


def test_what_is_in_eight_bits(each):
    """The last layer is left alone, and whatever was said of the others."""
    found = {call.weight for call in calls_of(each.form) if call.quantisation is not None}
    assert found == {f"{name}.weight" for name in each.module.eight}


@needs(Precision.ONEDNN_INT8)
@pytest.mark.parametrize(("count", "threads"), [(1, 1), (1, 2), (8, 1), (3, 2)])
def test_it_rounds_as_is_done_in_float64(each, count, threads):
    assert is_rounded_alike(each, count, threads)


@needs(Precision.ONEDNN_INT8)
def test_another_zero_in_the_padding_would_be_told(monkeypatch):
    made = tried(NegativePadding)
    pad = functional.pad
    monkeypatch.setattr(calls.functional, "pad", lambda images, sides, value: pad(images, sides, value=0))
    assert not is_rounded_alike(made, 3, 1)


@needs(Precision.ONEDNN_INT8)
def test_what_no_image_showed_becomes_the_end_of_the_range():
    made = tried(ResidualInPlace)
    _, found = outputs_of(bound_to(made.form, made.tensors), made.images * 1e6, 2)
    assert float(found.min()) == 0
    assert float(found.max()) == pytest.approx(made.scale * 255, rel=1e-5)


class LastAlone(Module):
    """Nothing reads what its only layer answers with."""

    def forward(self, images):
        found = functional.relu(self.first(images))
        return {"answer": found.mean((2, 3)), "inside": found}


class SinglePixels(Module):
    """Layers of a single pixel cost nothing."""

    def forward(self, images):
        found = self.third(self.third(images.mean((2, 3), keepdim=True).repeat(1, 8, 1, 1)[:, :8]))
        return {"answer": self.last(found), "inside": found}


class Unable(Module):
    """What oneDNN has no activation for in eight bits stays in float32, and so does whoever reads only that."""

    def forward(self, images):
        found = functional.leaky_relu(self.first(images), 0.1)
        return {"answer": self.last(found.sigmoid()), "inside": found}


@pytest.mark.parametrize("kind", [LastAlone, SinglePixels, Unable])
def test_a_module_without_a_layer_for_eight_bits_is_refused(kind):
    assert fused_of(kind(), torch.int8) == RefusedModule("it has no layer that oneDNN runs in eight bits")


def test_a_program_tells_which_levels_the_bytes_are_of():
    form, other = form_of(Joined()), form_of(JoinedWithFloat())
    assert packed_module("cls", form.module, form.program) == form
    assert form.blocked == other.blocked  # so that nothing else would tell
    with pytest.raises(BackendUnavailable, match=r"its levels are of other calls .*: pack the line again here"):
        packed_module("cls", form.module, other.program)
    plain = json.loads(form.program)
    del plain["levels"]
    with pytest.raises(BackendUnavailable, match="its levels are of other calls"):
        packed_module("cls", form.module, json.dumps(plain).encode())


def test_values_go_from_call_to_call_as_levels():
    """No steps to levels but for the images, none back but for the last layer and the output."""
    steps = [node.target for node in form_of(Joined()).module.graph.graph.nodes if node.target in STEPS]
    assert steps == [levels.to_levels]
    steps = [node.target for node in form_of(ResidualInPlace()).module.graph.graph.nodes if node.target in STEPS]
    assert steps == [levels.to_levels, levels.to_values]
