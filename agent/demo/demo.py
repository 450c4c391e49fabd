"""``coserve demo``: from nothing, or from a folder of crops, to a judged line and its report.

The agent is the one that ``coserve serve`` runs: files dropped into an inbox, a memory budget that holds a third of the
experts, verdicts read back from the results file.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import psutil
from rich.console import Console
from rich.table import Table

from agent.demo.line import INBOX, LINE_FILE, PICTURE, crops_of, file_of, judge_apart, renamed, write_line_yaml
from agent.demo.proving import prove, render_held_back, write_answers
from agent.demo.rendering.components import COMPONENTS, OK
from agent.demo.rendering.picture import PartVerdict, draw_verdicts
from agent.demo.rendering.render import RenderedBoard, render_board
from agent.demo.training.crops import divide, load_crops, render_crops, save_crops
from agent.demo.training.train import train_experts
from agent.records.database import is_state_held
from experts import sizes
from experts.backends.control_groups import cores
from experts.errors import ConfigError
from experts.expert import ANOMALY_LABELS, Precision, Verdict
from experts.packed.packing import pack_line
from experts.packed.weights import SegmentStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from agent.demo.line import Judged
    from agent.demo.training.anomalies import TrainedAnomaly
    from agent.demo.training.crops import LabelledCrop
    from agent.demo.training.train import TrainedLine
    from agent.line_file.proofs import Proof
    from experts.packed.weights import PackedExpert

    Progress = Callable[[str, int, int], None]  # stage, done, total

MARKER = ".coserve-demo"  # a folder that holds it was made by a demo, and may be made again
CROPS_PER_LABEL = 5  # the stored network has seen others of each component
HELD_OUT_BOARDS = 8
DEFECT_RATE = 0.12
MEASURED_DEFECT_RATE = 0.35  # of the two shields of a board: so few of them tell nothing of an expert otherwise
HELD_OUT_FRACTION = 0.2
RESIDENT_FRACTION = 1 / 3
WORKSPACE_BYTES = 64 * sizes.MEBIBYTE
MEMORY_TOLERANCE = 0.05
ROWS = {
    "images": "{requests}: {ok} OK, {ng} NG, {unknown} UNKNOWN",
    "verdict accuracy": "{accuracy:.4f}   ({missed} defects missed, {false_alarms} false alarms)",
    "label accuracy": "{label_accuracy:.4f}",
    "throughput": "{images_per_s:.1f} images/s ({judging_s:.1f} s)",
    "experts": "{experts}, {expert_bytes} in all; budgets {budget_bytes}, and {images_bytes} for images",
    "proof": "{proven} of {experts} experts answer {compared} held-back crops as their own networks do",
    "expert management": "{switches} switches, {evictions} evictions, {bytes_read} read from SSD",
    "held by experts": "ledger: at most {held_bytes}; process: {process_bytes}, {judgement}",
    "process grew by": "at most {grown_bytes}, {left_bytes} of it the runtimes' own",
    "first verdict": "{first_verdict_s:.0f} s after the start of this command",
    "time in all": "{seconds:.0f} s",
}
ANOMALY_ROWS = (
    ("anomaly expert", "{expert}, trained on {training} good parts and on no defect"),
    ("", "threshold {threshold:g}, from {good} other good parts and {bad} bad ones"),
    ("", "judged {judged} on the boards, {defective} of them defective: {missed} missed, {false_alarms} false alarms"),
)


def run_demo(directory: Path, data: Path | None, seed: int, progress: Progress) -> dict[str, Any]:
    """Make and judge a line in ``directory``; its report.

    Raises ConfigError for a folder not made by a demo, or unusable DATA.
    """
    started = psutil.Process().create_time()
    folder = fresh_folder(directory)
    threads = cores()
    boards: list[RenderedBoard] = []
    kept: Sequence[LabelledCrop] = ()
    if data is None:
        crops = render_crops(COMPONENTS, CROPS_PER_LABEL, seed, threads, progress)
        save_crops(folder / "crops", crops)
    else:
        crops, kept = divide(load_crops(data), HELD_OUT_FRACTION, seed)
        if not kept:
            raise ConfigError("too few source images to set some aside: give more crops of each component")

    def draw() -> list[LabelledCrop]:
        for number in range(HELD_OUT_BOARDS if data is None else 0):
            name = f"B{number + 1:03d}"
            boards.append(render_board(seed * 1000 + 500 + number, name, DEFECT_RATE, MEASURED_DEFECT_RATE))
        return [crop for board in boards for crop in crops_of(board)] or renamed(kept)

    trained = train_experts(crops, folder / "weights", progress, threads, seed, are_rendered=data is None)
    trained = write_answers(folder, trained, kept or render_held_back(seed, threads))
    expert_bytes = packed_bytes(folder, trained, progress)
    budget_bytes = int(expert_bytes * RESIDENT_FRACTION) + WORKSPACE_BYTES
    write_line_yaml(folder, trained, budget_bytes, has_boards=data is None)
    proofs = prove(folder / LINE_FILE, progress)
    held_out, judged = judge_apart(folder / LINE_FILE, draw, progress)
    if boards:
        paint(folder / PICTURE, boards, judged.verdicts)
    return report_of(folder, trained, expert_bytes, held_out, judged, started) | proof_report(proofs)


def fresh_folder(directory: Path) -> Path:
    """An empty demo folder; an earlier demo's is made anew. Raises ConfigError for anything else that is there."""
    folder = directory.absolute()
    if folder.exists():
        if not folder.is_dir() or (any(folder.iterdir()) and not (folder / MARKER).is_file()):
            raise ConfigError(f"{folder} is there and was not made by a demo - name another folder with --dir")
        if is_state_held(folder / "state"):
            raise ConfigError(f"an agent serves the demo in {folder} - stop it, or name another folder with --dir")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / MARKER).touch()
    return folder


def packed_bytes(folder: Path, trained: TrainedLine, progress: Progress) -> int:
    """Pack the trained experts into the line's state; the memory that all of them take."""
    with closing(SegmentStore(folder / "state" / "packed")) as store:
        packing = pack_line(
            trained.experts,
            lambda _: {Precision.FP32},
            store,
            lambda step: progress("pack experts", step.number, step.total),
        )
    for error in packing.failed.values():
        raise error
    return held_bytes(packed for each in packing.packed.values() for packed in each.values())


def held_bytes(packed: Iterable[PackedExpert]) -> int:
    """The memory that all of these take together: shared parts once."""
    return sum({segment.sha256: segment.slot_bytes for each in packed for segment in each.segments}.values())


def paint(file: Path, boards: Sequence[RenderedBoard], verdicts: Mapping[str, PartVerdict]) -> None:
    """Draw the verdicts into the first board with an anomalous part on it, else with one that is NG."""

    def of(board: RenderedBoard) -> dict[str, PartVerdict]:
        files = {place.ref: file_of(board, place) for place in board.placements}
        return {ref: verdicts[name] for ref, name in files.items() if name in verdicts}

    def rank(board: RenderedBoard) -> tuple[bool, bool]:
        found = [verdict for verdict in of(board).values() if verdict.verdict is Verdict.NG]
        return any(verdict.anomaly is not None for verdict in found), bool(found)

    shown = max(boards, key=rank)
    draw_verdicts(shown, of(shown)).save(file, optimize=True)


def report_of(
    folder: Path, trained: TrainedLine, expert_bytes: int, crops: Sequence[LabelledCrop], judged: Judged, started: float
) -> dict[str, Any]:
    """Plain values, as ``--json`` prints them. ``crops``: the judged ones, with the truth.

    Accuracies are those over these crops. ``stage_s``: seconds of each stage of training. ``started``: when the
    command was, in seconds since the epoch; ``first_verdict_s`` and ``seconds`` are counted from there.
    """
    answers = [(crop, judged.verdicts[crop.file]) for crop in crops]
    verdicts = [verdict.verdict for _, verdict in answers]
    named = 0  # with the true label; an anomaly expert has one word for every defect
    for crop, verdict in answers:
        known = crop.label if verdict.anomaly is None or crop.label == OK else ANOMALY_LABELS[1]
        named += known == (OK if verdict.verdict is Verdict.OK else verdict.label)
    wrong = mistakes(answers)
    return {
        "line_file": str(folder / LINE_FILE),
        "picture": str(folder / PICTURE) if (folder / PICTURE).exists() else None,
        "experts": len(trained.experts),
        "expert_bytes": expert_bytes,
        "requests": len(crops),
        **{verdict.lower(): verdicts.count(verdict) for verdict in Verdict},
        "accuracy": 1 - (sum(wrong.values()) + verdicts.count(Verdict.UNKNOWN)) / len(crops),
        "label_accuracy": named / len(crops),
        **wrong,
        **judged.measured,
        "first_verdict_s": judged.first_verdict_at - started,
        "seconds": time.time() - started,
        "stage_s": dict(trained.seconds),
        "anomalies": [anomaly_report(each, answers) for each in trained.anomalies],
    }


def proof_report(proofs: Sequence[Proof]) -> dict[str, Any]:
    proven = sum(proof.holds for proof in proofs)
    return {"proven": proven, "compared": sum(proof.images for proof in proofs)}


def mistakes(answers: Sequence[tuple[LabelledCrop, PartVerdict]]) -> dict[str, int]:
    """Defective parts judged OK, and good parts judged NG."""
    return {
        "missed": sum(crop.label != OK and verdict.verdict is Verdict.OK for crop, verdict in answers),
        "false_alarms": sum(crop.label == OK and verdict.verdict is Verdict.NG for crop, verdict in answers),
    }


def anomaly_report(trained: TrainedAnomaly, answers: Sequence[tuple[LabelledCrop, PartVerdict]]) -> dict[str, Any]:
    own = [(crop, verdict) for crop, verdict in answers if f"ano/{crop.component}" == trained.expert.id]
    defective = sum(crop.label != OK for crop, _ in own)
    return {
        "expert": trained.expert.id, **trained.samples, "judged": len(own), "defective": defective, **mistakes(own)
    }  # fmt: skip


def show_report(report: dict[str, Any]) -> None:
    held_bytes = report["grown_bytes"] - report["left_bytes"]
    is_within = held_bytes <= (report["budget_bytes"] + report["images_bytes"]) * (1 + MEMORY_TOLERANCE)
    values = report | {
        name: sizes.mib(size, form=",.0f")
        for name, size in {**report, "process_bytes": held_bytes}.items()
        if name.endswith("_bytes") or name == "bytes_read"
    }
    values["judgement"] = "within the budgets + 5 %" if is_within else "MORE than the budgets + 5 %"
    table = [(name, words.format(**values)) for name, words in ROWS.items()]
    anomalies = [(name, words.format(**each)) for each in report["anomalies"] for name, words in ANOMALY_ROWS]
    table[3:3] = anomalies or [("anomaly expert", "none: good parts need not look alike in crops that are given")]
    line = os.path.relpath(report["line_file"])
    following = [
        f"serve {line}      then copy images into {os.path.dirname(line)}/{INBOX} (done, ng, failed lie beside them)",
        f"results {line} --verdict NG",
        f"experts list {line}",
    ]
    note = f"\nA judged board: {os.path.relpath(report['picture'])}\n" if report["picture"] else ""
    show_page("Verdicts against the truth, images the experts never saw", table, following, note)


def show_page(title: str, rows: Sequence[tuple[str, str]], following: Sequence[str], note: str = "") -> None:
    """A table on stdout, a note, and commands of ``coserve`` to go on with."""
    table = Table(title=title, show_header=False, box=None)
    for row in rows:
        table.add_row(*row)
    Console(width=100 if not sys.stdout.isatty() else None, highlight=False).print(table)
    coserve = os.path.relpath(sys.argv[0])  # as it was called: it need not be on the PATH
    lines = "\n".join(f"  {coserve} {words}" for words in following)
    print(f"{note}\nNext:\n{lines}")  # noqa: T201 - the report is this command's output
