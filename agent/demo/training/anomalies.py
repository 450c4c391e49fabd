"""Training of the anomaly expert: what good parts look like, place by place, in one pass and without a gradient.

The classifiers' frozen trunk tells at each place of a picture what is there: its stages' features, brought to one grid
and to fewer dimensions. Over good parts these are taken as normally distributed at each place, and how far a new part's
lie from that mean, in the measure of that spread, is how strange it is there (PaDiM: Defard, Setkov, Loesch and
Audigier, "PaDiM: a Patch Distribution Modeling Framework for Anomaly Detection and Localization", ICPR 2021, section 3,
with a random orthogonal projection in the place of randomly chosen dimensions).

Defects take no part in it. They only help to find a threshold, beside good parts that were kept back.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from agent.demo.rendering.components import OK
from agent.demo.training.classifiers import EVALUATION_BATCH, Trunk, normalised, pictures
from agent.demo.training.crops import divide
from agent.demo.training.graphs import write_graph
from experts.expert import ANOMALY_LABELS, Expert, InputSpec, Task
from experts.packed.sources import sha256_of
from experts.thresholds.binding import threshold_of
from experts.thresholds.learning import learned
from experts.thresholds.measuring import Meter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from agent.demo.training.crops import LabelledCrop
    from experts.thresholds.learning import Learned

MAP_OUTPUT = "anomaly_map"
REGULARISATION = 0.01  # of each covariance's diagonal, as in the paper
SHIFTS_PX = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))  # copies of each good part: cameras do not stand still


@dataclass(frozen=True, slots=True)
class AnomalyPlan:
    """Components that get an anomaly expert, and its samples.

    ``threshold_fraction``: of the good parts, kept back from training for the threshold; ``false_alarms``: which rate
    of them the threshold may allow.
    """

    components: frozenset[str] = frozenset()
    input_px: int = 64
    dimensions: int = 80
    threshold_fraction: float = 0.5
    false_alarms: float = 0.01


@dataclass(frozen=True, slots=True, eq=False)
class AnomalyCrops:
    """One component's crops: good ones to learn from, and good and bad ones to find a threshold with."""

    component: str
    training: tuple[LabelledCrop, ...]
    good: tuple[LabelledCrop, ...]
    bad: tuple[LabelledCrop, ...]


def anomaly_crops(crops: Sequence[LabelledCrop], plan: AnomalyPlan, seed: int) -> tuple[AnomalyCrops, ...]:
    """For each component with an anomaly expert what it is made from; no source's good parts are on both sides."""
    found = []
    for component in sorted(plan.components & {crop.component for crop in crops}):
        own = [crop for crop in crops if crop.component == component]
        parts = divide([crop for crop in own if crop.label == OK], plan.threshold_fraction, seed)
        bad = tuple(crop for crop in own if crop.label != OK)
        found.append(AnomalyCrops(component, parts.training, parts.held_out, bad))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class TrainedAnomaly:
    """One component's anomaly expert, and how many crops it is made from."""

    component: str
    expert: Expert
    learned: Learned
    training: int
    good: int
    bad: int


def train_anomaly(
    network: nn.Module, crops: AnomalyCrops, plan: AnomalyPlan, directory: Path, seed: int
) -> TrainedAnomaly:
    """Train one component's expert, write it below ``directory``, and learn its threshold from that file."""
    pixels = InputSpec(plan.input_px, plan.input_px)
    name = f"ano/{crops.component}"
    expert = Expert(name, "onnx", directory / f"{name}.onnx", ANOMALY_LABELS, pixels, task=Task.ANOMALY)
    write_graph(train_gaussians(network, crops, plan, seed), plan.input_px, MAP_OUTPUT, expert.weights)
    meter = Meter(expert)
    good, bad = ([meter.score(crop.pixels) for crop in side] for side in (crops.good, crops.bad))
    found = learned(good, bad, plan.false_alarms)
    evidence = threshold_of(expert, sha256_of(expert))
    expert = replace(expert, threshold=found.rates.threshold, threshold_of=evidence)
    return TrainedAnomaly(crops.component, expert, found, len(crops.training), len(good), len(bad))


class PatchGaussians(nn.Module):  # type: ignore[misc]  # torch is not followed by mypy here
    """Distribution of good parts at each place. Answers normalised pictures with an anomaly map.

    The map's numbers are Mahalanobis distances; untrained, the means are 0 and the spreads 1.
    """

    def __init__(self, network: nn.Module, input_px: int, dimensions: int, generator: torch.Generator) -> None:
        super().__init__()
        self.trunk = Trunk(network)
        self.input_px = input_px
        with torch.no_grad():
            maps = self.trunk(torch.zeros(1, 3, input_px, input_px))
        self.grid_px = maps[1].shape[2]
        channels = sum(each.shape[1] for each in maps)
        self.register_buffer("projection", orthogonal(channels, dimensions, generator)[:, :, None, None])
        places = self.grid_px**2
        self.register_buffer("mean", torch.zeros(places, 1, dimensions))
        self.register_buffer("whitening", torch.eye(dimensions).repeat(places, 1, 1))

    def features(self, images: Tensor) -> Tensor:
        """Each place's features in each picture: (places, pictures, dimensions)."""
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
        side = (self.input_px, self.input_px)
        return functional.interpolate(grid, size=side, mode="bilinear", align_corners=False)

    def learn(self, images: Tensor) -> None:
        with torch.no_grad():
            features = torch.cat([self.features(chunk) for chunk in images.split(EVALUATION_BATCH)], 1).double()
        mean = features.mean(1, keepdim=True)
        centred = features - mean
        count, dimensions = centred.shape[1:]
        covariance = centred.transpose(1, 2) @ centred / (count - 1) + REGULARISATION * torch.eye(dimensions)
        self.mean.copy_(mean)
        self.whitening.copy_(torch.linalg.cholesky(torch.linalg.inv(covariance)))  # L L^T = the inverse: |x L| measures


def orthogonal(channels: int, dimensions: int, generator: torch.Generator) -> Tensor:
    """A random projection onto so many orthogonal directions: (dimensions, channels)."""
    return torch.linalg.qr(torch.randn(channels, dimensions, generator=generator)).Q.T.contiguous()


def train_gaussians(network: nn.Module, crops: AnomalyCrops, plan: AnomalyPlan, seed: int) -> PatchGaussians:
    """One component's model, from its good crops alone."""
    generator = torch.Generator().manual_seed(seed)
    model = PatchGaussians(deepcopy(network), plan.input_px, plan.dimensions, generator)
    model.eval()
    images = normalised(pictures(crops.training, plan.input_px))
    model.learn(torch.cat([torch.roll(images, shift, (2, 3)) for shift in SHIFTS_PX]))
    return model
