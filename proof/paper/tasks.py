"""The paper's tasks A1, A2, B1 and B2, as far as its text defines them (CoServe, section 5.1), and the open choices.

From the text: board A has 352 component types and board B 342. Tasks 1 have 2 500 requests, tasks 2 3 500, one every
4 ms. Each type has a ResNet101 classifier of its own; for some types a shared YOLOv5m or YOLOv5l detector follows once
the classifier found nothing.

Chosen here: quantities are log-normal with a sigma of 2, calibrated on the 1 060 switches of Samba-CoE in task B2 on
NUMA (section 5.2). Every third type has a detector, of which there are six of each architecture, assigned in turn. A
classifier passes 95 of 100 images. Requests are drawn one by one in proportion to the quantities; a task 1 is the
beginning of its board's task 2. Usage probabilities are computed from quantities and pass rate (section 4.5).

Guarantees: seeded; a task is the same in every run and on every machine.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from experts.expert import Prediction
from experts.graph import ExpertGraph, RouteStep
from profiler.simulation.simulator import PASSES
from profiler.workload.traces import TracedArrival

if TYPE_CHECKING:
    from collections.abc import Mapping

INTERVAL_S = 0.004
SIGMA = 2.0
PASS_RATE = 0.95
TYPES_PER_DETECTOR_USER = 3  # every third type goes on to a detector
DETECTORS = ("yolov5m", "yolov5l")
DETECTORS_OF_EACH = 6
CLASSIFIER = "resnet101"
FAILS = Prediction("defect", 1.0)
SAMPLE = "sample"  # the stream of requests that searches run on, instead of a task's


@dataclass(frozen=True, slots=True)
class PaperBoard:
    """One board of the paper: its component types, with a seed for everything that is drawn about it."""

    name: str
    types: int
    seed: int


BOARDS = {"A": PaperBoard("A", 352, seed=1), "B": PaperBoard("B", 342, seed=2)}
REQUESTS = {"1": 2500, "2": 3500}
TASKS = tuple(f"{board}{number}" for board in BOARDS for number in REQUESTS)


@dataclass(frozen=True, slots=True)
class PaperTask:
    """A line and the requests that come to it. ``architectures`` by expert; ``usage``: how often a request uses one.

    ``passes[number]``: whether the classifier passes that request.
    """

    name: str
    graph: ExpertGraph
    architectures: Mapping[str, str]
    usage: Mapping[str, float]
    trace: tuple[TracedArrival, ...]
    passes: tuple[bool, ...]

    def predict(self, request: int, expert: str) -> Prediction:
        """Prediction for a request's image; a detector, which comes last, always passes."""
        is_classifier = self.architectures[expert] == CLASSIFIER
        return FAILS if is_classifier and not self.passes[request] else PASSES


def paper_task(name: str) -> PaperTask:
    board, requests = BOARDS[name[0]], REQUESTS[name[1:]]
    return task_of(board, requests, name)


def sample_of(board: str, requests: int) -> PaperTask:
    """Other requests on a board than its tasks': what the offline phase may look at (section 4.4)."""
    return task_of(BOARDS[board], requests, f"{board} {SAMPLE}", SAMPLE)


def task_of(board: PaperBoard, requests: int, name: str, stream: str = "task") -> PaperTask:
    """Requests on a board. ``stream``: another one draws other requests on the same line."""
    components = [f"{board.name.lower()}-{number:03}" for number in range(board.types)]
    drawn = random.Random(f"{board.seed} quantities")
    quantities = [drawn.lognormvariate(0.0, SIGMA) for _ in components]
    routes, architectures = _routes(board, components)
    arriving = random.Random(f"{board.seed} {stream}")
    trace, passes = [], []
    for number in range(requests):
        trace.append(TracedArrival(number * INTERVAL_S, arriving.choices(components, quantities)[0]))
        passes.append(arriving.random() < PASS_RATE)
    graph, total = ExpertGraph(architectures, routes), sum(quantities)
    shares = {component: quantity / total for component, quantity in zip(components, quantities, strict=True)}
    usage = graph.usage(shares, dict.fromkeys(architectures, PASS_RATE))
    return PaperTask(name, graph, architectures, usage, tuple(trace), tuple(passes))


def _routes(board: PaperBoard, components: list[str]) -> tuple[dict[str, tuple[RouteStep, ...]], dict[str, str]]:
    passing = frozenset({PASSES.label})
    architectures = {f"cls/{component}": CLASSIFIER for component in components}
    detectors = {
        f"det/{board.name.lower()}-{architecture}-{number}": architecture
        for number in range(DETECTORS_OF_EACH)
        for architecture in DETECTORS
    }
    routes = {}
    for number, component in enumerate(components):
        steps = [RouteStep(f"cls/{component}", passing)]
        if number % TYPES_PER_DETECTOR_USER == 0:
            detector = list(detectors)[number // TYPES_PER_DETECTOR_USER % len(detectors)]
            steps.append(RouteStep(detector, passing))
        routes[component] = tuple(steps)
    return routes, architectures | detectors
