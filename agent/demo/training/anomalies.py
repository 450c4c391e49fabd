"""Training of the anomaly expert: the distribution of good parts at each place, in one pass and without a gradient.

The classifiers' frozen trunk describes each place of a picture by its stages' features, brought to one grid and to
fewer dimensions. The features of good parts are taken as normally distributed at each place. A new part's anomaly
there is its Mahalanobis distance from the mean (PaDiM: Defard, Setkov, Loesch and Audigier, "PaDiM: a Patch
Distribution Modeling Framework for Anomaly Detection and Localization", ICPR 2021, section 3, with a random orthogonal
projection in the place of randomly chosen dimensions).

Defects are not trained on. They only help to find a threshold, beside good parts that were kept back.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from agent.demo.rendering.components import OK
from agent.demo.training.crops import divide
from agent.demo.training.network import EVALUATION_BATCH, INPUT_PX, Trunk, normalised, pictures, write_graph
from experts.expert import ANOMALY_LABELS, Expert, InputSpec, Task
from experts.packed.sources import sha256_of
from experts.thresholds.binding import threshold_of
from experts.thresholds.learning import Meter, learned

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from agent.demo.training.crops import LabelledCrop

REGULARISATION = 0.01  # of each covariance's diagonal, as in the paper
SHIFTS_PX = ((0, 0), (1, 1), (-1, -1))  # copies of each good part: cameras do not stand still
DIMENSIONS = 80
THRESHOLD_FRACTION = 0.5  # of the good parts, kept back from training for the threshold
FALSE_ALARMS = 0.01  # rate among them that the threshold may allow


@dataclass(frozen=True, slots=True)
class TrainedAnomaly:
    """One component's anomaly expert.

    ``samples``: counts of good crops for ``training``, and of ``good`` and ``bad`` ones for the ``threshold``;
    ``expected``: rate of false alarms that they warrant.
    """

    expert: Expert
    samples: Mapping[str, float]


def train_anomaly(network: nn.Module, crops: Sequence[LabelledCrop], folder: Path, seed: int) -> TrainedAnomaly:
    """Train one component's expert, write it below ``folder``, and learn its threshold from that file."""
    name = f"ano/{crops[0].component}"
    pixels = InputSpec(INPUT_PX, INPUT_PX)
    expert = Expert(name, "onnx", folder / f"{name}.onnx", ANOMALY_LABELS, pixels, task=Task.ANOMALY)
    training, kept_back = divide([crop for crop in crops if crop.label == OK], THRESHOLD_FRACTION, seed)
    write_graph(PatchGaussians(network, training, seed), "anomaly_map", expert.weights)
    meter = Meter(expert)
    good = [meter.score(crop.pixels) for crop in kept_back]
    bad = [meter.score(crop.pixels) for crop in crops if crop.label != OK]
    found = learned(good, bad, FALSE_ALARMS)
    expert = replace(expert, threshold=found.rates.threshold, threshold_of=threshold_of(expert, sha256_of(expert)))
    samples = {"training": len(training), "good": len(good), "bad": len(bad)}
    rates = {"threshold": found.rates.threshold, "expected": found.expected}
    return TrainedAnomaly(expert, samples | rates)


class PatchGaussians(nn.Module):  # type: ignore[misc]  # torch is not followed by mypy here
    """Distribution of good parts at each place. Answers normalised pictures with maps of Mahalanobis distances."""

    def __init__(self, network: nn.Module, good: Sequence[LabelledCrop], seed: int) -> None:
        super().__init__()
        self.trunk = Trunk(deepcopy(network)).eval()
        images = normalised(pictures(good))
        with torch.no_grad():
            maps = self.trunk(images[:1])
        self.grid_px = maps[1].shape[2]
        channels, generator = sum(each.shape[1] for each in maps), torch.Generator().manual_seed(seed)
        directions = torch.linalg.qr(torch.randn(channels, DIMENSIONS, generator=generator)).Q
        self.register_buffer("projection", directions.T.contiguous()[:, :, None, None])
        shifted = torch.cat([torch.roll(images, shift, (2, 3)) for shift in SHIFTS_PX])
        with torch.no_grad():
            features = torch.cat([self.features(chunk) for chunk in shifted.split(EVALUATION_BATCH)], 1).double()
        mean = features.mean(1, keepdim=True)
        centred = features - mean
        spread = centred.transpose(1, 2) @ centred / (centred.shape[1] - 1) + REGULARISATION * torch.eye(DIMENSIONS)
        self.register_buffer("mean", mean.float())
        whitening = torch.linalg.cholesky(torch.linalg.inv(spread))  # L L^T = the inverse: |x L| measures
        self.register_buffer("whitening", whitening.float().contiguous())

    def features(self, images: Tensor) -> Tensor:
        """Each place's features in each picture: (places, pictures, DIMENSIONS)."""
        fine, middle, coarse = self.trunk(images)
        side = (self.grid_px, self.grid_px)
        stacked = torch.cat(
            [
                functional.avg_pool2d(fine, fine.shape[2] // self.grid_px),
                middle,
                functional.interpolate(coarse, size=side, mode="bilinear", align_corners=False),
            ],
            1,
        )
        return functional.conv2d(stacked, self.projection).flatten(2).permute(2, 0, 1)

    def distances(self, images: Tensor) -> Tensor:
        """Each place's distance from the mean in each picture, in the measure of its spread: (places, pictures)."""
        whitened = torch.matmul(self.features(images) - self.mean, self.whitening)
        return whitened.square().sum(2).sqrt()

    def forward(self, images: Tensor) -> Tensor:
        grid = self.distances(images).permute(1, 0).reshape(-1, 1, self.grid_px, self.grid_px)
        return functional.interpolate(grid, size=(INPUT_PX, INPUT_PX), mode="bilinear", align_corners=False)
