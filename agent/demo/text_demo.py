"""``coserve demo --llm``: from nothing to two language models that answer from one backbone, and the report.

What answers is the agent that ``coserve serve`` runs: its experts are packed and loaded, a route's rule says who is
asked, and texts are written in iterations that both experts share. What is reported was measured there.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from agent.config import read_line
from agent.demo.demo import fresh_folder, held_bytes
from agent.demo.line import scalar
from agent.demo.texts.asking import ask, ask_all
from agent.demo.texts.characters import Characters
from agent.demo.texts.questions import manual_questions, sum_questions
from agent.demo.texts.training import TextPlan, train_pair, write_model
from agent.demo.training.learning import torch_threads
from agent.deployment.packed_copies import packed_manifests
from agent.service.line_service import LineService
from experts import sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from agent.config import LineConfig
    from agent.demo.texts.asking import Asked, DemoAnswer
    from agent.demo.texts.questions import Questions

    Progress = Callable[[str, int, int], None]  # stage, done, total

ROUTE = "auto"  # of questions that name no expert
MANUAL, SUMS = "txt/manual", "txt/sums"
MEMORY_BYTES = 256 * sizes.MEBIBYTE
AT_ONCE = 16
TRAINING_THREADS = 1  # so small a network gains little by more, and waits for them wherever others are at work
SHOWN = 2  # questions to each expert that are seen being answered


@dataclass(frozen=True, slots=True)
class SubjectScore:
    """An expert's answers to unseen questions. ``misrouted``: questions that the other one answered."""

    expert: str
    questions: int
    right: int
    misrouted: int


@dataclass(frozen=True, slots=True)
class TextDemoReport:
    """Result of the demo; bytes by the ledger and the packed files, times as measured."""

    line_file: Path
    subjects: tuple[SubjectScore, ...]
    expert_bytes: int  # one expert's alone
    held_bytes: int  # most that the ledger counted of both
    tokens: int
    tokens_per_s: float
    first_token_s: float  # median
    at_once: int
    training_s: float
    answering_s: float
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "line_file": str(self.line_file)}


def run_text_demo(
    directory: Path,
    seed: int,
    progress: Progress,
    show: Callable[[str], None],
    plan: TextPlan | None = None,
    subjects: Mapping[str, Questions] | None = None,
) -> TextDemoReport:
    """Make, train and ask a line in ``directory``; ``show`` is told what is asked, and the answers as they come.

    ``plan`` and ``subjects``: what is trained and how, if other than usual. Raises ConfigError for a folder not made by
    a demo.
    """
    began_s = time.monotonic()
    folder = fresh_folder(directory)
    subjects = subjects or {MANUAL: manual_questions(seed), SUMS: sum_questions(seed)}
    write_models(folder, subjects, plan or TextPlan(), seed, progress)
    training_s = time.monotonic() - began_s
    line_file = folder / "line.yaml"
    line_file.write_text(line_yaml(), "utf-8")
    config = read_line(line_file, environment={})
    service = LineService(config, progress)
    service.start()
    try:
        show_answers(service, subjects, show)
        asked = ask_held_out(service, subjects, progress)
        pools = service.agent.loop.statistics().engine.pools
    finally:
        service.stop()
    return TextDemoReport(
        line_file=line_file,
        subjects=tuple(_subject(name, subject, asked.answers) for name, subject in subjects.items()),
        expert_bytes=max(expert_bytes(config).values()),
        held_bytes=sum(pool.peak_used_bytes for pool in pools),
        tokens=sum(answer.tokens for answer in asked.answers),
        tokens_per_s=asked.tokens_per_s,
        first_token_s=statistics.median(answer.first_token_s for answer in asked.answers),
        at_once=AT_ONCE,
        training_s=training_s,
        answering_s=asked.seconds,
        seconds=time.monotonic() - began_s,
    )


def write_models(
    folder: Path, subjects: Mapping[str, Questions], plan: TextPlan, seed: int, progress: Progress
) -> None:
    characters = Characters.of(one for each in subjects.values() for one in (*each.training, *each.held_out))
    with torch_threads(TRAINING_THREADS):
        trained = train_pair(subjects, characters, plan, seed, progress)
    for name, network in trained.items():
        write_model(folder / directory_of(name), network, characters)


def directory_of(expert: str) -> str:
    """Relative to the line file."""
    return f"models/{expert.rpartition('/')[2]}"


def line_yaml() -> str:
    """Line file of both, with comments for its reader."""
    experts = "\n".join(
        f"  {name}: {{architecture: llm, weights: {scalar(directory_of(name))}}}" for name in (MANUAL, SUMS)
    )
    return (
        "# Written by `coserve demo --llm`. Paths are relative to this file.\n"
        "line: demo-texts\nstate: ./state\n"
        "# They have all but their last layer's attention, gate and residual MLP in common, which is held once.\n"
        f"experts:\n{experts}\n"
        "# What has a number in it is a sum.\n"
        f"texts:\n  routes:\n    {ROUTE}: {{rules: [{{matches: '\\d', expert: {SUMS}}}], otherwise: {MANUAL}}}\n"
        f"memory: {{host: {MEMORY_BYTES // sizes.MEBIBYTE}MiB}}\n"
        "# For `coserve generate`, the openai client and grpc: see docs/texts.md.\n"
        'api:\n  grpc: ["unix:./state/api.sock"]\n'
    )


def show_answers(service: LineService, subjects: Mapping[str, Questions], show: Callable[[str], None]) -> None:
    for pair in zip(*(subject.held_out[:SHOWN] for subject in subjects.values()), strict=True):
        for question in pair:
            show(f"> {question.text}\n")
            answer = ask(service.desk, ROUTE, question, show)
            show(f"   ({answer.expert})\n")


def ask_held_out(service: LineService, subjects: Mapping[str, Questions], progress: Progress) -> Asked:
    held_out = [(number, one) for each in subjects.values() for number, one in enumerate(each.held_out)]
    mixed = [one for _, one in sorted(held_out, key=lambda pair: pair[0])]
    return ask_all(service.desk, ROUTE, mixed, AT_ONCE, lambda done: progress("answer held-out", done, len(mixed)))


def expert_bytes(config: LineConfig) -> dict[str, int]:
    manifests = packed_manifests(config)
    return {name: max(held_bytes([one.packed]) for one in each) for name, each in manifests.items()}


def _subject(name: str, subject: Questions, answers: Sequence[DemoAnswer]) -> SubjectScore:
    own = [answer for answer in answers if answer.question in subject.held_out]
    right = sum(answer.is_right for answer in own)
    return SubjectScore(name, len(own), right, sum(answer.expert != name for answer in own))


def show_text_report(shown: TextDemoReport) -> None:
    mib = partial(sizes.mib, form=",.1f")
    table = Table(title="Answers to questions that the experts never saw", show_header=False, box=None)
    for subject in shown.subjects:
        wrong = f", {subject.misrouted} by the other one" if subject.misrouted else ""
        table.add_row(subject.expert, f"{subject.right} of {subject.questions} right{wrong}")
    share = shown.held_bytes / shown.expert_bytes
    table.add_row("held by both", f"{mib(shown.held_bytes)}, {share:.2f} times one expert's {mib(shown.expert_bytes)}")
    rate = f"{shown.tokens_per_s:.0f} tokens/s ({shown.tokens} in {shown.answering_s:.1f} s)"
    table.add_row("throughput", f"{rate}, {shown.at_once} questions at a time")
    table.add_row("first token", f"after {shown.first_token_s * 1e3:.0f} ms, median")
    table.add_row("time in all", f"{shown.seconds:.0f} s, {shown.training_s:.0f} s of it training")
    Console(width=100 if not sys.stdout.isatty() else None, highlight=False).print(table)
    line = os.path.relpath(shown.line_file)
    coserve = os.path.relpath(sys.argv[0])  # as it was called: it need not be on the PATH
    lines = (
        "\nNext:",
        f"  {coserve} serve {line}      then, beside it:",
        f"  {coserve} generate {line} {ROUTE} 'Which oil for the oven?' --temperature 0",
        f"  {coserve} status {line}",
    )
    print("\n".join(lines))  # noqa: T201 - the report is this command's output
