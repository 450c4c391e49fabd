"""What a module does, call by call: with any number of images, and refused where that cannot be said."""

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from experts.backends.onednn.recording import recorded
from experts.errors import Unrecordable


def run_recorded(module, images, outputs=("answer",)):
    """The module's recording, run on real weights."""
    meta = type(module)().to("meta").eval().requires_grad_(False)
    found = recorded(meta, tuple(images.shape[2:]), outputs, torch.float32)
    weights = module.state_dict()
    graph = GraphModule(nn.Module(), found.graph)
    with torch.inference_mode():
        return graph.forward(images, *(weights[name] for name in found.weights.values()))


class Plain(nn.Module):
    """A convolution, sums and views, and a number that follows that of the images."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.linear = nn.Linear(16, 5)

    def forward(self, images):
        found = self.conv(images)
        found += found.mean(dim=(2, 3), keepdim=True)
        left, right = found.chunk(2, dim=1)
        found = torch.cat([left.sigmoid(), right[:, :, :, :]], dim=1)
        rows = found.reshape(found.shape[0] * 4, -1)[: 4 * len(images)]
        return self.linear(rows[:, :16]).view(images.shape[0], 4, 5).mT


class Answering(Plain):
    """It answers with a mapping."""

    def forward(self, images):
        answer = super().forward(images)
        return {"other": answer * 2, "answer": answer}


class Copying(Plain):
    """It copies a convolution's answer, which lies channels last, to lie otherwise, and writes to the copy."""

    def forward(self, images):
        found = self.conv(images)
        copy = found.contiguous()
        copy += 1
        return torch.cat([found, copy], 1)


class Stacked(Plain):
    """A tensor of its own making, by the number of images; written to."""

    def forward(self, images):
        made = torch.zeros(images.size(0) + 1, 3, device=images.device)
        made[1:] = images.mean(dim=(2, 3))
        return made


class Asking(Plain):
    """Its way depends on the number of images."""

    def forward(self, images):
        return super().forward(images) if len(images) == 2 else images


class Halving(Plain):
    """A number that follows that of the images and is no whole one."""

    def forward(self, images):
        return images.mean() * (0.5 * len(images))


class Foreign(Plain):
    """It reads a tensor that is no weight."""

    def __init__(self):
        super().__init__()
        self.kept = [torch.ones(1, device="meta")]

    def forward(self, images):
        return images.mean() * self.kept[0]


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("module", [Plain, Stacked, Copying])
def test_a_recording_does_what_the_module_did_for_any_number_of_images(module, count):
    made = module().eval()
    images = torch.randn(count, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    with torch.inference_mode():
        assert torch.equal(run_recorded(made, images)[0], made(images))


def test_of_a_mapping_those_are_answered_that_are_asked_for():
    made = Answering().eval()
    images = torch.randn(3, 3, 4, 4)
    found = run_recorded(made, images, ("answer", "other"))
    with torch.inference_mode():
        expected = made(images)
    assert torch.equal(found[0], expected["answer"])
    assert torch.equal(found[1], expected["other"])


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Asking, "makes other calls for another number of images"),
        (Halving, "depends on the number of images and is no whole number"),
        (Foreign, "neither a weight nor made from the images"),
    ],
)
def test_what_cannot_be_said_for_any_number_of_images_is_refused(module, reason):
    with pytest.raises(Unrecordable, match=reason):
        recorded(module().to("meta").eval(), (4, 4), ("answer",), torch.float32)
