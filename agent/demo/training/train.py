"""From labelled crops to the experts and routes of a line, written as weights files.

The joint network's trunk (everything before ``layer4``) is frozen, running statistics included. Each component's
``layer4`` and head are trained on the trunk's features, from the joint ones on. So the classifiers of a line share
their trunk bit for bit, and each still owns three quarters of its bytes.
"""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch.nn import functional

from agent.demo.rendering.components import COMPONENTS, OK
from agent.demo.training.anomalies import TrainedAnomaly, train_anomaly
from agent.demo.training.detectors import DETECTORS, train_detectors
from agent.demo.training.learning import beside_one_another, torch_threads
from agent.demo.training.network import (
    ARCHITECTURE,
    EVALUATION_BATCH,
    INPUT_PX,
    STEM,
    CropFeatures,
    Trunk,
    fast_math,
    narrowed,
    pictures,
    resnet,
    varied,
)  # fmt: skip
from agent.demo.training.trunk import Descent, all_labels, batches_of, stored_network, target, train_jointly
from experts.expert import Expert, InputSpec
from experts.graph import RouteStep
from experts.llm.training.descent import descend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from agent.demo.training.crops import LabelledCrop

MIN_SCORE = 0.5  # of a classifier's ok
ORIENTED_LABELS = frozenset({"reversed", "rotated", "flipped", "mirrored", "polarity"})
MEASURED = frozenset(component.name for component in COMPONENTS if component.measured)
OWN_RENDERED = Descent((64,), learning_rate=1e-4, batch_size=32)  # the stored network has seen these components
JOINT = Descent((64,), learning_rate=6e-3, batch_size=64, crops_centre=True)
OWN = Descent((64,), learning_rate=2e-4, batch_size=32)
SHOWN_JOINTLY, SHOWN_ALONE = 15_000, 5_000  # crops of all epochs together: fewer crops are shown more often
MOST_JOINTLY, MOST_ALONE = 6, 2  # epochs


@dataclass(frozen=True, slots=True)
class TrainedLine:
    """Experts and routes of a line. ``seconds``: time per stage."""

    experts: tuple[Expert, ...]
    routes: Mapping[str, tuple[RouteStep, ...]]
    seconds: Mapping[str, float]
    anomalies: tuple[TrainedAnomaly, ...]


def train_experts(
    crops: Sequence[LabelledCrop],
    folder: Path,
    progress: Callable[[str, int, int], None],
    threads: int,
    seed: int,
    *,
    are_rendered: bool,
) -> TrainedLine:
    """Train all experts that these crops call for; writes ``folder/<kind>/<name>.safetensors`` or ``.onnx``.

    Crops of real boards get classifiers only, turned and mirrored unless a label speaks of orientation. An anomaly
    expert takes good parts that lie alike in their crops, and enough of them; real crops promise neither. The stored
    network does not do for them: on DeepPCB its frozen trunk ends at 0.84 of the verdicts.

    ``progress(stage, done, total)`` is called from this thread, often. The same crops, seed and number of threads give
    the same weights on one machine.
    """
    seconds: dict[str, float] = {}

    @contextmanager
    def timed(stage: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        seconds[stage] = time.monotonic() - started

    detectors, measured = (DETECTORS, MEASURED) if are_rendered else ({}, frozenset[str]())
    parts: defaultdict[str, list[LabelledCrop]] = defaultdict(list)
    for crop in crops:
        parts[crop.component].append(crop)
    labels: dict[str, tuple[str, ...]] = {}
    routes: dict[str, tuple[RouteStep, ...]] = {}
    for name, own in parts.items():
        detector = detectors.get(name)
        if name in measured:
            routes[name] = (RouteStep(f"ano/{name}", frozenset({OK})),)
            continue
        labels[name] = (OK, *sorted({crop.label for crop in own} - {OK, detector and detector.defect}))
        shared = (RouteStep(f"det/{detector}", frozenset({detector.labels[0]})),) if detector else ()
        routes[name] = (RouteStep(f"cls/{name}", frozenset({OK}), MIN_SCORE), *shared)
    experts: list[Expert] = []
    seen: list[CropFeatures] = []
    with torch_threads(threads), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with timed("trunk"):
            if are_rendered:
                joint, plan = stored_network(), OWN_RENDERED
            else:
                turns = ORIENTED_LABELS.isdisjoint({crop.label for crop in crops})
                together = [crop for name in labels for crop in parts[name]]
                first = JOINT._replace(
                    turns=turns, sides_px=(48,) * (epochs(SHOWN_JOINTLY, together, MOST_JOINTLY) - 1) + (64,)
                )
                joint = train_jointly(resnet(all_labels(labels)), together, labels, first, seed, progress)
                plan = OWN._replace(turns=turns, sides_px=(64,) * epochs(SHOWN_ALONE, together, MOST_ALONE))

        def train(numbered: tuple[int, str]) -> tuple[Expert, CropFeatures]:
            number, name = numbered
            return train_classifier(joint, parts[name], labels[name], plan, folder, seed + number)

        with timed("classifiers"):
            for expert, own_seen in beside_one_another(train, enumerate(labels)):
                experts.append(expert)
                seen.append(own_seen)
                progress("classifiers", len(experts), len(labels))
        torch.manual_seed(seed)  # the threads drew from it in any order
        with timed("detectors"):
            experts += train_detectors(joint, seen, folder, seed) if are_rendered else []
        with timed("anomaly expert"):
            anomalies = tuple(
                train_anomaly(joint, own, folder, seed) for name, own in parts.items() if name in measured
            )
    return TrainedLine((*experts, *(each.expert for each in anomalies)), routes, seconds, anomalies)


def epochs(shown: int, crops: Sequence[LabelledCrop], most: int) -> int:
    return min(max(round(shown / len(crops)), 1), most)


def train_classifier(
    joint: nn.Module, crops: Sequence[LabelledCrop], labels: tuple[str, ...], plan: Descent, folder: Path, seed: int
) -> tuple[Expert, CropFeatures]:
    """One component's expert, written below ``folder``: its layer4 and head are trained, from the joint ones on."""
    generator = torch.Generator().manual_seed(seed)
    network = narrowed(joint, labels)
    trunk, (images, shifts_px) = Trunk(network), varied(pictures(crops), plan.turns, generator)
    with torch.no_grad(), fast_math():
        features = torch.cat([trunk(chunk)[-1] for chunk in images.split(EVALUATION_BATCH)]).float()
    targets = torch.tensor([labels.index(target(crop, labels)) for crop in crops])

    def loss(picked: Tensor) -> Tensor:
        with fast_math():
            logits = network.fc(network.layer4(features[picked]).mean((2, 3))).float()
        return functional.cross_entropy(logits, targets[picked])

    batches = [picked for _ in plan.sides_px for picked in batches_of(len(crops), plan, generator)]
    descend([*network.layer4.parameters(), *network.fc.parameters()], batches, loss, plan.learning_rate)
    name = f"cls/{crops[0].component}"
    file = folder / f"{name}.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in network.state_dict().items()}, file)
    expert = Expert(name, ARCHITECTURE, file, labels, InputSpec(INPUT_PX, INPUT_PX), stem=STEM)
    return expert, CropFeatures(crops, features, shifts_px)
