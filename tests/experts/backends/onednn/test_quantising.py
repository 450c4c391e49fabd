"""Graphs in eight bits answer as the same rounding in float64, to the level.

Each module marks with ``at`` where its values become levels: the expectation knows nothing of graphs or oneDNN.
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
from experts.backends.onednn.form import OnednnModule, OnednnSkeleton, decided_layouts, fused_module, packed_module
from experts.backends.onednn.operators import on_threads, weight_highest
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
    """``at(name, values, zero)``: here values are levels, and share them with all of that name."""

    def __init__(self, path, eight, layers):
        super().__init__()
        self.path, self.eight = path, eight
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.third = nn.Conv2d(8, 8, 1)
        self.last = nn.Conv2d(8, 4, 1)
        self.at = lambda name, values, zero=None: values
        for name, made in layers.items():
            setattr(self, name, made())
        self.eval().requires_grad_(False)

    def forward(self, images):
        inside = self.path(self, self.at("images", images) if "first" in self.eight else images)
        return {"answer": self.last(inside), "inside": inside}


KINDS = {}


def kind(eight=("first", "second", "third"), **layers):
    """Register a way from the images to what the last layer reads. ``eight``: the layers in eight bits."""

    def register(path):
        KINDS[path.__name__] = lambda: Module(path, eight, layers)
        return path

    return register


@kind(third=lambda: nn.Conv2d(8, 8, 5, padding=(2, 1)))
def negative_padding(net, images):
    """What is padded has its zero between the levels, at every layer."""
    return net.third(net.at("second", net.second(net.at("first", functional.silu(net.first(images))))))


@kind()
def residual_in_place(net, images):
    first = net.at("first", net.first(images).relu_(), 0)
    found = net.third(net.at("second", net.second(first).relu_(), 0))
    found += first
    return net.at("sum", found.relu_(), 0)


@kind(eight=("first", "second"))
def residual_onto_itself(net, images):
    """The first is summand and source of one call, and written by it in the module."""
    first = net.at("first", net.first(images), MIDDLE)
    first += net.second(first)
    return net.at("sum", first)


@kind()
def two_residuals(net, images):
    """A summand of two sums, the first of which must leave it as it is."""
    first = net.at("first", net.first(images), MIDDLE)
    second = net.at("second", functional.relu(net.second(first) + first), 0)
    return net.at("sum", net.third(second) + first)


@kind()
def float_summand(net, images):
    """What is added was computed in float32, and is read by others too."""
    first = functional.hardswish(net.first(images))
    first = net.at("float", first + first, MIDDLE)
    second = net.at("second", functional.relu(net.second(first) + first), 0)
    return net.at("sum", net.third(second) + first)


@kind(eight=("first", "second"))
def summand_laid_otherwise(net, images):
    """What is added does not lie channels last."""
    first = functional.hardswish(net.first(images))
    first = net.at("float", (first + first).contiguous(), MIDDLE)
    return net.at("sum", functional.relu(net.second(first) + first), 0)


@kind(third=lambda: nn.Conv2d(16, 8, 1))
def joined(net, images):
    """All that is joined has the same levels, and is read alone as well."""
    first = net.at("joined", functional.silu(net.first(images)))
    return functional.hardswish(net.third(torch.cat([first, net.at("joined", net.second(first))], 1)))


@kind(third=lambda: nn.Conv2d(16, 8, 1))
def joined_with_float(net, images):
    """One part is no call's answer: it is brought to the levels of the others."""
    first = net.at("first", functional.silu(net.first(images)))
    second = net.at("joined", functional.silu(first + first))
    return net.third(torch.cat([net.at("joined", net.second(first)), second], 1))


@kind(second=lambda: nn.Conv2d(4, 4, 3, padding=1), third=lambda: nn.Conv2d(12, 8, 1))
def divided_and_joined_with_float(net, images):
    """As in a YOLOv8 with a shortcut: one half goes to a layer, the other only to where all is joined."""
    one, other = net.at("joined", functional.silu(net.first(images))).chunk(2, 1)
    summed = net.at("joined", other + functional.silu(net.second(other)))
    return functional.silu(net.third(torch.cat([one, other, summed], 1)))


@kind(second=lambda: nn.Conv2d(4, 4, 3, padding=1), third=lambda: nn.Conv2d(4, 8, 1))
def divided_and_added(net, images):
    """A summand that is a part of another value, with gaps between its bytes."""
    one, other = net.at("first", net.first(images), MIDDLE).chunk(2, 1)
    return net.third(net.at("second", functional.relu(net.second(other) + one), 0))


@kind()
def pooled(net, images):
    """As at the start of a ResNet."""
    first = functional.max_pool2d(net.at("first", functional.relu(net.first(images)), 0), 3, 2, 1)
    second = net.at("second", functional.relu(net.second(first)), 0)
    return net.third(functional.dropout(second, 0.5, training=False))


@kind(
    second=lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8),
    third=lambda: nn.Conv2d(8, 8, 3, padding=1, groups=2, bias=False),
)
def grouped(net, images):
    first = net.at("first", functional.relu6(net.first(images)), 0)
    return net.third(net.at("second", functional.hardswish(net.second(first))))


@kind(
    second=lambda: nn.Conv2d(8, 16, 3, stride=2, padding=2, dilation=2),
    third=lambda: nn.Conv2d(16, 8, (1, 3), padding=(0, 1)),
)
def dilated(net, images):
    first = net.at("first", functional.silu(net.first(images)))
    return net.third(net.at("second", functional.relu(net.second(first)), 0))


@kind(eight=("first", "third"))
def twice(net, images):
    """A weight of two calls stays as it is, and so do these."""
    return net.third(net.at("found", net.second(net.second(functional.relu(net.first(images))))))


@kind(eight=("second", "third"))
def written(net, images):
    """What is written to in place stays in float32, and each reader reads it as it is then."""
    first = net.first(images)
    second = net.at("second", net.second(net.at("before", first)), MIDDLE)
    first.relu_()
    return net.at("sum", net.third(net.at("after", first)) + second)


@kind(
    second=lambda: nn.Linear(8, 2048), third=lambda: nn.Linear(2048, 8, bias=False), last=lambda: nn.Linear(8, 4),
)  # fmt: skip
def rows(net, images):
    first = net.at("first", net.first(images)).flatten(2).transpose(1, 2)
    return functional.relu(net.third(net.at("second", functional.gelu(net.second(first)))))


@kind(second=lambda: nn.Linear(8 * 256, 64), third=lambda: nn.Linear(64, 512), last=lambda: nn.Linear(512, 4))
def single_row(net, images):
    first = net.at("first", net.first(images)).flatten(1)
    return functional.gelu(net.third(net.at("second", functional.relu(net.second(first)), 0)))


@dataclass
class Tried:
    """A module, what eight bits make of it, and what it should answer."""

    module: Module
    images: torch.Tensor
    form: OnednnModule
    tensors: dict[str, torch.Tensor]
    seen: dict[str, Seen]

    def emulated(self, count):
        module = deepcopy(self.module).double()
        for name in module.eight:
            layer = getattr(module, name)
            scales = (
                layer.weight.abs().flatten(1).amax(1).div(weight_highest()).reshape(-1, *[1] * (layer.weight.dim() - 1))
            )
            layer.weight.copy_((layer.weight / scales).round() * scales)
        with rounding(module, self._rounded):
            found = module(self.images[:count].double())
        return [found[name] for name in OUTPUTS]

    @property
    def scale(self):
        return self.seen[self.module.told].levels[0]

    def _rounded(self, name, values, zero=None):
        scale, zero = self.seen[name].levels
        return ((values / scale).round() + zero).clamp(0, 255).sub(zero) * scale


@contextmanager
def rounding(module, at):
    before, module.at = module.at, at
    yield
    module.at = before


def outputs_of(each, images, threads=1):
    skeleton = OnednnSkeleton(each.form, lambda expert, answers, batch: ())
    skeleton.bind(each.tensors)

    def run():
        with torch.inference_mode():
            return skeleton.outputs(images.unbind())

    return on_threads(threads, run)


def fused_of(module, numbers):
    return fused_module(deepcopy(module).to("meta"), SIZE, OUTPUTS, numbers)


@cache
def tried(name):
    torch.manual_seed(0)
    module, images = KINDS[name](), torch.randn(8, 3, *SIZE)
    seen = {}

    def note(name, values, zero=None):
        seen.setdefault(name, Seen()).note(values, zero)
        module.told = name  # the last of them
        return values

    with rounding(module, note):
        module(images)
    weights = dict(module.state_dict())
    form = decided_layouts(fused_of(module, torch.int8))
    ranges = observed(fused_of(module, torch.float32), weights, [images]).ranges
    return Tried(module, images, form, form.tensors(weights, ranges), seen)


@pytest.fixture(params=KINDS)
def each(request):
    return tried(request.param)


def is_rounded_alike(each, count, threads):
    """True within a level of float64's answers, and for nearly all values on it."""
    (_, found), (_, expected) = outputs_of(each, each.images[:count], threads), each.emulated(count)
    apart = ((found - expected) / each.scale).abs()
    return apart.max() < 1.01 and (apart > 0.5).double().mean() <= SLIPS_MAXIMUM


def test_eight_bit_layers_are_those_that_can_be(each):
    assert each.form.quantised == {f"{name}.weight" for name in each.module.eight}


@needs(Precision.ONEDNN_INT8)
@pytest.mark.parametrize(("count", "threads"), [(1, 1), (1, 2), (8, 1), (3, 2)])
def test_eight_bit_rounding_equals_that_in_float64(each, count, threads):
    assert is_rounded_alike(each, count, threads)


@needs(Precision.ONEDNN_INT8)
def test_wrong_zero_in_the_padding_would_be_detected(monkeypatch):
    made = tried("negative_padding")
    pad = functional.pad
    monkeypatch.setattr(calls.functional, "pad", lambda images, sides, value: pad(images, sides, value=0))
    assert not is_rounded_alike(made, 3, 1)


@needs(Precision.ONEDNN_INT8)
def test_value_beyond_the_calibrated_range_is_clamped():
    made = tried("residual_in_place")
    _, found = outputs_of(made, made.images * 1e6)
    assert (float(found.min()), float(found.max())) == (0, pytest.approx(made.scale * 255, rel=1e-5))


UNABLE = {
    "nothing reads its only layer": lambda net, images: functional.relu(net.first(images)).mean((2, 3), keepdim=True),
    "single pixels": lambda net, images: net.third(images.mean((2, 3), keepdim=True).repeat(1, 3, 1, 1)[:, :8]),
    "no such activation": lambda net, images: functional.leaky_relu(net.first(images), 0.1).sigmoid(),
}


@pytest.mark.parametrize("path", UNABLE.values(), ids=UNABLE)
def test_module_without_an_eight_bit_layer_is_refused(path):
    module = Module(path, (), {"last": nn.Identity} if path is UNABLE["nothing reads its only layer"] else {})
    assert fused_of(module, torch.int8) == RefusedModule("it has no layer that oneDNN runs in eight bits")


def test_program_with_levels_of_other_calls_is_refused():
    form, other = (tried(name).form for name in ("joined", "joined_with_float"))
    assert packed_module("cls", form.module, form.program) == form
    assert form.blocked == other.blocked  # so that nothing else would tell
    with pytest.raises(BackendUnavailable, match=r"its levels belong to other calls: pack the line again here"):
        packed_module("cls", form.module, other.program)
    plain = json.loads(form.program)
    del plain["levels"]
    with pytest.raises(BackendUnavailable, match="its levels belong to other calls"):
        packed_module("cls", form.module, json.dumps(plain).encode())


@pytest.mark.parametrize(("name", "steps"), [("joined", STEPS[:1]), ("residual_in_place", STEPS)])
def test_values_pass_between_calls_as_levels(name, steps):
    """No steps to levels but for the images, none back but for the last layer and the output."""
    assert [node.target for node in tried(name).form.module.graph.graph.nodes if node.target in STEPS] == list(steps)
