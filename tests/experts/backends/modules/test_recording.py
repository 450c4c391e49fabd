"""A module whose calls depend on the number of images is refused; what can be recorded is run in test_quantising."""

import pytest
import torch
from torch import nn

from experts.backends.modules.recording import recorded
from experts.errors import Unrecordable


class Calling(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.forward = call


OTHER_CALLS, FOREIGN = "makes other calls for another number of images", torch.ones(1, device="meta")


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda images: images.relu() if len(images) == 2 else images, OTHER_CALLS),
        (lambda images: images.relu() if len(images) == 2 else images.sigmoid(), OTHER_CALLS),
        (lambda images: torch.cat([images] * len(images)), OTHER_CALLS),
        (lambda images: images.mean() * (0.5 * len(images)), "depends on the number of images and is no whole number"),
        (lambda images: images.mean() * FOREIGN, "neither a weight nor made from the images"),
    ],
)
def test_program_that_depends_on_the_number_of_images_is_refused(call, reason):
    with pytest.raises(Unrecordable, match=reason):
        recorded(Calling(call).to("meta").eval(), (4, 4), ("answer",), torch.float32)
