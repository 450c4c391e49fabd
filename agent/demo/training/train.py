"""From labelled crops to the experts and routes of a line, written as weights files."""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from agent.demo.rendering.components import OK, Detector, synthetic_components
from agent.demo.training import anomalies, classifiers, detectors
from agent.demo.training.anomalies import AnomalyPlan, TrainedAnomaly
from agent.demo.training.classifiers import ClassifierPlan, TrainedClassifier
from agent.demo.training.crops import divide
from agent.demo.training.detectors import DetectorPlan, TrainedDetector
from agent.demo.training.graphs import write_graph
from agent.demo.training.learning import beside_one_another, torch_threads
from agent.demo.training.trunk import stored_network
from experts.errors import ConfigError
from experts.expert import Expert, Fit, InputSpec, Prediction, Verdict
from experts.graph import ExpertGraph, Judgement, RouteStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from agent.demo.training.classifiers import ClassifierSet, JointNetwork
    from agent.demo.training.crops import LabelledCrop

    Progress = Callable[[str, int, int], None]  # stage, done, total

SCORE_CANDIDATES = (0.5, 0.45, 0.55, 0.4, 0.6, 0.35, 0.65, 0.7)  # nearest to 0.5 first
ORIENTED_LABELS = frozenset({"reversed", "rotated", "flipped", "mirrored", "polarity"})


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """Training of a line's experts. The validation part chooses ``min_score`` and is never trained on.

    ``is_rendered``: the stored network has seen these components, so the joint training is done.
    """

    classifiers: ClassifierPlan
    detectors: DetectorPlan
    anomalies: AnomalyPlan = field(default_factory=AnomalyPlan)
    is_rendered: bool = False
    validation_fraction: float = 0.1


@dataclass(frozen=True, slots=True)
class TrainedLine:
    """The experts of a line, and how good they are on crops set aside from training. ``seconds``: time per stage.

    The accuracies are those of classifiers and detectors; ``anomalies`` tell their own.
    """

    experts: tuple[Expert, ...]
    routes: Mapping[str, tuple[RouteStep, ...]]
    seconds: Mapping[str, float]
    verdict_accuracy: float
    label_accuracy: float
    anomalies: tuple[TrainedAnomaly, ...] = ()


def synthetic_plan() -> TrainingPlan:
    """For rendered crops: parts have an upper side, and fill their crops."""
    measured = frozenset(component.name for component in synthetic_components() if component.measured)
    shared_by = {component.name: component.detector for component in synthetic_components() if component.detector}
    own_stages = ClassifierPlan(crops_centre=False, turns=False, own_epochs=1, own_learning_rate=1e-4)
    return TrainingPlan(own_stages, DetectorPlan(shared_by), AnomalyPlan(measured), is_rendered=True)


def real_plan(crops: Sequence[LabelledCrop]) -> TrainingPlan:
    """For crops of real boards: classifiers only; turned and mirrored unless a label speaks of orientation.

    No anomaly expert: this training takes good parts that lie alike in their crops, and enough of them; real crops
    promise neither.
    """
    turns = ORIENTED_LABELS.isdisjoint({crop.label for crop in crops})
    return TrainingPlan(ClassifierPlan(turns=turns), DetectorPlan({}))


def train_experts(
    crops: Sequence[LabelledCrop], plan: TrainingPlan, directory: Path, progress: Progress, threads: int, seed: int
) -> TrainedLine:
    """Train all experts that these crops call for; writes ``directory/weights/<kind>/<name>.safetensors`` or ``.onnx``.

    ``progress(stage, done, total)`` is called from this thread, often. The same crops, plan, seed and number of threads
    give the same weights on one machine. Raises ConfigError when the crops are too few to set some aside.
    """
    told_apart = [crop for crop in crops if crop.component not in plan.anomalies.components]
    parts = divide(told_apart, plan.validation_fraction, seed)
    if not parts.held_out or not parts.training:
        raise ConfigError("too few source images to set some aside for validation: give more crops of each component")
    watch = Stopwatch()
    with torch_threads(threads), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        trained = train_all(parts.training, plan, seed, progress, watch)
        with watch.time("validation"):
            answers = answer_all(trained, parts.held_out, plan)
        with watch.time("anomaly expert"):
            measuring = train_anomalies(trained.joint.network, crops, plan, directory, seed)
    routes = choose_routes(trained, parts.held_out, answers, plan)
    with watch.time("write"):
        experts = write_experts(trained, plan, directory, progress)
    verdicts, labels = accuracy(parts.held_out, answers, graph_of(routes))
    experts += tuple(each.expert for each in measuring)
    routes |= {each.component: anomaly_route(each) for each in measuring}
    return TrainedLine(experts, routes, watch.seconds, verdicts, labels, measuring)


class Stopwatch:
    """Seconds by stage, from the monotonic clock."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.monotonic() - started


@dataclass(frozen=True, slots=True, eq=False)
class TrainedModels:
    joint: JointNetwork
    classifiers: tuple[TrainedClassifier, ...]
    detectors: tuple[TrainedDetector, ...]


def train_all(
    crops: Sequence[LabelledCrop], plan: TrainingPlan, seed: int, progress: Progress, watch: Stopwatch
) -> TrainedModels:
    labels = classifier_labels(crops, plan)
    data = classifiers.classifier_set(
        crops, labels, lambda crop: classifier_target(crop, plan), plan.classifiers.input_px
    )
    with watch.time("trunk"):
        joint = stored_network() if plan.is_rendered else trained_jointly(data, plan, seed, progress)
    with watch.time("classifiers"):
        own = train_own(joint, data, plan.classifiers, seed, progress)
    torch.manual_seed(seed)  # the threads drew from it in any order
    with watch.time("detectors"):
        shared = train_detectors(joint.network, crops, plan, seed, progress)
    return TrainedModels(joint, own, shared)


def train_own(
    joint: JointNetwork, data: ClassifierSet, plan: ClassifierPlan, seed: int, progress: Progress
) -> tuple[TrainedClassifier, ...]:
    """Each component's classifier."""

    def train(numbered: tuple[int, str]) -> TrainedClassifier:
        number, component = numbered
        return classifiers.train_own_stages(joint, data, component, plan, seed + number)

    return beside_one_another("classifiers", train, list(enumerate(data.labels)), progress)


def trained_jointly(data: ClassifierSet, plan: TrainingPlan, seed: int, progress: Progress) -> JointNetwork:
    network = classifiers.resnet(len(classifiers.union_labels(data)))
    return classifiers.train_jointly(network, data, plan.classifiers, seed, progress)


def train_detectors(
    network: nn.Module, crops: Sequence[LabelledCrop], plan: TrainingPlan, seed: int, progress: Progress
) -> tuple[TrainedDetector, ...]:
    """One trained detector for each question that some component of these crops asks."""
    asked = [
        (detectors.BoxDetector(network, len(each.labels), plan.detectors.input_px), each, chosen)
        for each in Detector
        if (chosen := detectors.concerned(crops, plan.detectors, each))
    ]
    return beside_one_another(
        "detectors", lambda each: detectors.train_detector(*each, plan.detectors, seed), asked, progress
    )


def train_anomalies(
    network: nn.Module, crops: Sequence[LabelledCrop], plan: TrainingPlan, directory: Path, seed: int
) -> tuple[TrainedAnomaly, ...]:
    """An anomaly expert for each component that gets one, written, with its threshold."""
    return tuple(
        anomalies.train_anomaly(network, own, plan.anomalies, directory / "weights", seed)
        for own in anomalies.anomaly_crops(crops, plan.anomalies, seed)
    )


def anomaly_route(trained: TrainedAnomaly) -> tuple[RouteStep, ...]:
    """The anomaly expert alone judges a measured part, by its threshold."""
    return (RouteStep(trained.expert.id, frozenset({OK})),)


def classifier_target(crop: LabelledCrop, plan: TrainingPlan) -> str:
    """Label that the classifier learns: it passes its detector's defect as ok."""
    detector = plan.detectors.shared_by.get(crop.component)
    return OK if detector is not None and crop.label == detector.defect else crop.label


def classifier_labels(crops: Sequence[LabelledCrop], plan: TrainingPlan) -> dict[str, tuple[str, ...]]:
    """Each component's labels, ok first."""
    known: dict[str, set[str]] = {}
    for crop in crops:
        known.setdefault(crop.component, set()).add(classifier_target(crop, plan))
    return {component: (OK, *sorted(labels - {OK})) for component, labels in sorted(known.items())}


def classifier_id(component: str) -> str:
    return f"cls/{component}"


def detector_id(detector: str) -> str:
    return f"det/{detector}"


def answer_all(
    trained: TrainedModels, crops: Sequence[LabelledCrop], plan: TrainingPlan
) -> list[dict[str, Prediction]]:
    """For each crop the prediction of every expert on its component's route."""
    answers: list[dict[str, Prediction]] = [{} for _ in crops]

    def ask(expert: str, components: set[str], side_px: int, predict: Callable[[Tensor], list[Prediction]]) -> None:
        members = [number for number, crop in enumerate(crops) if crop.component in components]
        if members:
            batch = classifiers.pictures([crops[number] for number in members], side_px)
            for number, prediction in zip(members, predict(batch), strict=True):
                answers[number][expert] = prediction

    for one in trained.classifiers:
        predict = partial(classifiers.predict, trained.joint.network, one)
        ask(classifier_id(one.component), {one.component}, plan.classifiers.input_px, predict)
    for shared in trained.detectors:
        sharing = {name for name, detector in plan.detectors.shared_by.items() if detector is shared.detector}
        ask(detector_id(shared.detector), sharing, plan.detectors.input_px, partial(detectors.predict, shared))
    return answers


def choose_routes(
    trained: TrainedModels,
    crops: Sequence[LabelledCrop],
    answers: Sequence[Mapping[str, Prediction]],
    plan: TrainingPlan,
) -> dict[str, tuple[RouteStep, ...]]:
    """The routes with one classifier threshold for all: the nearest to 0.5 that is as fair as the fairest.

    Good and bad validation crops count alike, whatever their shares: how many parts of a real line are defective is
    not known here. As fair: within one standard error, because a few hundred crops cannot tell more.
    """
    components = [classifier.component for classifier in trained.classifiers]

    def routes_at(min_score: float) -> dict[str, tuple[RouteStep, ...]]:
        return {component: route(component, min_score, plan) for component in components}

    def fairness(min_score: float) -> tuple[float, float]:
        """The sum of the shares judged rightly, and its standard error."""
        graph = graph_of(routes_at(min_score))
        right = [
            (crop.label == OK, (walk(crop.component, answer, graph).verdict is Verdict.OK) == (crop.label == OK))
            for crop, answer in zip(crops, answers, strict=True)
        ]
        shares = [[is_right for is_good, is_right in right if is_good is wanted] for wanted in (True, False)]
        rates = [(sum(share) / len(share), len(share)) for share in shares if share]
        return sum(rate for rate, _ in rates), math.sqrt(sum(rate * (1 - rate) / count for rate, count in rates))

    fair = {min_score: fairness(min_score) for min_score in SCORE_CANDIDATES}
    best, error = max(fair.values())
    return routes_at(next(min_score for min_score, (value, _) in fair.items() if value >= best - error))


def graph_of(routes: Mapping[str, tuple[RouteStep, ...]]) -> ExpertGraph:
    return ExpertGraph((step.expert for steps in routes.values() for step in steps), routes)


def route(component: str, min_score: float, plan: TrainingPlan) -> tuple[RouteStep, ...]:
    first = RouteStep(classifier_id(component), frozenset({OK}), min_score)
    detector = plan.detectors.shared_by.get(component)
    return (first,) if detector is None else (first, RouteStep(detector_id(detector), frozenset({detector.labels[0]})))


def accuracy(
    crops: Sequence[LabelledCrop], answers: Sequence[Mapping[str, Prediction]], graph: ExpertGraph
) -> tuple[float, float]:
    verdicts = labels = 0
    for crop, answer in zip(crops, answers, strict=True):
        judgement = walk(crop.component, answer, graph)
        is_ok = judgement.verdict is Verdict.OK
        verdicts += is_ok == (crop.label == OK)
        labels += (OK if is_ok else judgement.label) == crop.label
    return verdicts / len(crops), labels / len(crops)


def walk(component: str, answer: Mapping[str, Prediction], graph: ExpertGraph) -> Judgement:
    """The judgement that ends a component's route."""
    for number, step in enumerate(graph.routes[component]):
        judgement = graph.judge(component, number, answer[step.expert])
        if judgement.verdict is not None:
            return judgement
    raise ValueError(f"the route of {component} has no end")


def write_experts(
    trained: TrainedModels, plan: TrainingPlan, directory: Path, progress: Progress
) -> tuple[Expert, ...]:
    """One weights file for each expert, and its record."""
    experts = []
    total = len(trained.classifiers) + len(trained.detectors)
    for classifier in trained.classifiers:
        name, side = classifier_id(classifier.component), plan.classifiers.input_px
        pixels = InputSpec(side, side)
        file = write_weights(directory, name, classifier.tensors)
        experts.append(Expert(name, classifiers.ARCHITECTURE, file, classifier.labels, pixels, stem=classifiers.STEM))
        progress("write", len(experts), total)
    for shared in trained.detectors:
        name, side = detector_id(shared.detector), plan.detectors.input_px
        file = directory / "weights" / f"{name}.onnx"
        write_graph(shared.module, side, detectors.OUTPUT, file)
        pixels = InputSpec(side, side, "unit", fit=Fit.LETTERBOXED)
        experts.append(Expert(name, "onnx", file, shared.detector.labels, pixels))
        progress("write", len(experts), total)
    return tuple(experts)


def write_weights(directory: Path, expert: str, tensors: Mapping[str, Tensor]) -> Path:
    file = directory / "weights" / f"{expert}.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    return file
