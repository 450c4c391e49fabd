"""Which BatchNorms are folded: those that torch.fx's graph proves."""

import pytest
import torch
from torch import nn

from experts.architectures import CLASSIFIERS
from experts.backends.modules.batchnorm_folding import FoldablePair, foldable_pairs
from experts.backends.modules.binding import Weightless
from experts.backends.vision.classifier import build_trainable

QUICK = {"resnet18", "mobilenet_v3_small", "densenet121", "googlenet", "regnet_y_400mf", "vgg11_bn"}
ARCHITECTURES = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CLASSIFIERS]


def traced_pairs(module):
    modules = dict(module.named_modules())
    graph = torch.fx.symbolic_trace(module).graph
    calls = [node.target for node in graph.nodes if node.op == "call_module"]
    pairs = []
    for node in graph.nodes:
        source = node.args[0] if node.op == "call_module" and node.args else None
        if (
            isinstance(source, torch.fx.Node)
            and source.op == "call_module"
            and type(modules[source.target]) is nn.Conv2d
            and type(modules[node.target]) is nn.BatchNorm2d
            and len(source.users) == 1
            and calls.count(source.target) == calls.count(node.target) == 1
        ):
            pairs.append(FoldablePair(source.target, node.target, modules[node.target].eps))
    return tuple(pairs)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_foldable_pairs_are_those_of_the_traced_graph(architecture):
    with Weightless():
        module = build_trainable(architecture, 3).to("meta").eval().requires_grad_(False)
    assert foldable_pairs(module, (224, 224)) == traced_pairs(module)


class Doubling(nn.Conv2d):
    def forward(self, images):
        return 2 * super().forward(images)


class Calling(nn.Module):
    """A convolution and a BatchNorm, called by ``call(net, images)``."""

    def __init__(self, call=None, conv=None, norm=None):
        super().__init__()
        self.call = call or (lambda net, images: net.norm(net.conv(images)))
        self.conv = conv or nn.Conv2d(3, 4, 1)
        self.norm = norm or nn.BatchNorm2d(4)

    def forward(self, images):
        return self.call(self, images)


def reading(call):
    """A net of which ``call(net, convolved)`` reads the convolution's answer."""
    return Calling(lambda net, images: call(net, net.conv(images)))


UNFOLDABLE = {
    "read twice": reading(lambda net, convolved: net.norm(convolved) + convolved),
    "written before": reading(lambda net, convolved: net.norm(convolved.relu_())),
    "read through a view": reading(lambda net, convolved: net.norm(convolved).flatten(1) + convolved.flatten(1)),
    "read in a list": reading(lambda net, convolved: torch.cat([convolved, net.norm(convolved)], dim=1)),
    "answered": reading(lambda net, convolved: {"answer": net.norm(convolved), "features": [convolved]}),
    "normed twice": reading(lambda net, convolved: net.norm(net.norm(convolved))),
    "convolved twice": Calling(lambda net, images: net.norm(net.conv(images)) + net.conv(images)),
    "normed first": Calling(lambda net, images: net.conv(net.norm(images.repeat(1, 2, 1, 1)[:, :4])[:, :3])),
    "a convolution of its own kind": Calling(conv=Doubling(3, 4, 1)),
    "without weights": Calling(norm=nn.BatchNorm2d(4, affine=False)),
    "by the batch's own statistics": Calling(norm=nn.BatchNorm2d(4, track_running_stats=False)),
}


@pytest.mark.parametrize("net", UNFOLDABLE.values(), ids=UNFOLDABLE)
def test_batchnorm_is_not_folded_if_its_input_is_read_elsewhere_or_runs_twice(net):
    assert foldable_pairs(net.to("meta").eval(), (8, 8)) == ()
