"""``coserve demo --llm``: two language models on one backbone, trained, served, asked, and the report.

The answers come from the agent that ``coserve serve`` runs: experts are packed and loaded, a route's rule chooses the
expert, and both experts write in shared iterations. The report holds what was measured there.
"""

from __future__ import annotations

import os
import statistics
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from agent.config import read_line
from agent.demo.demo import fresh_folder, held_bytes, show_page
from agent.demo.texts.models import tokenizer_of, train_pair
from agent.demo.texts.questions import manual_questions, sum_questions
from agent.demo.training.learning import torch_threads
from agent.deployment.packed_copies import packed_manifests
from agent.doors.desk import TextOrder
from agent.service.line_service import LineService
from experts import sizes
from experts.errors import CoServeError
from experts.llm.serving.generation import GREEDY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from agent.demo.texts.questions import DemoQuestion, Questions
    from agent.doors.desk import TextEnd
    from agent.service.desk.line_desk import LineDesk
    from experts.llm.serving.generation import Piece

    Progress = Callable[[str, int, int], None]  # stage, done, total

ROUTE = "auto"  # of questions that name no expert
MANUAL, SUMS = "txt/manual", "txt/sums"
MODELS = {MANUAL: "models/manual", SUMS: "models/sums"}  # relative to the line file
MEMORY_BYTES = 256 * sizes.MEBIBYTE
AT_ONCE = 16
TRAINING_THREADS = 1  # so small a network gains little by more, and waits for them on a busy machine
SHOWN = 2  # questions to each expert that are shown with their answers
ANSWER_LIMIT_S = 120.0
MOST_TOKENS = 60


def run_text_demo(directory: Path, seed: int, progress: Progress, show: Callable[[str], None]) -> dict[str, Any]:
    """Make, train and ask a line in ``directory``: the report, as ``--json`` prints it.

    ``show`` takes questions, and answers as they are written. Raises ConfigError for a folder not made by a demo.
    """
    began_s = time.monotonic()
    folder = fresh_folder(directory)
    subjects = {MANUAL: manual_questions(seed), SUMS: sum_questions(seed)}
    tokenizer = tokenizer_of(one for each in subjects.values() for one in (*each.training, *each.held_out))
    with torch_threads(TRAINING_THREADS):
        trained = train_pair(subjects, tokenizer, seed, progress)
    for name, network in trained.items():
        network.write(folder / MODELS[name], tokenizer)
    training_s = time.monotonic() - began_s
    line_file = folder / "line.yaml"
    line_file.write_text(line_yaml(), "utf-8")
    config = read_line(line_file, environment={})
    service = LineService(config, progress)
    service.start()
    try:
        for pair in zip(*(subject.held_out[:SHOWN] for subject in subjects.values()), strict=True):
            for question in pair:
                show(f"> {question.text}\n")
                show(f"   ({ask(service.desk, question, show)[1].expert})\n")
        answers, answering_s = ask_held_out(service.desk, subjects, progress)
        pools = service.agent.loop.statistics().engine.pools
    finally:
        service.stop()
    ends = [end for _, end in answers.values()]
    tokens = sum(end.written_tokens for end in ends)
    return {
        "line_file": str(line_file),
        "subjects": [
            {
                "expert": name,
                "questions": len(subject.held_out),
                "right": sum(answers[one][0] == one.answer for one in subject.held_out),
                "misrouted": sum(answers[one][1].expert != name for one in subject.held_out),
            }
            for name, subject in subjects.items()
        ],
        "expert_bytes": max(held_bytes([one.packed]) for each in packed_manifests(config).values() for one in each),
        "held_bytes": sum(pool.peak_used_bytes for pool in pools),
        "tokens": tokens,
        "tokens_per_s": tokens / answering_s,
        "first_token_s": statistics.median(end.first_token_s or 0.0 for end in ends),
        "at_once": AT_ONCE,
        "training_s": training_s,
        "answering_s": answering_s,
        "seconds": time.monotonic() - began_s,
    }


def line_yaml() -> str:
    """Line file of both experts, with comments for its reader."""
    experts = "\n".join(f"  {name}: {{architecture: llm, weights: {folder}}}" for name, folder in MODELS.items())
    return (
        "# Written by `coserve demo --llm`. Paths are relative to this file.\n"
        "line: demo-texts\nstate: ./state\n"
        "# They have all but their last layer's attention, gate and residual MLP in common, which is held once.\n"
        f"experts:\n{experts}\n"
        "# What has a number in it is a sum.\n"
        f"texts:\n  routes:\n    {ROUTE}: {{rules: [{{matches: '\\d', expert: {SUMS}}}], otherwise: {MANUAL}}}\n"
        f"memory: {{host: {MEMORY_BYTES // sizes.MEBIBYTE}MiB}}\n"
        "# `coserve generate` asks at a socket in the state. OpenAI's clients need an address (docs/texts.md):\n"
        "# api: {http: '127.0.0.1:8462'}\n"
    )


@dataclass(frozen=True, slots=True)
class AnswerListener:
    """Keeps ``agent.doors.desk.TextListener``."""

    show: Callable[[str], None]
    pieces: list[str] = field(default_factory=list)
    end: Future[TextEnd] = field(default_factory=Future)

    def wrote(self, piece: Piece) -> None:
        self.pieces.append(piece.text)
        self.show(piece.text)

    def ended(self, end: TextEnd) -> None:
        self.end.set_result(end)


def ask(desk: LineDesk, question: DemoQuestion, show: Callable[[str], None] = lambda text: None) -> tuple[str, TextEnd]:
    """The whole answer, and how it ended. Raises CoServeError where it failed or takes too long."""
    listener = AnswerListener(show)
    message = {"role": "user", "content": question.text}
    desk.generate(TextOrder(ROUTE, messages=(message,), most_tokens=MOST_TOKENS, sampling=GREEDY), listener)
    try:
        end = listener.end.result(ANSWER_LIMIT_S)
    except TimeoutError:
        raise CoServeError(f"{question.text!r} was not answered within {ANSWER_LIMIT_S:.0f} s") from None
    if end.failure is not None:
        raise end.failure
    return "".join(listener.pieces), end


def ask_held_out(
    desk: LineDesk, subjects: Mapping[str, Questions], progress: Progress
) -> tuple[dict[DemoQuestion, tuple[str, TextEnd]], float]:
    """Answers to all held-out questions, the subjects mixed, at most AT_ONCE at a time; and the seconds of all."""
    numbered = [(number, one) for each in subjects.values() for number, one in enumerate(each.held_out)]
    mixed = [one for _, one in sorted(numbered, key=lambda pair: pair[0])]
    began_s, answers = time.monotonic(), {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for question, answer in zip(mixed, pool.map(partial(ask, desk), mixed), strict=True):
            answers[question] = answer
            progress("answer held-out", len(answers), len(mixed))
    return answers, time.monotonic() - began_s


def show_text_report(report: dict[str, Any]) -> None:
    mib = partial(sizes.mib, form=",.1f")
    rows = []
    for subject in report["subjects"]:
        wrong = f", {subject['misrouted']} by the other one" if subject["misrouted"] else ""
        rows.append((subject["expert"], f"{subject['right']} of {subject['questions']} right{wrong}"))
    held_bytes, expert_bytes = report["held_bytes"], report["expert_bytes"]
    share = f"{held_bytes / expert_bytes:.2f} times one expert's {mib(expert_bytes)}"
    rate = "{tokens_per_s:.0f} tokens/s ({tokens} in {answering_s:.1f} s)".format(**report)
    rows += [
        ("held by both", f"{mib(held_bytes)}, {share}"),
        ("throughput", f"{rate}, {report['at_once']} questions at a time"),
        ("first token", f"after {report['first_token_s'] * 1e3:.0f} ms, median"),
        ("time in all", "{seconds:.0f} s, {training_s:.0f} s of it training".format(**report)),
    ]
    line = os.path.relpath(report["line_file"])
    following = [
        f"serve {line}      then, beside it:",
        f"generate {line} {ROUTE} 'Which oil for the oven?' --temperature 0",
        f"status {line}",
    ]
    show_page("Answers to questions that the experts never saw", rows, following)
