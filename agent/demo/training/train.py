"""From labelled crops to the experts and routes of a line, written as weights files."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from agent.demo.rendering.components import COMPONENTS, OK, Detector
from agent.demo.training.anomalies import TrainedAnomaly, train_anomaly
from agent.demo.training.classifiers import JointPlan, OwnPlan, all_labels, train_classifier, train_jointly
from agent.demo.training.detectors import BoxDetector, concerned, train_head, write_detector
from agent.demo.training.learning import beside_one_another, torch_threads
from agent.demo.training.network import resnet
from agent.demo.training.trunk import stored_network
from experts.graph import RouteStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import nn

    from agent.demo.training.crops import LabelledCrop
    from experts.expert import Expert

    Progress = Callable[[str, int, int], None]  # stage, done, total

MIN_SCORE = 0.5  # of a classifier's ok
ORIENTED_LABELS = frozenset({"reversed", "rotated", "flipped", "mirrored", "polarity"})


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """Training of a line's experts.

    ``joint``: None for the stored network. ``detectors``: by component. ``measured``: components with an anomaly
    expert alone.
    """

    own: OwnPlan
    joint: JointPlan | None
    detectors: Mapping[str, Detector]
    measured: frozenset[str]


@dataclass(frozen=True, slots=True)
class TrainedLine:
    """Experts and routes of a line. ``seconds``: time per stage."""

    experts: tuple[Expert, ...]
    routes: Mapping[str, tuple[RouteStep, ...]]
    seconds: Mapping[str, float]
    anomalies: tuple[TrainedAnomaly, ...]


def synthetic_plan() -> TrainingPlan:
    """For rendered crops: parts have an upper side, and the stored network has seen these components."""
    return TrainingPlan(
        OwnPlan(epochs=1, learning_rate=1e-4, turns=False),
        joint=None,
        detectors={component.name: component.detector for component in COMPONENTS if component.detector},
        measured=frozenset(component.name for component in COMPONENTS if component.measured),
    )


def real_plan(crops: Sequence[LabelledCrop]) -> TrainingPlan:
    """For crops of real boards: classifiers only; turned and mirrored unless a label speaks of orientation.

    No anomaly expert: this training takes good parts that lie alike in their crops, and enough of them; real crops
    promise neither. The stored network does not do for them: on DeepPCB its frozen trunk ends at 0.84 of the verdicts.
    """
    turns = ORIENTED_LABELS.isdisjoint({crop.label for crop in crops})
    joint = JointPlan((48, 48, 64), crops_centre=True, turns=turns, learning_rate=3e-3, batch_size=64)
    return TrainingPlan(OwnPlan(epochs=2, learning_rate=2e-4, turns=turns), joint, {}, frozenset())


def train_experts(
    crops: Sequence[LabelledCrop], plan: TrainingPlan, folder: Path, progress: Progress, threads: int, seed: int
) -> TrainedLine:
    """Train all experts that these crops call for; writes ``folder/<kind>/<name>.safetensors`` or ``.onnx``.

    ``progress(stage, done, total)`` is called from this thread, often. The same crops, plan, seed and number of threads
    give the same weights on one machine.
    """
    seconds: dict[str, float] = {}

    @contextmanager
    def timed(stage: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        seconds[stage] = time.monotonic() - started

    by_component: dict[str, list[LabelledCrop]] = {}
    for crop in crops:
        by_component.setdefault(crop.component, []).append(crop)
    measured = {name: own for name, own in by_component.items() if name in plan.measured}
    classified = {name: own for name, own in by_component.items() if name not in plan.measured}
    labels = {name: classifier_labels(own, plan.detectors.get(name)) for name, own in classified.items()}
    experts: list[Expert] = []
    with torch_threads(threads), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with timed("trunk"):
            if plan.joint is None:
                joint = stored_network()
            else:
                together = [crop for own in classified.values() for crop in own]
                network = resnet(len(all_labels(labels)))
                joint = train_jointly(network, together, labels, plan.joint, seed, progress)

        def train(numbered: tuple[int, str]) -> Expert:
            number, component = numbered
            own = classified[component]
            return train_classifier(joint, own, labels[component], plan.own, folder, seed + number)

        with timed("classifiers"):
            for expert in beside_one_another(train, enumerate(classified)):
                experts.append(expert)
                progress("classifiers", len(experts), len(classified))
        torch.manual_seed(seed)  # the threads drew from it in any order
        with timed("detectors"):
            experts += train_detectors(joint.network, crops, plan.detectors, folder, seed)
        with timed("anomaly expert"):
            anomalies = tuple(train_anomaly(joint.network, own, folder, seed) for own in measured.values())
    routes = {component: route(component, plan) for component in by_component}
    return TrainedLine((*experts, *(each.expert for each in anomalies)), routes, seconds, anomalies)


def classifier_labels(crops: Sequence[LabelledCrop], detector: Detector | None) -> tuple[str, ...]:
    """A component's labels, ok first, without its detector's defect."""
    defects = {crop.label for crop in crops} - {OK}
    return (OK, *sorted(defects - {detector.defect} if detector else defects))


def train_detectors(
    network: nn.Module, crops: Sequence[LabelledCrop], shared_by: Mapping[str, Detector], folder: Path, seed: int
) -> list[Expert]:
    """A detector for each question that some component of these crops asks."""
    asked = [
        (BoxDetector(network, len(each.labels)), each, chosen, seed)
        for each in Detector
        if (chosen := concerned(crops, shared_by, each))
    ]
    list(beside_one_another(lambda each: train_head(*each), asked))
    return [write_detector(module, detector, folder) for module, detector, _, _ in asked]


def route(component: str, plan: TrainingPlan) -> tuple[RouteStep, ...]:
    """A measured part's anomaly expert judges it alone; others have a classifier first, then a detector if any."""
    if component in plan.measured:
        return (RouteStep(f"ano/{component}", frozenset({OK})),)
    first = RouteStep(f"cls/{component}", frozenset({OK}), MIN_SCORE)
    detector = plan.detectors.get(component)
    return (first,) if detector is None else (first, RouteStep(f"det/{detector}", frozenset({detector.labels[0]})))
