"""From labelled crops to the experts and routes of a line, written as weights files."""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from agent.demo.rendering.components import COMPONENTS, OK
from agent.demo.training.anomalies import TrainedAnomaly, train_anomaly
from agent.demo.training.classifiers import Descent, all_labels, train_classifier, train_jointly
from agent.demo.training.detectors import train_detectors
from agent.demo.training.learning import beside_one_another, torch_threads
from agent.demo.training.network import resnet
from agent.demo.training.trunk import stored_network
from experts.graph import RouteStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from agent.demo.training.crops import LabelledCrop
    from experts.expert import Expert

MIN_SCORE = 0.5  # of a classifier's ok
ORIENTED_LABELS = frozenset({"reversed", "rotated", "flipped", "mirrored", "polarity"})
DETECTORS = {component.name: component.detector for component in COMPONENTS if component.detector}
MEASURED = frozenset(component.name for component in COMPONENTS if component.measured)
OWN_RENDERED = Descent((64,), learning_rate=1e-4, batch_size=32)  # the stored network has seen these components
JOINT = Descent((48, 48, 64), learning_rate=3e-3, batch_size=64, crops_centre=True)
OWN = Descent((64, 64), learning_rate=2e-4, batch_size=32)


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

    detectors, strange = (DETECTORS, MEASURED) if are_rendered else ({}, frozenset[str]())
    parts: defaultdict[str, list[LabelledCrop]] = defaultdict(list)
    for crop in crops:
        parts[crop.component].append(crop)
    labels: dict[str, tuple[str, ...]] = {}
    routes: dict[str, tuple[RouteStep, ...]] = {}
    for name, own in parts.items():
        detector = detectors.get(name)
        if name in strange:
            routes[name] = (RouteStep(f"ano/{name}", frozenset({OK})),)
            continue
        defects = {crop.label for crop in own} - {OK, detector and detector.defect}
        labels[name] = (OK, *sorted(defects))
        routes[name] = (RouteStep(f"cls/{name}", frozenset({OK}), MIN_SCORE),)
        if detector:
            routes[name] += (RouteStep(f"det/{detector}", frozenset({detector.labels[0]})),)
    experts: list[Expert] = []
    with torch_threads(threads), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with timed("trunk"):
            if are_rendered:
                joint, plan = stored_network(), OWN_RENDERED
            else:
                turns = ORIENTED_LABELS.isdisjoint({crop.label for crop in crops})
                network, plan = resnet(all_labels(labels)), OWN._replace(turns=turns)
                together = [crop for name in labels for crop in parts[name]]
                joint = train_jointly(network, together, labels, JOINT._replace(turns=turns), seed, progress)

        def train(numbered: tuple[int, str]) -> Expert:
            number, name = numbered
            return train_classifier(joint, parts[name], labels[name], plan, folder, seed + number)

        with timed("classifiers"):
            for expert in beside_one_another(train, enumerate(labels)):
                experts.append(expert)
                progress("classifiers", len(experts), len(labels))
        torch.manual_seed(seed)  # the threads drew from it in any order
        with timed("detectors"):
            experts += train_detectors(joint, crops, detectors, folder, seed)
        with timed("anomaly expert"):
            anomalies = tuple(train_anomaly(joint, own, folder, seed) for name, own in parts.items() if name in strange)
    return TrainedLine((*experts, *(each.expert for each in anomalies)), routes, seconds, anomalies)
