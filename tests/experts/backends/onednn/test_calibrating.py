"""Ranges are those of the module's own values, whatever the graph overwrites, and weights are packed by them."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from experts.backends.onednn.calibrating import observed, quantised_weights
from experts.backends.onednn.form import fused_module
from experts.backends.onednn.fusion import FusedCall

SIZE = (8, 8)


class Residual(nn.Module):
    """A sum in place, of which the fused graph overwrites the summand, and a last layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.third = nn.Conv2d(8, 8, 1)
        self.last = nn.Conv2d(8, 4, 1)
        self.eval().requires_grad_(False)

    def forward(self, images):
        first = self.first(images)
        found = self.third(self.second(first).relu_())
        found += first
        return self.last(found.relu_())


@pytest.fixture
def module():
    torch.manual_seed(5)
    return Residual()


@pytest.fixture
def batches():
    generator = torch.Generator().manual_seed(6)
    return [torch.randn((count, 3, *SIZE), generator=generator) for count in (2, 1, 3)]


def fused_of(module, numbers=torch.float32):
    return fused_module(deepcopy(module).to("meta"), SIZE, ("answer",), numbers)


def ranges_of(module, batches):
    weights = dict(module.state_dict())
    fused = fused_of(module)
    return observed(fused.graph, fused.inputs, weights, batches).ranges


def of(*values):
    """The range of some tensors together."""
    flat = torch.cat([each.flatten() for each in values])
    return pytest.approx((float(flat.min()), float(flat.max())), abs=1e-5)


def ends(seen):
    return None if seen is None else (seen.low, seen.high)


def test_ranges_are_those_of_the_module_over_all_batches(module, batches):
    first = [module.first(images) for images in batches]
    second = [module.second(each).relu() for each in first]
    summed = [(module.third(one) + other).relu() for one, other in zip(second, first, strict=True)]
    last = [module.last(each) for each in summed]
    found = ranges_of(module, batches)
    assert found.keys() == {"first.weight", "second.weight", "third.weight", "last.weight"}
    assert ends(found["first.weight"].source) == of(*batches)
    assert ends(found["first.weight"].answer) == of(*first)
    assert ends(found["second.weight"].answer) == of(*second)
    assert ends(found["third.weight"].source) == of(*second)
    assert ends(found["third.weight"].answer) == of(*summed)
    assert ends(found["last.weight"].source) == of(*summed)
    assert ends(found["last.weight"].answer) == of(*last)
    assert found["first.weight"].summand is None


def test_what_is_added_is_observed_before_it_is_overwritten(module, batches):
    fused = fused_of(module)
    assert [part.weight for part in fused.inputs if isinstance(part, FusedCall) and part.overwrites] == ["third.weight"]
    first = [module.first(images) for images in batches]
    assert min(float(each.min()) for each in first) < 0  # which nothing is after the sum
    assert ends(ranges_of(module, batches)["third.weight"].summand) == of(*first)


def test_a_weight_of_two_calls_has_no_ranges(batches):
    class Twice(Residual):
        def forward(self, images):
            return self.last(self.second(self.second(self.first(images))))

    assert ranges_of(Twice(), batches).keys() == {"first.weight", "last.weight"}


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_no_number_is_told_with_the_call(module, batches, number):
    module.first.weight[0, 0, 0, 0] = number
    with pytest.raises(ValueError, match=r"answer of first.weight: .* no levels"):
        ranges_of(module, batches)


def test_a_weight_that_is_no_number_is_told_where_an_activation_hides_it(module, batches):
    module.second.weight[0, 0, 0, 0] = float("nan")  # oneDNN's ReLU makes 0 of it
    with pytest.raises(ValueError, match=r"second.weight: .* no levels"):
        packed_of(module, ranges_of(module, batches))


def packed_of(module, ranges):
    weights = dict(module.state_dict())
    return weights, quantised_weights(fused_of(module, torch.int8).inputs, weights, ranges)


def test_weights_come_with_scales_offsets_and_a_table(module, batches):
    ranges = ranges_of(module, batches)
    weights, packed = packed_of(module, ranges)
    added = {f"{name}.weight {part}" for name in ("first", "second", "third") for part in ("scales", "offsets")}
    assert packed.keys() == weights.keys() | added | {"levels"}
    assert packed["last.weight"].dtype == torch.float32  # the answers are the outputs
    assert {packed[f"{name}.weight"].dtype for name in ("first", "second", "third")} == {torch.int8}
    assert packed["levels"].dtype == torch.float32
    assert packed["levels"].shape == (4, 2)  # of the images, and the answers of three calls
