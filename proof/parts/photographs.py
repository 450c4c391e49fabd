"""How long executors wait for images: photographs as JPEGs, a few ResNets that all fit in memory, everything at once.

Three ways, in turns, on the real agent: images prepared when their batch starts, as the budget for them is nothing;
prepared ahead; and ahead with JPEGs made smaller while they are decoded, as for experts that a profile found to say the
same of them (here they are not asked: what is measured is time). The photographs are gradients under noise, which takes
about as many bytes as a camera's. Of the first two the answers have to be the same ones.
"""

from __future__ import annotations

import platform
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from agent.config import read_line
from agent.deployment.build import AgentOptions, agent_with_requests
from agent.runtime.loop import LoopOptions
from agent.runtime.requests import Requests
from experts.expert import Precision
from profiler.bench.software import software
from profiler.tables import text_table
from profiler.workload.generated_line import LineRecipe, generate_line, removed_afterwards

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from agent.config import LineConfig
    from agent.runtime.requests import Ended

PHOTOGRAPHS = 12  # different ones; they are asked about again in turn
PATIENCE_S = 600.0
ASPECT = 4 / 3
NOISE = 6.0  # of each value, as a standard deviation: a camera's in good light
QUALITY = 90  # of the JPEGs
FORMAT = "{:<24} {:>9} {:>8} {:>17} {:>13}"
WAYS = ("when their batch starts", "ahead", "ahead, smaller")


@dataclass(frozen=True, slots=True)
class PhotographsRecipe:
    """``images`` in all, of ``megapixels`` each, of ``experts`` of one architecture in one precision."""

    architecture: str = "resnet50"
    precision: Precision = Precision.FP32
    megapixels: float = 12.0
    images: int = 48
    experts: int = 4
    repeats: int = 3


@dataclass(frozen=True, slots=True)
class PhotographsRow:
    """One way, medians over the rounds. ``waited_fraction``: of what executors were busy, until images were there.

    Of images that are prepared in their batch's own time all of it counts as that. ``cores_fraction``: of the cores'
    time that was made use of; where little is left, they decode and compute as much as they can.
    """

    way: str
    images_per_s: float
    waited_fraction: float
    processor_s: float  # of all threads, per image
    cores_fraction: float


@dataclass(frozen=True, slots=True)
class PhotographsMeasured:
    """All ways. ``answers_differ``: images on which the first two differ; 0 is expected."""

    recipe: PhotographsRecipe
    file_bytes: int
    rows: tuple[PhotographsRow, ...]
    answers_differ: int


def measure_photographs(folder: Path, recipe: PhotographsRecipe | None = None) -> PhotographsMeasured:
    """Run it below a folder, which is left as it was. Raises ConfigError, AgentCrashed."""
    recipe = recipe or PhotographsRecipe()
    with removed_afterwards(folder) as place:
        line = LineRecipe(
            classifiers=recipe.experts,
            architecture=recipe.architecture,
            memory_for=recipe.experts + 1,
            precision=recipe.precision,
            requests=1,
            images=1,
        )
        config = read_line(generate_line(place / "line", line).line)
        photographs = _photographs(place, recipe)
        rounds = [[_run(config, photographs, recipe, way) for way in WAYS] for _ in range(recipe.repeats)]
        file_bytes = sum(file.stat().st_size for file in photographs) // len(photographs)
    rows = tuple(_row(way, [each[number] for each in rounds]) for number, way in enumerate(WAYS))
    first, ahead, _ = (each.answers for each in rounds[0])
    differ = sum(one != other for one, other in zip(first, ahead, strict=True))
    return PhotographsMeasured(recipe, file_bytes, rows, differ)


def report(measured: PhotographsMeasured) -> str:
    recipe = measured.recipe
    rows = [
        (
            row.way,
            f"{row.images_per_s:.2f}",
            f"{row.waited_fraction:.1%}",
            f"{row.processor_s * 1e3:.0f}",
            f"{row.cores_fraction:.0%}",
        )
        for row in measured.rows
    ]
    gain = measured.rows[1].images_per_s / measured.rows[0].images_per_s
    told = "the same answers" if not measured.answers_differ else f"OTHER ANSWERS on {measured.answers_differ} images"
    return "\n".join(
        (
            f"{recipe.images} JPEGs of {recipe.megapixels:g} megapixels, {measured.file_bytes / 1e6:.1f} MB each, of "
            f"{recipe.experts} {recipe.architecture} in {recipe.precision}, all at once; medians of {recipe.repeats} "
            "rounds",
            f"{platform.machine()}, {software()}",
            text_table([("prepared", "images/s", "waited", "ms of processors", "cores in use"), *rows], FORMAT),
            f"ahead over when their batch starts: x{gain:.2f}, {told}",
        )
    )


@dataclass(frozen=True, slots=True)
class _Run:
    seconds: float
    waited_fraction: float
    processor_s: float
    cores: int
    answers: tuple[object, ...]

    @property
    def cores_fraction(self) -> float:
        return self.processor_s / self.seconds / self.cores


def _run(config: LineConfig, photographs: Sequence[Path], recipe: PhotographsRecipe, way: str) -> _Run:
    """One round of one way, on an agent of its own whose experts are in memory and have run once."""
    experts = sorted(config.catalog.experts)
    line = config.having(memory={"images": 0}) if way == WAYS[0] else config
    requests = Requests()
    options = AgentOptions(profile=None, loop=LoopOptions())
    with agent_with_requests(line, lambda *_: None, options, requests) as (agent, _):
        if way == WAYS[2]:
            agent.loop.scale_images(experts)
        agent.start()
        agent.loop.wait_until_idle(PATIENCE_S)
        _ask(requests, photographs, experts, len(experts))
        before, started, used = agent.loop.statistics().executors, time.monotonic(), time.process_time()
        ended = _ask(requests, photographs, experts, recipe.images)
        seconds, processor_s = time.monotonic() - started, time.process_time() - used
        after = agent.loop.statistics().executors
    busy_s = sum(each.busy_s for each in after) - sum(each.busy_s for each in before)
    waited_s = sum(each.waited_s for each in after) - sum(each.waited_s for each in before)
    answers = tuple((each.outcome.label, each.outcome.score) for each in ended)
    return _Run(seconds, waited_s / busy_s if busy_s else 0.0, processor_s, agent.box.cores, answers)


def _ask(requests: Requests, photographs: Sequence[Path], experts: Sequence[str], count: int) -> list[Ended]:
    for number in range(count):
        requests.submit(photographs[number % len(photographs)], expert=experts[number % len(experts)])
    return requests.collect()


def _row(way: str, runs: Sequence[_Run]) -> PhotographsRow:
    images = len(runs[0].answers)
    return PhotographsRow(
        way,
        images / statistics.median(run.seconds for run in runs),
        statistics.median(run.waited_fraction for run in runs),
        statistics.median(run.processor_s for run in runs) / images,
        statistics.median(run.cores_fraction for run in runs),
    )


def _photographs(folder: Path, recipe: PhotographsRecipe) -> list[Path]:
    height = round((recipe.megapixels * 1e6 / ASPECT) ** 0.5)
    width = round(height * ASPECT)
    files = []
    for number in range(min(PHOTOGRAPHS, recipe.images)):
        chance = np.random.default_rng(number)
        y, x = np.mgrid[:height, :width].astype(np.float32)
        shades = np.stack([y * 0.05 * (number + 1), x * 0.04, (x + y) * 0.03], axis=2) % 255
        pixels = shades + chance.normal(0.0, NOISE, (height, width, 1))
        file = folder / f"{number:02d}.jpg"
        Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(file, quality=QUALITY)
        files.append(file)
    return files
