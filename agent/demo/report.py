"""Verdicts of a demo against the truth: as plain values, and as a page."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from agent.demo.line import INBOX, LINE_FILE, PICTURE
from agent.demo.rendering.components import OK
from experts import sizes
from experts.expert import ANOMALY_LABELS, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from agent.demo.line import Judged
    from agent.demo.rendering.picture import PartVerdict
    from agent.demo.training.anomalies import TrainedAnomaly
    from agent.demo.training.crops import LabelledCrop
    from agent.demo.training.train import TrainedLine

MEMORY_TOLERANCE = 0.05


def report_of(
    folder: Path,
    trained: TrainedLine,
    expert_bytes: int,
    crops: Sequence[LabelledCrop],
    judged: Judged,
    seconds: float,
) -> dict[str, Any]:
    """Plain values, as ``--json`` prints them. ``crops``: the judged ones, with the truth.

    Accuracies are those over these crops. ``held_bytes``: most that the ledger counted. ``grown_bytes`` and
    ``left_bytes``: of the agent's process, as in Judged. ``stage_s``: seconds of each stage of training.
    """
    answers = [(crop, judged.verdicts[crop.file]) for crop in crops]
    verdicts = [verdict.verdict for _, verdict in answers]
    wrong = mistakes(answers)
    engine = judged.statistics.engine
    return {
        "line_file": str(folder / LINE_FILE),
        "picture": str(folder / PICTURE) if (folder / PICTURE).exists() else None,
        "experts": len(trained.experts),
        "expert_bytes": expert_bytes,
        "budget_bytes": judged.budget_bytes,
        "held_bytes": sum(pool.peak_used_bytes for pool in engine.pools),
        "grown_bytes": judged.grown_bytes,
        "left_bytes": judged.left_bytes,
        "requests": len(crops),
        **{verdict.lower(): verdicts.count(verdict) for verdict in Verdict},
        "accuracy": 1 - (sum(wrong.values()) + verdicts.count(Verdict.UNKNOWN)) / len(crops),
        "label_accuracy": sum(is_named(crop, verdict) for crop, verdict in answers) / len(crops),
        **wrong,
        "images_per_s": len(crops) / judged.judging_s,
        "judging_s": judged.judging_s,
        "switches": engine.switches,
        "evictions": engine.evictions,
        "bytes_read": engine.bytes_read,
        "seconds": seconds,
        "stage_s": dict(trained.seconds),
        "anomalies": [anomaly_report(each, answers) for each in trained.anomalies],
    }


def mistakes(answers: Sequence[tuple[LabelledCrop, PartVerdict]]) -> dict[str, int]:
    """Defective parts judged OK, and good parts judged NG."""
    return {
        "missed": sum(crop.label != OK and verdict.verdict is Verdict.OK for crop, verdict in answers),
        "false_alarms": sum(crop.label == OK and verdict.verdict is Verdict.NG for crop, verdict in answers),
    }


def anomaly_report(trained: TrainedAnomaly, answers: Sequence[tuple[LabelledCrop, PartVerdict]]) -> dict[str, Any]:
    """Training of an anomaly expert, and its verdicts. ``expected``: rate of false alarms that its samples warrant."""
    own = [(crop, verdict) for crop, verdict in answers if crop.component == trained.component]
    return {
        "expert": trained.expert.id,
        "training": trained.training,
        "good": trained.good,
        "bad": trained.bad,
        "threshold": trained.learned.rates.threshold,
        "expected": trained.learned.expected,
        "judged": len(own),
        "defective": sum(crop.label != OK for crop, _ in own),
        **mistakes(own),
    }


def is_named(crop: LabelledCrop, verdict: PartVerdict) -> bool:
    """The verdict has the true label; an anomaly expert has one word for every defect."""
    known = crop.label if verdict.anomaly is None or crop.label == OK else ANOMALY_LABELS[1]
    return known == (OK if verdict.verdict is Verdict.OK else verdict.label)


def anomaly_rows(anomalies: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    if not anomalies:
        yield "anomaly expert", "none: good parts need not look alike in crops that are given"
    for each in anomalies:
        yield "anomaly expert", "{expert}, trained on {training} good parts and on no defect".format(**each)
        yield "", "threshold {threshold:g}, from {good} other good parts and {bad} bad ones".format(**each)
        words = (
            "judged {judged} on the boards, {defective} of them defective: {missed} missed, {false_alarms} false alarms"
        )
        yield "", words.format(**each)


def show_report(report: dict[str, Any]) -> None:
    held_bytes = report["grown_bytes"] - report["left_bytes"]
    is_within = held_bytes <= report["budget_bytes"] * (1 + MEMORY_TOLERANCE)
    values = report | {
        name: sizes.mib(size, form=",.0f")
        for name, size in {**report, "process_bytes": held_bytes}.items()
        if name.endswith("_bytes") or name == "bytes_read"
    }
    values["judgement"] = "within the budget + 5 %" if is_within else "MORE than the budget + 5 %"
    rows = {
        "images": "{requests}: {ok} OK, {ng} NG, {unknown} UNKNOWN",
        "verdict accuracy": "{accuracy:.4f}   ({missed} defects missed, {false_alarms} false alarms)",
        "label accuracy": "{label_accuracy:.4f}",
        "throughput": "{images_per_s:.1f} images/s ({judging_s:.1f} s)",
        "experts": "{experts}, {expert_bytes} in all; budget {budget_bytes}",
        "expert management": "{switches} switches, {evictions} evictions, {bytes_read} read from SSD",
        "held by experts": "ledger: at most {held_bytes}; process: {process_bytes}, {judgement}",
        "process grew by": "at most {grown_bytes}, {left_bytes} of it the runtimes' own",
        "time in all": "{seconds:.0f} s",
    }
    table = [(name, words.format(**values)) for name, words in rows.items()]
    table[3:3] = anomaly_rows(report["anomalies"])
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
