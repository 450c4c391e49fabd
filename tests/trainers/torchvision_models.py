"""Models of torchvision as training scripts make them, and as torch exports them."""

import warnings

import torch
from PIL import Image
from torch import nn
from torchvision import models

from tests.trainers.telling_apart import LABELS, PREPARE, SIZE, begin, finish


def trained(architecture, images):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = begin(getattr(models, architecture)(weights=None, num_classes=len(LABELS)))
        optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
        loss = nn.functional.cross_entropy(network(torch.randn(6, 3, SIZE, SIZE)), torch.tensor([0, 1, 2, 0, 1, 2]))
    loss.backward()
    optimizer.step()
    return finish(network, [each for each in network.modules() if isinstance(each, nn.Linear)][-1], prepared(images))


def prepared(images):
    return torch.stack([PREPARE(Image.open(image).convert("RGB")) for image in images])


def export(network, file):
    torch.onnx.export(network, (torch.zeros(1, 3, SIZE, SIZE),), file, input_names=["images"], verbose=False)


def ssd_of(label_count):
    """A detector that finds boxes of each label; its label 0 is the background."""
    torch.manual_seed(0)
    model = models.detection.ssdlite320_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=1 + label_count
    ).eval()
    head, seen = model.head.classification_head, []
    with torch.no_grad(), head.register_forward_hook(lambda _, __, logits: seen.append(logits)):
        model([torch.rand((3, 96, 128), generator=torch.Generator().manual_seed(0))])
        for branch in head.module_list:
            branch[-1].weight.mul_(2 / seen[0].std())
            branch[-1].bias[:: 1 + label_count] += 6  # the background is likelier
    return model


def export_ssd(model, pixels, file, *, is_list=False):
    """``pixels``: (3, height, width), the only size that the graph takes."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        asked = ([pixels],) if is_list else (pixels.unsqueeze(0),)
        torch.onnx.export(model, asked, file, dynamo=False, opset_version=17)
