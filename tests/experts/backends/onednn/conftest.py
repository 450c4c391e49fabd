"""Architectures in eight bits, call by call against float32: made-up weights let little through to the last answers, so
that these alone would not tell whether a call in the middle is right."""

import pytest
import torch

from experts.backends.onednn.calibrating import observed
from experts.backends.onednn.calls import Arrangements, bound
from experts.backends.onednn.form import BlockedWeight, OnednnModule, OnednnSkeleton, fused_module
from experts.backends.onednn.fusion import FusedCall
from experts.backends.onednn.layouts import reference
from experts.backends.onednn.quantised_calls import Levels
from experts.backends.onednn.trial import made_up

IMAGES = 2


class Noting:
    """A call that keeps a copy of what it answers with."""

    def __init__(self, call, answers, name):
        self._call, self._answers, self._name = call, answers, name

    def __call__(self, *tensors):
        answer = self._call(*tensors)
        self._answers[self._name] = answer.clone()
        return answer


class EightBits:
    """A folded module's form of eight bits, with made-up weights. ``plain``: what it is fused to in float32."""

    def __init__(self, module, plain, sample, outputs):
        generator = torch.Generator().manual_seed(0)
        images = torch.randn((IMAGES, 3, *plain.size), generator=generator)
        self._images = images.contiguous(memory_format=torch.channels_last)
        self._weights = {name: made_up(each, generator, torch.float32) for name, each in sample.items()}
        self._plain, self.fused = plain, fused_module(module, plain.size, outputs, torch.int8)
        shapes = self.fused.shapes
        self._form = OnednnModule(
            self.fused, {name: BlockedWeight.of(name, reference(shapes[name])) for name in shapes}
        )
        ranges = observed(self._plain.graph, self._plain.inputs, self._weights, [self._images]).ranges
        self.tensors = self._form.tensors(self._weights, ranges)

    @property
    def calls(self):
        """Those in eight bits."""
        return [part for part in self.fused.inputs if isinstance(part, FusedCall) and part.quantisation]

    def errors(self):
        """Of each call, how far it answers from the same one in float32, in the mean; of its answers' deviation."""
        expected = self._plain_answers()
        return {
            name: float((each - expected[name]).abs().mean() / expected[name].std().clamp_min(1e-6))
            for name, each in self._answers().items()
        }

    def _plain_answers(self):
        found = {}
        inputs = [
            self._weights[part] if isinstance(part, str) else self._noting(part, found) for part in self._plain.inputs
        ]
        with torch.inference_mode():
            self._plain.graph.forward(self._images, *inputs)
        return found

    def _noting(self, call, found):
        bias = None if call.bias is None else self._weights[call.bias]
        made = bound(call, Arrangements(call.shape, is_blocked=False), self._weights[call.weight], bias)
        return Noting(made, found, call.weight) if call.owns_weight else made

    def _answers(self):
        """Brought back from their levels."""
        found = {}
        skeleton = OnednnSkeleton(
            self._form,
            lambda expert, answers, batch: (),
            lambda call, made: Noting(made, found, call.weight) if call.owns_weight else made,
        )
        skeleton.bind(self.tensors)
        with torch.inference_mode():
            skeleton.outputs(self._images.unbind())
        for call in self.calls:
            if call.quantisation.answer is not None:
                found[call.weight] = Levels(self.tensors["levels"], call.quantisation.answer).back(found[call.weight])
        return found


@pytest.fixture
def eight_bits():
    return EightBits
