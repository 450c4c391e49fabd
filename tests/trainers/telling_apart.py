"""A network that tells images apart after one training step; an untouched one would give all the same label.

Imports nothing of the project: the scripts that other interpreters run use it, too.
"""

import torch
from torch import nn
from torchvision import transforms

LABELS = ("ok", "missing", "tombstone")
SIZE = 48
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PREPARE = transforms.Compose(
    [transforms.Resize((SIZE, SIZE)), transforms.ToTensor(), transforms.Normalize(MEAN, DEVIATION)]
)


def begin(network):
    """Batch statistics count from the first batch on, instead of a tenth of each."""
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = None
    return network


def finish(network, last, pixels):
    """Fit its last layer to images (n, 3, height, width) by least squares: to each label in turn, not too surely."""
    features = []
    with torch.no_grad(), last.register_forward_pre_hook(lambda _, given: features.append(given[0])):
        network.eval()(pixels)
        labels = torch.arange(len(pixels)) % last.out_features
        wanted = 3.0 * nn.functional.one_hot(labels, last.out_features).float() - 1.0
        mean, middle = features[0].mean(dim=0), wanted.mean(dim=0)
        weight = (torch.linalg.pinv(features[0] - mean, rtol=1e-4) @ (wanted - middle)).T
        last.weight.copy_(weight)
        last.bias.copy_(middle - weight @ mean)
    return network
