"""Line file of a demo, and held-out crops judged by the agent itself, in a process of its own, for `coserve demo`."""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import psutil
import yaml
from PIL import Image

from agent.config import read_line
from agent.demo.rendering.components import COMPONENTS
from agent.demo.rendering.picture import PartVerdict
from agent.demo.rendering.render import Placement, RenderedBoard, crop
from agent.demo.training.crops import LabelledCrop
from agent.records.result_reader import ResultReader
from agent.service.line_service import LineService
from experts.errors import CoServeError
from experts.expert import Anomaly
from experts.sizes import MEBIBYTE
from experts.thresholds.map_pictures import map_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from agent.demo.training.train import TrainedLine
    from agent.records.verdict import Result
    from experts.expert import Expert
    from experts.graph import RouteStep

INBOX, LINE_FILE, PICTURE = "inbox", "line.yaml", "board.png"  # in a demo's folder
FILE_PATTERN = r"(?P<board>[^_]+)_(?P<component>[^_]+)_(?P<ref>[^.]+)\.png"
DROP = "drop"  # beside the line file: crops on their way to the inbox
JUDGING_LIMIT_S = 600.0


def write_line_yaml(folder: Path, trained: TrainedLine, memory_bytes: int, *, has_boards: bool) -> None:
    """Write a line file that serves the trained experts, with weights relative to it.

    ``memory_bytes``: the budget for experts, rounded down to whole MiB. ``has_boards``: the demo's rendered boards.
    """
    quantities = {component.name: component.quantity for component in COMPONENTS}
    boards = {"boards": {"demo-board": {"takt_s": 60, "components": quantities}}} if has_boards else {}
    experts = {expert.id: expert_values(expert, folder) for expert in trained.experts}
    routes = {name: [step_values(step) for step in steps] for name, steps in trained.routes.items()}
    memory = {"host": f"{memory_bytes // MEBIBYTE}MiB"}
    intake = {"folders": [{"path": f"./{INBOX}", "pattern": FILE_PATTERN}]}
    text = f"""\
# Written by `coserve demo`. Paths are relative to this file.
line: demo
state: ./state

# Classifiers share the tensors of their trunk, which are held once. An anomaly expert knows good parts
# alone; its threshold was learned on crops that it was not made from, with the weights of threshold_of. Each
# expert is proven by its network's own answers in `check`.
{as_yaml({"experts": experts})}
# A part's classifier first; what it passes goes on to a detector that several components share.
{as_yaml({"routes": routes})}
# Less memory than all experts need: they take turns.
{as_yaml({**boards, "memory": memory, "intake": intake})}"""
    (folder / LINE_FILE).write_text(text, "utf-8")


def as_yaml(values: dict[str, Any]) -> str:
    """Innermost lists and mappings on a line each; strings are quoted where YAML would read something else."""
    written: str = yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=10_000)
    return written


def expert_values(expert: Expert, folder: Path) -> dict[str, Any]:
    values = {
        "architecture": expert.architecture,
        "weights": os.path.relpath(expert.weights, folder),
        "labels": list(expert.labels),
        "input": {"size": [expert.pixels.height, expert.pixels.width], "normalize": str(expert.pixels.normalize)},
        "stem": expert.stem,
        "variant": expert.variant,
        "task": expert.task and str(expert.task),
        "threshold": expert.threshold,
        "threshold_of": expert.threshold_of,
        "detector": expert.detector,
        "check": expert.check and os.path.relpath(expert.check, folder),
    }
    return {key: value for key, value in values.items() if value is not None}


def step_values(step: RouteStep) -> dict[str, Any]:
    least = {"min_score": step.min_score} if step.min_score else {}
    return {"expert": step.expert, "pass": sorted(step.passing), **least}


@dataclass(frozen=True, slots=True)
class Judged:
    """Verdicts by file name, with the agent's use of time and memory, ``measured``, as rows of the demo's report.

    ``held_bytes``: the most that the ledger counted. ``grown_bytes``: the most that the process grew over its size
    before the first weights. ``left_bytes``: its growth that stayed after the stop. ``first_verdict_at``: seconds since
    the epoch.
    """

    verdicts: Mapping[str, PartVerdict]
    first_verdict_at: float
    measured: Mapping[str, float]


def file_of(board: RenderedBoard, place: Placement) -> str:
    return f"{board.name}_{place.component}_{place.ref}.png"


def crops_of(board: RenderedBoard) -> list[LabelledCrop]:
    """The crops of all parts, as a camera's files."""
    return [
        LabelledCrop(place.component, place.label, file_of(board, place), crop(board, place))
        for place in board.placements
    ]


def renamed(held_out: Iterable[LabelledCrop]) -> list[LabelledCrop]:
    """Name real crops by FILE_PATTERN: the board is the image that a crop is from. No name tells the label."""
    counts: Counter[str] = Counter()
    crops = []
    for each in held_out:
        board = re.sub(r"[^0-9A-Za-z-]", "-", each.source)
        counts[board] += 1
        crops.append(replace(each, file=f"{board}_{each.component}_P{counts[board]}.png"))
    return crops


def judge_apart(
    line_file: Path, held_out: Callable[[], Sequence[LabelledCrop]], progress: Callable[[str, int, int], None]
) -> tuple[Sequence[LabelledCrop], Judged]:
    """Serve the line in a process of its own, as memory left by the training would count as the agent's.

    ``held_out`` draws the crops to judge. It is called while that process starts.
    """
    drawn, stored = line_file.parent / f".{DROP}", ResultReader(read_line(line_file, environment={}).results_file)
    drawn.mkdir()
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as apart:
        future = apart.submit(judge, line_file)
        try:
            crops = held_out()
            for each in crops:
                Image.fromarray(each.pixels).save(drawn / each.file, compress_level=1)
        finally:
            drawn.rename(line_file.parent / DROP)  # ``judge`` waits for it
        while not future.done():
            wait([future], timeout=0.2)
            with suppress(FileNotFoundError, sqlite3.OperationalError):  # the agent has not made its tables yet
                progress("judge held-out images", sum(1 for _ in stored.query()), len(crops))
        return crops, future.result()


def judge(line_file: Path) -> Judged:
    """Serve the line, move the files of DROP into its inbox as a camera would, wait for all verdicts, stop.

    Raises CoServeError when the agent stands still for too long.
    """
    config = read_line(line_file, environment={})
    service = LineService(config, lambda stage, done, total: None)
    drop, inbox, process, grown_bytes = line_file.parent / DROP, line_file.parent / INBOX, psutil.Process(), 0
    inbox.mkdir(exist_ok=True)
    service.start()
    try:
        waiting_since = time.monotonic()
        while not drop.is_dir() and time.monotonic() - waiting_since < JUDGING_LIMIT_S:
            time.sleep(0.02)
        started = time.monotonic()
        files = [file.rename(inbox / file.name) for file in sorted(drop.iterdir())]
        while (done := service.judged) < len(files):
            grown_bytes = max(grown_bytes, process.memory_info().rss - service.agent.rss_before_bytes)
            if service.inspector.crash is not None:
                raise service.inspector.crash
            if time.monotonic() - started > JUDGING_LIMIT_S:
                raise CoServeError(f"only {done} of {len(files)} images were judged within {JUDGING_LIMIT_S:.0f} s")
            time.sleep(0.05)
        judging_s = time.monotonic() - started
        engine = service.agent.loop.statistics().engine
    finally:
        service.stop()
    stored = ResultReader(config.results_file)
    measured = {
        "budget_bytes": sum(spec.expert_bytes + spec.workspace_bytes for spec in service.agent.setup.pools),
        "images_bytes": service.agent.setup.limits.prepared_bytes,
        "held_bytes": sum(pool.peak_used_bytes for pool in engine.pools),
        "grown_bytes": grown_bytes,
        "left_bytes": process.memory_info().rss - service.agent.rss_before_bytes,
        "images_per_s": len(files) / judging_s,
        "judging_s": judging_s,
        "switches": engine.switches,
        "evictions": engine.evictions,
        "bytes_read": engine.bytes_read,
    }
    rows = list(stored.query())
    first_verdict_at = min((row.finished_at.timestamp() for row in rows), default=time.time())
    return Judged({row.subject.image: part_verdict(row, stored) for row in rows}, first_verdict_at, measured)


def part_verdict(row: Result, stored: ResultReader) -> PartVerdict:
    """A stored result, with the measurement of its route's last expert if that is an anomaly expert."""
    found = row.steps[-1].anomaly if row.steps else None
    maps = {kept.step: map_of(kept.png) for kept in stored.maps(row.seq)} if found else {}
    anomaly = None if found is None else Anomaly(found.score, found.threshold, maps.get(len(row.steps) - 1))
    return PartVerdict(row.verdict, str(row.label or row.reason), anomaly)
