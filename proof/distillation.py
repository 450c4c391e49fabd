"""``coserve bench distil``: held-out loss of students of seven layers, of a PR-MoE teacher of eight.

Figures 5 and 6 of DeepSpeed-MoE (arXiv 2201.05596) in small: a teacher learns the demo's questions and answers; then
three students begin with the same layers of it and see the same texts in as many steps: with the teacher's soft labels
until a step (staged), in all steps (full), and in none. Each seed has its own facts, held-out questions, teacher and
order of texts. Steps, alpha and the stop were chosen on CHOSEN_ON, which are none of the measured seeds.
"""

from __future__ import annotations

import math
import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from agent.demo.texts.models import END, TextNetwork, config_of, drawn_texts, tokenizer_of, tokens_of
from agent.demo.texts.questions import manual_questions, sum_questions
from agent.runtime.machine.threads import use_threads
from experts.llm.files.config import parse_spec
from experts.llm.model import LanguageModel
from experts.llm.training.distil import held_out_loss, kept_layers, student_config, student_tensors
from experts.llm.training.staged import Schedule, Training, train
from experts.llm.training.step import TextBatch
from profiler.bench.measured import Column, Measured, Target, this_machine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Progress = Callable[[str, int, int], None]  # stage, done, total

SEEDS = (1, 2, 3, 4, 5)
CHOSEN_ON = (101, 102, 103, 104)
TEACHER, BEGINNING = "teacher", "its kept layers"
STAGED, FULL, NONE = "staged", "full", "none"  # students
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # Student's t, two-sided, by the number of seeds
AT_ONCE = 2  # seeds, on a thread each


@dataclass(frozen=True, slots=True)
class DistilTrial:
    """Sizes of the teacher, and the students' schedule. ``moe_experts``: number in the teacher's layers.

    ``step_tokens``: tokens of a step of the teacher, and of a student.
    """

    hidden: int
    moe_experts: tuple[int, ...]
    step_tokens: tuple[int, int]
    teacher: Schedule
    student: Schedule

    def schedules(self) -> dict[str, Schedule]:
        own = self.student
        stops = {STAGED: own.stop_step, FULL: own.steps, NONE: 0}
        return {name: Schedule(own.steps, own.learning_rate, own.alpha, stop) for name, stop in stops.items()}


TRIAL = DistilTrial(
    40, (0, 2, 0, 2, 0, 4, 0, 4), (800, 200), Schedule(600, 8e-3), Schedule(300, 1e-3, alpha=1.0, stop_at=30)
)


@dataclass(frozen=True, slots=True)
class LossRow:
    """Held-out losses in nats a token, by seed. ``interval``: half of the 95 % interval of their mean."""

    model: str
    losses: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.losses)

    @property
    def interval(self) -> float:
        count = len(self.losses)
        return T_95[count] * statistics.stdev(self.losses) / math.sqrt(count)

    @property
    def each(self) -> str:
        return " ".join(f"{loss:.4f}" for loss in self.losses)


COLUMNS = (
    Column("model", "model"),
    Column("held-out loss", "mean", ".4f"),
    Column("+-", "interval", ".4f"),
    Column("of each seed", "each"),
)


def measure_distillation(progress: Progress, seeds: Sequence[int] = SEEDS, trial: DistilTrial = TRIAL) -> Measured:
    """Train and compare for each seed, two at a time on a thread each."""
    found: list[Mapping[str, float]] = []
    with ThreadPoolExecutor(AT_ONCE, initializer=use_threads, initargs=(1,)) as pool:
        for losses in pool.map(partial(measure_seed, trial=trial), seeds):
            found.append(losses)
            progress("teachers and students", len(found), len(seeds))
    rows = tuple(LossRow(name, tuple(losses[name] for losses in found)) for name in found[0])
    layers, own = len(trial.moe_experts), trial.student
    notes = (
        f"teacher: {layers} layers, moe_experts {list(trial.moe_experts)}, {trial.hidden} wide, {trial.teacher.steps} "
        f"steps of {trial.step_tokens[0]} tokens; students: {layers - 1} layers of it, {own.steps} steps of "
        f"{trial.step_tokens[1]} tokens, alpha {own.alpha:g}, staged until step {own.stop_step}",
        f"seeds {', '.join(map(str, seeds))}; steps, alpha and stop were chosen on seeds "
        f"{', '.join(map(str, CHOSEN_ON))}; +- is half of a 95 % t-interval",
    )
    by_name = {row.model: row for row in rows}
    targets = tuple(staged_target(by_name[STAGED], by_name[other]) for other in (FULL, NONE))
    return Measured(this_machine("one thread for each seed"), COLUMNS, rows, targets, notes)


def staged_target(staged: LossRow, other: LossRow) -> Target:
    """Reached where the whole interval of the seeds' differences is below 0."""
    pairs = zip(staged.losses, other.losses, strict=True)
    change = LossRow("", tuple(own - compared for own, compared in pairs))
    what, found = f"held-out loss, staged less {other.model}", f"{change.mean:+.4f} +- {change.interval:.4f}"
    return Target(what, "below 0", found, change.mean + change.interval < 0)


def measure_seed(seed: int, trial: DistilTrial) -> dict[str, float]:
    """Held-out losses of the teacher, of its layers that a student begins with, and of each student."""
    subjects = manual_questions(seed), sum_questions(seed)
    tokenizer = tokenizer_of(one for each in subjects for one in (*each.training, *each.held_out))
    texts, held_out = (
        [
            TextBatch.of([tokens_of(one, tokenizer) for one in questions], tokenizer.get_vocab()[END])
            for questions in each
        ]
        for each in zip(*subjects, strict=True)
    )
    config = {
        **config_of(tokenizer.get_vocab_size()), "hidden_size": trial.hidden, "intermediate_size": 4 * trial.hidden,
        "num_hidden_layers": len(trial.moe_experts), "num_experts": list(trial.moe_experts),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    network = TextNetwork.untrained(config, generator)
    for tensor in network.tensors.values():
        tensor.requires_grad_()

    def batch_of(step: int, tokens: int, generator: torch.Generator) -> TextBatch:
        return drawn_texts(texts[step % len(texts)], tokens, generator)

    teacher_tokens, student_tokens = trial.step_tokens
    drawn = partial(batch_of, tokens=teacher_tokens, generator=generator)
    train(Training(network.spec, network.tensors), drawn, trial.teacher)
    whole = network.copy()
    teacher = LanguageModel(whole.spec, whole.tensors)
    kept = kept_layers(len(trial.moe_experts), len(trial.moe_experts) - 1, "teacher")
    spec = parse_spec(student_config(config, kept, "teacher"), "student")
    losses = {TEACHER: held_out_loss(teacher, held_out)}
    losses[BEGINNING] = held_out_loss(LanguageModel(spec, student_tensors(whole.tensors, kept)), held_out)
    for name, schedule in trial.schedules().items():
        own = student_tensors(whole.tensors, kept)
        drawn = partial(batch_of, tokens=student_tokens, generator=torch.Generator().manual_seed(seed))
        train(Training(spec, own), drawn, schedule, teacher)
        losses[name] = held_out_loss(LanguageModel(spec, own), held_out)
    return losses
