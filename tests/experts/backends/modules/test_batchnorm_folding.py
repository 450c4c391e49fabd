"""Which BatchNorms are folded: those that torch.fx's graph proves, found without patching anything outside."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import nn

from experts.architectures import CLASSIFIERS
from experts.backends.classifier import build_trainable
from experts.backends.modules.batchnorm_folding import FoldablePair, foldable_pairs
from experts.backends.modules.weightless import Weightless

WAIT_S = 60.0


def weightless(architecture):
    with Weightless():
        return build_trainable(architecture, 3).to("meta").eval().requires_grad_(False)


def traced_pairs(module):
    """What torch.fx's own graph of the module says."""
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


@pytest.mark.parametrize("architecture", CLASSIFIERS)
def test_the_pairs_are_those_of_the_traced_graph(architecture):
    module = weightless(architecture)
    assert foldable_pairs(module, (224, 224)) == traced_pairs(module)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


class Net(nn.Module):
    """A convolution and a BatchNorm; subclasses say how they are called."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, images):
        return self.norm(self.conv(images))


class ReadTwice(Net):
    def forward(self, images):
        convolved = self.conv(images)
        return self.norm(convolved) + convolved


class ReadBeforeInPlace(Net):
    def forward(self, images):
        convolved = self.conv(images)
        convolved.relu_()
        return self.norm(convolved)


class ReadThroughAView(Net):
    def forward(self, images):
        convolved = self.conv(images)
        return self.norm(convolved).flatten(1) + convolved.flatten(1)


class ReadInAList(Net):
    def forward(self, images):
        convolved = self.conv(images)
        return torch.cat([convolved, self.norm(convolved)], dim=1)


class Answered(Net):
    def forward(self, images):
        convolved = self.conv(images)
        return {"answer": self.norm(convolved), "features": [convolved]}


class NormedTwice(Net):
    def forward(self, images):
        convolved = self.conv(images)
        return self.norm(self.norm(convolved))


class ConvolvedTwice(Net):
    def forward(self, images):
        return self.norm(self.conv(images)) + self.conv(images)


class NormFirst(Net):
    def forward(self, images):
        return self.conv(self.norm(images.repeat(1, 2, 1, 1)[:, :4])[:, :3])


class OfItsOwnKind(Net):
    def __init__(self):
        super().__init__()

        class Scaled(nn.Conv2d):
            def forward(self, images):
                return 2 * super().forward(images)

        self.conv = Scaled(3, 4, 1)


class NotAffine(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(4, affine=False)


class OfTheBatch(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(4, track_running_stats=False)


def pairs_of(kind):
    return foldable_pairs(kind().to("meta").eval(), (8, 8))


def test_a_convolution_that_its_norm_alone_reads_is_foldable():
    assert pairs_of(Net) == (FoldablePair("conv", "norm", 1e-5),)


@pytest.mark.parametrize(
    "kind",
    [
        ReadTwice,
        ReadBeforeInPlace,
        ReadThroughAView,
        ReadInAList,
        Answered,
        NormedTwice,
        ConvolvedTwice,
        NormFirst,
        OfItsOwnKind,
        NotAffine,
        OfTheBatch,
    ],
)
def test_whatever_else_reads_it_or_runs_twice_forbids_it(kind):
    assert pairs_of(kind) == ()


def test_another_module_runs_while_pairs_are_looked_for():
    """The two meet inside the module's forward: whatever that patches for the process, the other would run into."""
    meeting = Barrier(2, timeout=WAIT_S)

    class Meeting(Net):
        def forward(self, images):
            meeting.wait()  # from here on the other one runs ...
            meeting.wait()  # ... and has ended
            return super().forward(images)

    def run(module, images):
        meeting.wait()
        try:
            with torch.inference_mode():
                return module(images)
        finally:
            meeting.wait()

    other, images = Net().eval(), torch.ones(2, 3, 8, 8)
    with ThreadPoolExecutor(2) as threads:
        pairs = threads.submit(foldable_pairs, Meeting().to("meta").eval(), (8, 8))
        answer = threads.submit(run, other, images)
        assert answer.result(WAIT_S).shape == (2, 4, 8, 8)
        assert pairs.result(WAIT_S) == (FoldablePair("conv", "norm", 1e-5),)
