"""``coserve demo``: from nothing, or from a folder of crops, to a judged line and its report.

The agent is the one that ``coserve serve`` runs: files dropped into an inbox, a memory budget that holds a third of the
experts, verdicts read back from the results file.
"""

from __future__ import annotations

import os
import shutil
import time
from typing import TYPE_CHECKING, Any

from agent.demo.line import LINE_FILE, PICTURE, crops_of, judge_apart, renamed, write_line_yaml
from agent.demo.rendering.components import COMPONENTS
from agent.demo.rendering.picture import PartVerdict, draw_verdicts
from agent.demo.rendering.render import RenderedBoard, render_board
from agent.demo.report import report_of
from agent.demo.training.crops import divide, load_crops, render_crops, save_crops
from agent.demo.training.train import real_plan, synthetic_plan, train_experts
from experts import sizes
from experts.errors import ConfigError
from experts.expert import Precision, Verdict
from experts.packed.packing import pack_line
from experts.packed.weights import SegmentStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from agent.demo.training.train import TrainedLine
    from experts.packed.weights import PackedExpert

    Progress = Callable[[str, int, int], None]  # stage, done, total

MARKER = ".coserve-demo"  # a folder that holds it was made by a demo, and may be made again
CROPS_PER_LABEL = 16  # the stored network has seen others of each component
HELD_OUT_BOARDS = 8
DEFECT_RATE = 0.12
MEASURED_DEFECT_RATE = 0.35  # of the two shields of a board: so few of them tell nothing of an expert otherwise
HELD_OUT_FRACTION = 0.2
RESIDENT_FRACTION = 1 / 3
WORKSPACE_BYTES = 64 * sizes.MEBIBYTE


def run_demo(directory: Path, data: Path | None, seed: int, progress: Progress) -> dict[str, Any]:
    """Make and judge a line in ``directory``; its report.

    Raises ConfigError for a folder not made by a demo, or unusable DATA.
    """
    started = time.monotonic()
    folder = fresh_folder(directory)
    threads = os.cpu_count() or 1
    boards: list[RenderedBoard] = []
    if data is None:
        crops = render_crops(COMPONENTS, CROPS_PER_LABEL, seed, threads, progress)
        save_crops(folder / "crops", crops)
        for number in range(HELD_OUT_BOARDS):
            name = f"B{number + 1:03d}"
            boards.append(render_board(seed * 1000 + 500 + number, DEFECT_RATE, name, MEASURED_DEFECT_RATE))
            progress("render held-out boards", number + 1, HELD_OUT_BOARDS)
        held_out = [crop for board in boards for crop in crops_of(board)]
        plan = synthetic_plan()
    else:
        crops, kept = divide(load_crops(data), HELD_OUT_FRACTION, seed)
        if not kept:
            raise ConfigError("too few source images to set some aside: give more crops of each component")
        held_out, plan = renamed(kept), real_plan(crops)
    trained = train_experts(crops, plan, folder / "weights", progress, threads, seed)
    expert_bytes = packed_bytes(folder, trained, progress)
    budget_bytes = int(expert_bytes * RESIDENT_FRACTION) + WORKSPACE_BYTES
    write_line_yaml(folder, trained, budget_bytes, has_boards=data is None)
    judged = judge_apart(folder / LINE_FILE, held_out, progress)
    if boards:
        paint(folder / PICTURE, boards, judged.verdicts)
    return report_of(folder, trained, expert_bytes, held_out, judged, time.monotonic() - started)


def fresh_folder(directory: Path) -> Path:
    """An empty demo folder; an earlier demo's is made anew. Raises ConfigError for anything else that is there."""
    folder = directory.absolute()
    if folder.exists():
        if not folder.is_dir() or (any(folder.iterdir()) and not (folder / MARKER).is_file()):
            raise ConfigError(f"{folder} is there and was not made by a demo - name another folder with --dir")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / MARKER).touch()
    return folder


def packed_bytes(folder: Path, trained: TrainedLine, progress: Progress) -> int:
    """Pack the trained experts into the line's state; the memory that all of them take."""
    store = SegmentStore(folder / "state" / "packed")
    try:
        packing = pack_line(
            trained.experts,
            lambda _: {Precision.FP32},
            store,
            lambda step: progress("pack experts", step.number, step.total),
        )
    finally:
        store.close()
    for error in packing.failed.values():
        raise error
    return held_bytes(packed for each in packing.packed.values() for packed in each.values())


def held_bytes(packed: Iterable[PackedExpert]) -> int:
    """The memory that all of these take together: shared parts once."""
    return sum({segment.sha256: segment.slot_bytes for each in packed for segment in each.segments}.values())


def paint(file: Path, boards: Sequence[RenderedBoard], verdicts: Mapping[str, PartVerdict]) -> None:
    """Draw the verdicts into the first board with an anomalous part on it, else with one that is NG."""

    def of(board: RenderedBoard) -> dict[str, PartVerdict]:
        files = {place.ref: f"{board.name}_{place.component}_{place.ref}.png" for place in board.placements}
        return {ref: verdicts[name] for ref, name in files.items() if name in verdicts}

    def rank(board: RenderedBoard) -> tuple[bool, bool]:
        found = [verdict for verdict in of(board).values() if verdict.verdict is Verdict.NG]
        return any(verdict.anomaly is not None for verdict in found), bool(found)

    shown = max(boards, key=rank)
    draw_verdicts(shown, of(shown)).save(file, optimize=True)
