"""Time that executors wait for images: photographs as JPEGs, a few experts that all fit in memory, all asked at once.

Three ways take turns on the real agent: images prepared when their batch starts, as their budget is nothing; prepared
ahead; and ahead with JPEGs made smaller while they are decoded. The photographs are gradients under noise, which takes
about as many bytes as a camera's. The first two ways must answer the same.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from agent.config import read_line
from agent.deployment.build import AgentOptions, agent_with_requests
from agent.runtime.loop import LoopOptions
from agent.runtime.requests import Requests
from experts.expert import Precision
from profiler.bench.measured import Column, Measured, this_machine
from profiler.bench.turns import Plan, by_turns
from profiler.workload.generated_line import LineRecipe, generate_line, removed_afterwards

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from agent.config import LineConfig
    from agent.runtime.requests import Ended

PHOTOGRAPHS = 12  # different ones; they are asked about again in turn
SETTLE_LIMIT_S = 600.0
ASPECT = 4 / 3
NOISE = 6.0  # of each value, as a standard deviation: a camera's in good light
QUALITY = 90  # of the JPEGs
WAYS = ("when their batch starts", "ahead", "ahead, smaller")
COLUMNS = (
    Column("prepared", "way"),
    Column("images/s", "images_per_s", ".2f"),
    Column("waited", "waited_fraction", ".1%"),
    Column("ms of processors", "processor_s", ".0f", 1e3),
    Column("cores in use", "cores_fraction", ".0%"),
)


@dataclass(frozen=True, slots=True)
class PhotographsRecipe:
    """``images`` in all, of ``megapixels`` each, for ``experts`` of one architecture in one precision."""

    architecture: str = "resnet50"
    precision: Precision = Precision.FP32
    megapixels: float = 12.0
    images: int = 48
    experts: int = 4
    repeats: int = 3


@dataclass(frozen=True, slots=True)
class PhotographsRow:
    """One run of one way, or medians of several. ``waited_fraction``: of executors' busy time, until images came.

    ``processor_s``: of all threads, an image; ``cores_fraction``: of the cores' time that was used.
    """

    way: str
    images_per_s: float
    waited_fraction: float
    processor_s: float
    cores_fraction: float
    answers: tuple[object, ...] = ()


def measure_photographs(folder: Path, recipe: PhotographsRecipe | None = None) -> Measured:
    """Run all ways below a folder, which is left as it was. Raises ConfigError, AgentCrashed."""
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
        file_bytes = sum(file.stat().st_size for file in photographs) // len(photographs)
        ways = {way: partial(_run, config, photographs, recipe.images, way) for way in WAYS}
        runs = by_turns(ways, Plan(recipe.repeats, warming_up=0))
    rows = tuple(_medians(way, runs[way].results) for way in WAYS)
    first, ahead = (runs[way].results[0].answers for way in WAYS[:2])
    differ = sum(one != other for one, other in zip(first, ahead, strict=True))
    said = "the same answers" if not differ else f"OTHER ANSWERS on {differ} images"
    notes = (
        f"{recipe.images} JPEGs of {recipe.megapixels:g} megapixels, {file_bytes / 1e6:.1f} MB each, of "
        f"{recipe.experts} {recipe.architecture} in {recipe.precision}, all at once; {recipe.repeats} rounds",
        f"ahead over when their batch starts: x{rows[1].images_per_s / rows[0].images_per_s:.2f}, {said}",
    )
    return Measured(this_machine(), COLUMNS, rows, notes=notes)


def _run(config: LineConfig, photographs: Sequence[Path], images: int, way: str) -> PhotographsRow:
    """One round of one way, on an agent of its own whose experts are in memory and have run once."""
    experts = sorted(config.catalog.experts)
    line = config.having(memory={"images": 0}) if way == WAYS[0] else config
    requests = Requests()
    options = AgentOptions(profile=None, loop=LoopOptions())
    with agent_with_requests(line, lambda *_: None, options, requests) as (agent, _):
        if way == WAYS[2]:
            agent.loop.scale_images(experts)
        agent.start()
        agent.loop.wait_until_idle(SETTLE_LIMIT_S)
        _ask(requests, photographs, experts, len(experts))
        before, started, used = agent.loop.statistics().executors, time.monotonic(), time.process_time()
        ended = _ask(requests, photographs, experts, images)
        seconds, processor_s = time.monotonic() - started, time.process_time() - used
        after = agent.loop.statistics().executors
    busy_s = sum(each.busy_s for each in after) - sum(each.busy_s for each in before)
    waited_s = sum(each.waited_s for each in after) - sum(each.waited_s for each in before)
    return PhotographsRow(
        way,
        images / seconds,
        waited_s / busy_s if busy_s else 0.0,
        processor_s / images,
        processor_s / seconds / agent.box.cores,
        tuple((each.outcome.label, each.outcome.score) for each in ended),
    )


def _ask(requests: Requests, photographs: Sequence[Path], experts: Sequence[str], count: int) -> list[Ended]:
    for number in range(count):
        requests.submit(photographs[number % len(photographs)], expert=experts[number % len(experts)])
    return requests.collect()


def _medians(way: str, runs: Sequence[PhotographsRow]) -> PhotographsRow:
    return PhotographsRow(
        way,
        statistics.median(run.images_per_s for run in runs),
        statistics.median(run.waited_fraction for run in runs),
        statistics.median(run.processor_s for run in runs),
        statistics.median(run.cores_fraction for run in runs),
    )


def _photographs(folder: Path, recipe: PhotographsRecipe) -> list[Path]:
    height = round((recipe.megapixels * 1e6 / ASPECT) ** 0.5)
    y, x = np.mgrid[:height, : round(height * ASPECT)].astype(np.float32)
    files = [folder / f"{number:02d}.jpg" for number in range(min(PHOTOGRAPHS, recipe.images))]
    for number, file in enumerate(files):
        noise = np.random.default_rng(number).normal(0.0, NOISE, (*y.shape, 1))
        shades = np.stack([y * 0.05 * (number + 1), x * 0.04, (x + y) * 0.03], axis=2) % 255
        Image.fromarray(np.clip(shades + noise, 0, 255).astype(np.uint8)).save(file, quality=QUALITY)
    return files
