"""What becomes one call, and what must not; each against torch on real weights."""

import pytest
import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from experts.backends.modules.recording import recorded
from experts.backends.onednn.calls import Arrangements, bound
from experts.backends.onednn.fusion import Activation, FusedCall, fused

SIZE = (6, 6)


def fusion_of(module, size=SIZE):
    return fused(recorded(module.to("meta"), size, ("answer",), torch.float32), torch.float32)


def given(part, weights):
    """What the graph is run with: weights as they lie."""
    if isinstance(part, str):
        return weights[part]
    return bound(part, Arrangements(part.shape, is_blocked=False), weights[part.weight], weights)


class Around(nn.Module):
    def __init__(self, act=None, sum_of=None):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.act = act or nn.Identity()
        self.sum_of = sum_of or (lambda one, other: one)
        self.eval().requires_grad_(False)

    def forward(self, images):
        first = self.first(images)
        return self.act(self.sum_of(self.second(first), first))


class By(Around):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, images):
        return self.call(self, images)


def apart(sum_of, act=lambda found: found):
    """The second convolution reads something else than what is added to it."""

    def call(net, images):
        first = net.first(images)
        return act(sum_of(net.second(first.sigmoid()), first))

    return By(call)


class Layers(nn.Module):
    """Two linear layers, the second too small to hand on."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(108, 256), nn.Linear(256, 4)
        self.eval().requires_grad_(False)

    def forward(self, images):
        return self.second(functional.gelu(self.first(images.flatten(1)), approximate="tanh"))


ACTIVATIONS = {
    "relu": nn.ReLU(inplace=True), "sigmoid": nn.Sigmoid(), "tanh": nn.Tanh(), "swish": nn.SiLU(inplace=True),
    "hardswish": nn.Hardswish(inplace=True), "hardsigmoid": nn.Hardsigmoid(), "hardtanh": nn.ReLU6(inplace=True),
    "leaky_relu": nn.LeakyReLU(0.2), "gelu": nn.GELU(),
}  # fmt: skip


def check(module, size=SIZE):
    """The calls of a module, after its answers were seen to be torch's."""
    images = torch.randn(3, 3, *size).contiguous(memory_format=torch.channels_last)
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with torch.inference_mode():
        expected = module(images)
    found = fusion_of(module, size)
    with torch.inference_mode():
        answer = GraphModule(nn.Module(), found.graph).forward(images, *(given(part, weights) for part in found.inputs))
    assert torch.allclose(answer[0], expected, atol=1e-5)
    return [part for part in found.inputs if isinstance(part, FusedCall)]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_is_fused_into_its_convolution(name):
    first, second = check(Around(ACTIVATIONS[name]))
    assert first.activation == Activation()
    assert (second.activation.name, second.adds, second.bias) == (name, False, None)


def viewed(net, images):
    """A sum in place, seen through a view that is older."""
    first = net.first(images)
    part = first[:, :4]
    first += net.second(first.sigmoid())
    return torch.cat([part, first[:, 4:] * 2], 1)


def onto(net, images):
    first = net.first(images)
    first += net.second(first.sigmoid())
    return first.relu_()


def permuted(net, images):
    """What is added is read again through a view of what lies channels last."""
    first = net.first(images)
    rows = first.permute(0, 2, 3, 1).contiguous()
    return torch.cat([(net.second(first.sigmoid()) + first).flatten(1), rows.flatten(1)], 1)


def writing(net, images):
    """What is added is written between the convolution and the sum."""
    first = net.first(images)
    found = net.second(first)
    first.mul_(2)
    return found + first


def depthwise():
    """The convolution reads what is added row by row, each of which the next row needs."""
    made = Around(None, torch.add)
    made.second = nn.Conv2d(8, 8, 3, padding=1, groups=8).requires_grad_(False)
    return made


SUMS = {  # (module, whether its second convolution adds, overwrites what it adds, and its activation)
    "a sum": (apart(torch.add, nn.ReLU()), True, True, "relu"),
    "in place": (apart(torch.Tensor.add_, nn.ReLU(inplace=True)), True, True, "relu"),
    "onto the summand": (By(onto), True, False, "relu"),
    "not channels last": (apart(lambda one, other: one + other.contiguous()), True, True, "none"),
    "read again": (Around(None, lambda one, other: torch.cat([one + other, other], 1)), True, False, "none"),
    "a view read again": (
        Around(None, lambda one, other: torch.cat([(one + other.view_as(one)).relu(), other * 2], 1)), False, False,
        "none",
    ),
    "a permuted view read again": (By(permuted), True, False, "none"),
    "the convolution's own source": (depthwise(), True, False, "none"),
    "a view of its source": (Around(None, lambda one, other: one + other.view(-1, 8, 32, 32)), True, False, "none"),
    "an activation that follows no sum": (Around(nn.SiLU(), torch.add), True, False, "none"),
    "another shape": (
        Around(nn.ReLU(), lambda one, other: one + other.mean(dim=(2, 3), keepdim=True)), False, False, "none",
    ),
    "scaled": (Around(nn.ReLU(), lambda one, other: torch.add(one, other, alpha=2)), False, False, "none"),
    "an older view": (By(viewed), False, False, "none"),
    "written before": (By(writing), False, False, "none"),
    "read by others": (Around(None, lambda one, other: one.relu() * one), False, False, "none"),
}  # fmt: skip


@pytest.mark.parametrize(("module", "adds", "overwrites", "activation"), SUMS.values(), ids=SUMS)
def test_sum_is_fused_into_its_convolution_if_nothing_else_reads_it(module, adds, overwrites, activation):
    _, second = check(module, (32, 32))
    assert (second.adds, second.overwrites, second.activation.name) == (adds, overwrites, activation)


def test_weight_shared_by_two_convolutions_stays_plain_in_both():
    _, second, third = check(By(lambda net, images: net.second(net.second(net.first(images)).relu())))
    assert not second.owns_weight
    assert not third.owns_weight
    assert second.activation.name == "relu"


def test_linear_layer_is_fused_with_its_activation_unless_it_is_small():
    (only,) = check(Layers())
    assert (only.weight, only.activation) == ("first.weight", Activation("gelu", (), "tanh"))


class Attending(nn.Module):
    """Attention whose query, key and value lie transposed: of the same rows, or of three that differ."""

    def __init__(self, *, is_of_itself):
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)
        self.is_of_itself = is_of_itself
        self.eval().requires_grad_(False)

    def forward(self, images):
        rows = images.flatten(2).reshape(len(images), -1, 12)
        key, value = (rows, rows) if self.is_of_itself else (rows.sin(), rows.cos())
        return self.attention(rows, key, value, need_weights=False)[0]


class ReadByAttention(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.read = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is functional.multi_head_attention_forward:
            self.read.append(args[:3])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("is_of_itself", "distinct"), [(True, 1), (False, 3)])
def test_attention_rows_are_in_order_and_copied_once(is_of_itself, distinct):
    torch.manual_seed(0)
    module = Attending(is_of_itself=is_of_itself)
    weights, images = dict(module.state_dict()), torch.randn(4, 3, *SIZE)
    expected = module(images)
    found = fusion_of(module)
    graph = GraphModule(nn.Module(), found.graph)
    with torch.inference_mode(), ReadByAttention() as watching:
        (answer,) = graph(images, *(given(part, weights) for part in found.inputs))
    (read,) = watching.read
    assert all(each.is_contiguous() for each in read)
    assert len({id(each) for each in read}) == distinct
    torch.testing.assert_close(answer, expected)
