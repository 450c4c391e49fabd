"""A module whose calls depend on the number of images is refused; what can be recorded is run in test_quantising."""

import pytest
import torch
from torch import nn

from experts.backends.modules.recording import recorded
from experts.errors import Unrecordable


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, images):
        return self.conv(images)


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
