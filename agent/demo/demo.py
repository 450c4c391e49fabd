"""``coserve demo``: from nothing, or from a folder of crops, to a judged line and its report.

What runs here is the agent that ``coserve serve`` runs: files dropped into an inbox, a memory budget that holds a third
of the experts, verdicts read back from the results file.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import psutil
from rich.console import Console
from rich.table import Table

from agent.config import read_line
from agent.demo.inbox import Specimen, write_board, write_held_out
from agent.demo.line import INBOX, synthetic_board, write_line_yaml
from agent.demo.rendering.components import OK, synthetic_components
from agent.demo.rendering.picture import PartVerdict, draw_verdicts
from agent.demo.rendering.render import RenderedBoard, render_board
from agent.demo.training.crops import CROPS_PER_LABEL, divide, load_crops, write_crops
from agent.demo.training.train import real_plan, synthetic_plan, train_experts
from agent.records.result_reader import ResultReader
from agent.service.line_service import LineService
from experts import sizes
from experts.errors import ConfigError, CoServeError
from experts.expert import ANOMALY_LABELS, Anomaly, Precision, Verdict
from experts.packed.packing import pack_line
from experts.packed.weights import SegmentStore
from experts.thresholds.map_pictures import map_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from agent.demo.training.anomalies import TrainedAnomaly
    from agent.demo.training.crops import LabelledCrop
    from agent.demo.training.train import TrainedLine
    from agent.records.results import ResultRow
    from agent.runtime.loop import LoopStatistics
    from experts.packed.weights import PackedExpert

    Progress = Callable[[str, int, int], None]  # stage, done, total

MARKER = ".coserve-demo"  # a folder that holds it was made by a demo, and may be made again
LINE_FILE, PICTURE = "line.yaml", "board.png"
HELD_OUT_BOARDS = 8
DEFECT_RATE = 0.12
MEASURED_DEFECT_RATE = 0.35  # of the two shields of a board: so few of them tell nothing of an expert otherwise
HELD_OUT_FRACTION = 0.2
RESIDENT_FRACTION = 1 / 3
WORKSPACE_BYTES = 64 * sizes.MEBIBYTE
JUDGING_LIMIT_S = 600.0
MEMORY_TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class AnomalyReport:
    """Training and results of an anomaly expert. ``expected``: the rate of false alarms that its samples warrant.

    It is trained on ``training`` good crops; its threshold is from ``good`` and ``bad`` others. The rest counts what it
    judged of the boards.
    """

    expert: str
    training: int
    good: int
    bad: int
    threshold: float
    expected: float
    judged: int
    defective: int
    missed: int
    false_alarms: int


@dataclass(frozen=True, slots=True)
class DemoReport:
    """Result of the demo. Accuracies over the held-out images; bytes as measured."""

    line_file: Path
    picture: Path | None
    experts: int
    expert_bytes: int
    budget_bytes: int
    held_bytes: int  # most that the ledger counted at any moment
    grown_bytes: int  # most that the agent's process grew over its size before it touched any weights
    left_bytes: int  # what of that was still there after the experts had gone: the runtimes' own
    requests: int
    ok: int
    ng: int
    unknown: int
    accuracy: float
    label_accuracy: float
    missed: int  # defective, and judged OK
    false_alarms: int  # good, and judged NG
    images_per_s: float
    judging_s: float
    switches: int
    evictions: int
    bytes_read: int
    seconds: float
    stage_s: Mapping[str, float]
    anomalies: tuple[AnomalyReport, ...] = ()

    def as_json(self) -> dict[str, Any]:
        plain = asdict(self)
        plain["line_file"] = str(self.line_file)
        plain["picture"] = str(self.picture) if self.picture else None
        return plain


def run_demo(directory: Path, data: Path | None, seed: int, progress: Progress) -> DemoReport:
    """Make and judge a line in ``directory``. Raises ConfigError for a folder not made by a demo, or unusable DATA."""
    started = time.monotonic()
    folder = fresh_folder(directory)
    threads = os.cpu_count() or 1
    boards: tuple[RenderedBoard, ...] = ()
    held_out: Sequence[LabelledCrop] = ()
    if data is None:
        write_crops(folder / "crops", synthetic_components(), CROPS_PER_LABEL, seed, threads, progress)
        crops, plan = load_crops(folder / "crops"), synthetic_plan()
        boards = tuple(held_out_boards(seed, progress))
    else:
        division = divide(load_crops(data), HELD_OUT_FRACTION, seed)
        crops, held_out, plan = division.training, division.held_out, real_plan(division.training)
    trained = train_experts(crops, plan, folder, progress, threads, seed)
    del crops
    expert_bytes = packed_bytes(folder, trained, progress)
    budget_bytes = int(expert_bytes * RESIDENT_FRACTION) + WORKSPACE_BYTES
    line_file = folder / LINE_FILE
    quantities = {"demo-board": synthetic_board()} if data is None else {}
    write_line_yaml(line_file, trained, budget_bytes, quantities)
    drop = folder / "drop"
    drop.mkdir()
    specimens = [specimen for board in boards for specimen in write_board(drop, board)]
    specimens += write_held_out(drop, held_out)
    judged = judge_apart(line_file, specimens, progress)
    if boards:
        paint(folder / PICTURE, boards, judged.verdicts)
    return report(folder, trained, expert_bytes, specimens, judged, time.monotonic() - started)


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


def held_out_boards(seed: int, progress: Progress) -> Iterator[RenderedBoard]:
    for number in range(HELD_OUT_BOARDS):
        yield render_board(seed * 1000 + 500 + number, DEFECT_RATE, f"B{number + 1:03d}", MEASURED_DEFECT_RATE)
        progress("render held-out boards", number + 1, HELD_OUT_BOARDS)


def packed_bytes(folder: Path, trained: TrainedLine, progress: Progress) -> int:
    """Pack the trained experts where the line will look for them; what holding all of them would cost."""
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
    segments = {segment.sha256: segment.slot_bytes for each in packed for segment in each.segments}
    return sum(segments.values())


@dataclass(frozen=True, slots=True)
class Judged:
    """Verdicts by file name, with the agent's use of time and memory."""

    verdicts: Mapping[str, PartVerdict]
    statistics: LoopStatistics
    budget_bytes: int
    grown_bytes: int
    left_bytes: int
    judging_s: float


def judge_apart(line_file: Path, specimens: Sequence[Specimen], progress: Progress) -> Judged:
    """``judge`` in a process of its own: what training left in this one would hide what the agent takes."""
    stored = ResultReader(read_line(line_file, environment={}).results_file)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as apart:
        future = apart.submit(judge, line_file, specimens)
        while not future.done():
            wait([future], timeout=0.2)
            with suppress(FileNotFoundError, sqlite3.OperationalError):  # the agent has not made its tables yet
                progress("judge held-out images", sum(1 for _ in stored.query()), len(specimens))
        return future.result()


def judge(line_file: Path, specimens: Sequence[Specimen]) -> Judged:
    """Serve the line, drop the images into its inbox as a camera would, wait for all verdicts, stop."""
    config = read_line(line_file, environment={})
    service = LineService(config, lambda stage, done, total: None)
    inbox = line_file.parent / INBOX
    inbox.mkdir(exist_ok=True)
    service.start()
    started = time.monotonic()
    with MemoryWatch(service.agent.rss_before_bytes) as watch:
        for specimen in specimens:
            specimen.file.rename(inbox / specimen.file.name)
        try:
            wait_for(service, len(specimens))
            judging_s = time.monotonic() - started
            statistics = service.agent.loop.statistics()
        finally:
            service.stop()
    left_bytes = psutil.Process().memory_info().rss - service.agent.rss_before_bytes
    stored = ResultReader(config.results_file)
    verdicts = {row.result.subject.image: part_verdict(row, stored) for row in stored.query()}
    budget_bytes = sum(spec.expert_bytes + spec.workspace_bytes for spec in service.agent.setup.pools)
    return Judged(verdicts, statistics, budget_bytes, watch.grown_bytes, left_bytes, judging_s)


def part_verdict(row: ResultRow, stored: ResultReader) -> PartVerdict:
    """A stored result, with what the last expert of its route measured, if it measures."""
    result = row.result
    numbers = result.detail["steps"][-1].get("anomaly") if result.detail.get("steps") else None
    maps = {kept.step: map_of(kept.png) for kept in stored.maps(row.seq)} if numbers else {}
    anomaly = Anomaly(**numbers, map=maps.get(len(result.detail["steps"]) - 1)) if numbers else None
    return PartVerdict(result.verdict, str(result.label or result.reason), anomaly)


def wait_for(service: LineService, images: int) -> None:
    """Until so many images have their verdict. Raises CoServeError when the agent stands still for too long."""
    deadline = time.monotonic() + JUDGING_LIMIT_S
    while (done := service.judged) < images:
        if service.inspector.crash is not None:
            raise service.inspector.crash
        if time.monotonic() > deadline:
            raise CoServeError(f"only {done} of {images} images were judged within {JUDGING_LIMIT_S:.0f} s")
        time.sleep(0.05)


class MemoryWatch:
    """The most that this process grows beyond a given size, looked at twenty times a second."""

    def __init__(self, before_bytes: int) -> None:
        self.grown_bytes = 0
        self._before_bytes = before_bytes
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-watch", daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        process = psutil.Process()
        while not self._over.wait(0.05):
            self.grown_bytes = max(self.grown_bytes, process.memory_info().rss - self._before_bytes)


def paint(file: Path, boards: Sequence[RenderedBoard], verdicts: Mapping[str, PartVerdict]) -> None:
    """The first board with something anomalous on it, else with something NG; its verdicts drawn in."""

    def of(board: RenderedBoard) -> dict[str, PartVerdict]:
        prefix = f"{board.name}_"
        return {
            name.removesuffix(".png").rpartition("_")[2]: verdict
            for name, verdict in verdicts.items()
            if name.startswith(prefix)
        }

    def told(board: RenderedBoard) -> int:
        found = [verdict for verdict in of(board).values() if verdict.verdict is Verdict.NG]
        return 2 if any(verdict.anomaly is not None for verdict in found) else len(found[:1])

    shown = max(boards, key=told)  # the first of those that tell as much
    draw_verdicts(shown, of(shown)).save(file, optimize=True)


def report(
    folder: Path,
    trained: TrainedLine,
    expert_bytes: int,
    specimens: Sequence[Specimen],
    judged: Judged,
    seconds: float,
) -> DemoReport:
    said = [(specimen, judged.verdicts[specimen.file.name]) for specimen in specimens]
    verdicts = [verdict.verdict for _, verdict in said]
    truth = [Verdict.OK if specimen.label == OK else Verdict.NG for specimen, _ in said]
    engine = judged.statistics.engine
    return DemoReport(
        line_file=folder / LINE_FILE,
        picture=folder / PICTURE if (folder / PICTURE).exists() else None,
        experts=len(trained.experts),
        expert_bytes=expert_bytes,
        budget_bytes=judged.budget_bytes,
        held_bytes=sum(pool.peak_used_bytes for pool in engine.pools),
        grown_bytes=judged.grown_bytes,
        left_bytes=judged.left_bytes,
        requests=len(said),
        ok=verdicts.count(Verdict.OK),
        ng=verdicts.count(Verdict.NG),
        unknown=verdicts.count(Verdict.UNKNOWN),
        accuracy=sum(v is t for v, t in zip(verdicts, truth, strict=True)) / len(said),
        label_accuracy=sum(shown_label(v) == known_label(s, v) for s, v in said) / len(said),
        missed=sum(v is Verdict.OK and t is Verdict.NG for v, t in zip(verdicts, truth, strict=True)),
        false_alarms=sum(v is Verdict.NG and t is Verdict.OK for v, t in zip(verdicts, truth, strict=True)),
        images_per_s=len(said) / judged.judging_s,
        judging_s=judged.judging_s,
        switches=engine.switches,
        evictions=engine.evictions,
        bytes_read=engine.bytes_read,
        seconds=seconds,
        stage_s=dict(trained.seconds),
        anomalies=tuple(anomaly_report(each, said) for each in trained.anomalies),
    )


def anomaly_report(trained: TrainedAnomaly, said: Sequence[tuple[Specimen, PartVerdict]]) -> AnomalyReport:
    own = [(specimen.label != OK, verdict) for specimen, verdict in said if specimen.component == trained.component]
    return AnomalyReport(
        expert=trained.expert.id,
        training=trained.training,
        good=trained.good,
        bad=trained.bad,
        threshold=trained.learned.rates.threshold,
        expected=trained.learned.expected,
        judged=len(own),
        defective=sum(is_bad for is_bad, _ in own),
        missed=sum(is_bad and verdict.verdict is Verdict.OK for is_bad, verdict in own),
        false_alarms=sum(not is_bad and verdict.verdict is Verdict.NG for is_bad, verdict in own),
    )


def known_label(specimen: Specimen, verdict: PartVerdict) -> str:
    """True label in the judge's words: anomaly experts tell no defect from another."""
    return ANOMALY_LABELS[1] if verdict.anomaly is not None and specimen.label != OK else specimen.label


def shown_label(verdict: PartVerdict) -> str:
    """``ok`` for a part that passed its whole route, else its last expert's label."""
    return OK if verdict.verdict is Verdict.OK else verdict.label


def anomaly_rows(shown: DemoReport) -> Iterator[tuple[str, str]]:
    if not shown.anomalies:
        yield "anomaly expert", "none: of crops that are given nobody knows whether good parts lie alike in them"
    for each in shown.anomalies:
        yield "anomaly expert", f"{each.expert}, trained on {each.training} good parts and on no defect"
        yield "", f"threshold {each.threshold:g}, from {each.good} other good parts and {each.bad} bad ones"
        wrong = f"{each.missed} missed, {each.false_alarms} false alarms"
        yield "", f"judged {each.judged} on the boards, {each.defective} of them defective: {wrong}"


def show_report(shown: DemoReport) -> None:
    mib = partial(sizes.mib, form=",.0f")
    held_bytes = shown.grown_bytes - shown.left_bytes
    within = held_bytes <= shown.budget_bytes * (1 + MEMORY_TOLERANCE)
    table = Table(title="Verdicts against the truth, images the experts never saw", show_header=False, box=None)
    table.add_row("images", f"{shown.requests}: {shown.ok} OK, {shown.ng} NG, {shown.unknown} UNKNOWN")
    missed = f"{shown.missed} defects missed, {shown.false_alarms} false alarms"
    table.add_row("verdict accuracy", f"{shown.accuracy:.4f}   ({missed})")
    table.add_row("label accuracy", f"{shown.label_accuracy:.4f}")
    for row in anomaly_rows(shown):
        table.add_row(*row)
    table.add_row("throughput", f"{shown.images_per_s:.1f} images/s ({shown.judging_s:.1f} s)")
    table.add_row("experts", f"{shown.experts}, {mib(shown.expert_bytes)} in all; budget {mib(shown.budget_bytes)}")
    moved = f"{shown.switches} switches, {shown.evictions} evictions, {mib(shown.bytes_read)} read from SSD"
    table.add_row("expert management", moved)
    verdict = "within the budget + 5 %" if within else "MORE than the budget + 5 %"
    table.add_row("held by experts", f"ledger: at most {mib(shown.held_bytes)}; process: {mib(held_bytes)}, {verdict}")
    table.add_row(
        "process grew by", f"at most {mib(shown.grown_bytes)}, {mib(shown.left_bytes)} of it the runtimes' own"
    )
    table.add_row("time in all", f"{shown.seconds:.0f} s")
    Console(width=100 if not sys.stdout.isatty() else None, highlight=False).print(table)
    folder = os.path.relpath(shown.line_file.parent)
    line = os.path.relpath(shown.line_file)
    if shown.picture is not None:
        print(f"\nA judged board: {os.path.relpath(shown.picture)}")  # noqa: T201 - the report is this command's output
    coserve = os.path.relpath(sys.argv[0])  # as it was called: it need not be on the PATH
    lines = (
        "\nNext:",
        f"  {coserve} serve {line}      then copy images into {folder}/{INBOX} (done, ng, failed lie beside them)",
        f"  {coserve} results {line} --verdict NG",
        f"  {coserve} experts list {line}",
    )
    print("\n".join(lines))  # noqa: T201 - likewise
