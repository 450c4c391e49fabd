"""The arithmetic's own limit: operations as they are published, and a multiplication that is what it says."""

import pytest
import torch
from torchvision import models

from experts.backends.onednn.operators import why_absent
from experts.backends.vision.classifier import build_trainable
from proof.compute import arithmetic
from proof.compute.arithmetic import Multiplication, fastest_of, multiplying, operations_per_image, reference_of

SLOW = ("mobilenet_v3_small", "swin_t", "vit_b_32")
SMALL_SHAPES = ((16, 16, 16), (32, 8, 16))


@pytest.fixture
def few_shapes(monkeypatch):
    monkeypatch.setattr(arithmetic, "SHAPES", SMALL_SHAPES)
    fastest_of.cache_clear()
    yield
    fastest_of.cache_clear()


@pytest.mark.parametrize("architecture", ["resnet18", *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)])
def test_operations_are_twice_torchvisions_published_multiply_accumulates(architecture):
    published = models.get_model_weights(architecture).DEFAULT.meta["_ops"]  # in 10^9
    module = build_trainable(architecture, 1000).eval()
    assert operations_per_image(module, (224, 224)) / 2e9 == pytest.approx(published, rel=0.01)
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_every_way_multiplies_and_onednns_is_present_where_it_runs(dtype):
    """Small whole numbers: every dtype holds them and their products, levels of eight bits, too."""
    draw = torch.Generator().manual_seed(1)
    one, other = (torch.randint(0, 3, sides, generator=draw).to(dtype) for sides in ((16, 32), (32, 8)))
    answers = [run().float() for run in multiplying(one, other)]
    has_packed = dtype is not torch.float16 and why_absent(dtype) is None
    assert len(answers) == 1 + has_packed
    for answer in answers:
        assert torch.equal(answer, one.float() @ other.float())


def test_fastest_way_of_the_fastest_shape_is_taken(few_shapes, monkeypatch):
    """Of each shape the second way takes half as long; operations by second are most in the first shape."""
    ran = []
    ways = {"slow": 2e-3, "fast": 1e-3}
    monkeypatch.setattr(arithmetic, "multiplying", lambda one, _: [(name, len(one)) for name in ways])
    monkeypatch.setattr(
        arithmetic, "one_turn", lambda run: (ran.append(run) or ways[run[0]] * (run[1] // 16) ** 3, None)
    )
    found = fastest_of(torch.float32)
    assert found.run == ("fast", 16)
    assert found.rate == pytest.approx(found.operations / 1e-3)
    assert set(ran) == {(name, rows) for name in ways for rows in (16, 32)}


@pytest.mark.parametrize(("own", "taken"), [(0.5, torch.float32), (2.0, torch.float16)])
def test_converted_numbers_are_compared_with_the_faster_ones(monkeypatch, own, taken):
    rates = {torch.float32: 1.0, torch.float16: own}
    monkeypatch.setattr(arithmetic, "fastest_of", lambda dtype: Multiplication(dtype, 1, rates[dtype], print))
    assert reference_of(torch.float16).dtype is taken
    assert reference_of(torch.float32).dtype is torch.float32
