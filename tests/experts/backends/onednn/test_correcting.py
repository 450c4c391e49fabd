"""Calibration: what is no number is told, and what rounding shifts the mean of an output channel by is taken off."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import nn

from experts.backends.onednn.calibrating import corrected, observed
from experts.backends.onednn.form import OnednnSkeleton, decided_layouts, fused_module
from experts.backends.onednn.operators import weight_highest
from experts.expert import Precision
from tests.forms import needs

SIZE = (8, 8)
CHANNELS = 8
SHIFTS = {"first.weight": CHANNELS, "second.weight": CHANNELS, "third.weight": CHANNELS, "last.weight": 0}
BETWEEN_LEVELS = 1.49  # of a weight's levels: all of them are rounded the same way, which is a shift and no noise

pytestmark = needs(Precision.ONEDNN_INT8)


class Residual(nn.Module):
    """A depthwise layer, a sum, and a last layer; images that are not negative keep every ReLU open."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.second = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS)
        self.third = nn.Conv2d(CHANNELS, CHANNELS, 1, bias=False)
        self.last = nn.Conv2d(CHANNELS, 4, 1)
        for layer in (self.first, self.second, self.third):
            with torch.no_grad():
                layer.weight.fill_(BETWEEN_LEVELS / weight_highest())
                layer.weight[:, 0, 0, 0] = 1.0
        self.eval().requires_grad_(False)

    def forward(self, images):
        first = self.first(images).relu()
        return self.last((self.third(self.second(first).relu()) + first).relu())


@pytest.fixture
def module():
    torch.manual_seed(5)
    return Residual()


def images(seed, count=6):
    return torch.rand((count, 3, *SIZE), generator=torch.Generator().manual_seed(seed))


def fused_of(module, numbers):
    return fused_module(deepcopy(module).to("meta"), SIZE, ("answer",), numbers)


def form_of(module):
    return decided_layouts(fused_of(module, torch.int8))


def ranges_of(module, seen):
    """Without shifts, and with them: those of the output channels of calls in eight bits."""
    plain, weights = fused_of(module, torch.float32), dict(module.state_dict())
    found = observed(plain, weights, seen.split(4))
    shifted = corrected(form_of(module), plain, weights, found, seen)
    assert {name: len(each.shifts) for name, each in shifted.items()} == SHIFTS
    assert {name: replace(each, shifts=()) for name, each in shifted.items()} == found.ranges
    return found.ranges, shifted


def moved(module, ranges, seen):
    """By how much the mean of the outputs differs from the module's, at the most."""
    form = form_of(module)
    skeleton = OnednnSkeleton(form, lambda expert, answers, batch: ())
    skeleton.bind(form.tensors(dict(module.state_dict()), ranges))
    with torch.inference_mode():
        (found,) = skeleton.outputs(seen.unbind())
    return float((found - module(seen)).mean(dim=(0, 2, 3)).abs().max())


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_nan_in_calibration_is_an_error_that_names_the_call(module, number):
    ranges, before = ranges_of(module, images(1))[0], deepcopy(module)
    before.second.weight[0, 0, 0, 0] = number  # oneDNN's ReLU makes 0 of what is no number
    with pytest.raises(ValueError, match=r"second.weight: .* NaN or infinity"):
        form_of(before).tensors(dict(before.state_dict()), ranges)
    module.last.weight[0, 0, 0, 0] = number
    with pytest.raises(ValueError, match=r"answer of last.weight: .* no levels"):
        ranges_of(module, images(1))


@pytest.mark.parametrize("seed", [1, 2])  # those that were measured, and others
def test_corrected_means_are_nearer_to_those_in_float32(module, seed):
    plain, shifted = ranges_of(module, images(1))
    assert moved(module, shifted, images(seed)) < 0.1 * moved(module, plain, images(seed))


def test_call_is_corrected_on_the_eight_bit_answers_before_it(module):
    """What the first call's answers are moved by by hand, its own shift undoes; the others then have none of it."""
    plain, weights, seen = fused_of(module, torch.float32), dict(module.state_dict()), images(1)
    found = observed(plain, weights, [seen])
    found.means["first.weight"][:] += 0.25
    higher = corrected(form_of(module), plain, weights, found, seen)
    _, once = ranges_of(module, seen)
    first, second = (torch.tensor(higher[f"{name}.weight"].shifts) - torch.tensor(once[f"{name}.weight"].shifts)
                     for name in ("first", "second"))  # fmt: skip
    assert first.tolist() == pytest.approx([-0.25] * CHANNELS, abs=1e-3)
    assert (second > 0.1).all()  # it reads more than it was to read, and makes up for that


def test_shifts_of_another_number_of_channels_are_refused(module):
    _, shifted = ranges_of(module, images(1))
    ranges = {**shifted, "third.weight": replace(shifted["third.weight"], shifts=(0.0,) * 3)}
    with pytest.raises(ValueError, match=r"third\.weight: calibrated for 3 output channels, it has 8"):
        form_of(module).tensors(dict(module.state_dict()), ranges)
