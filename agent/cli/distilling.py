"""`coserve experts distil`: a shallower student of a language model."""

from __future__ import annotations

import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agent.cli.arguments import AsJson
from agent.cli.endings import explained, say

if TYPE_CHECKING:
    from experts.llm.training.distil import Distilled
    from experts.llm.training.staged import Schedule
    from experts.llm.training.step import Losses


def distil(
    teacher: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="a Hugging Face directory", show_default=False)
    ],
    student: Annotated[Path, typer.Argument(help="the directory to write, a new one", show_default=False)],
    texts: Annotated[list[Path], typer.Option(metavar="FILE", help='text, or .jsonl with {"text": ...}; repeatable')],
    depth: Annotated[int, typer.Option(help="layers of the student, fewer than the teacher's")],
    steps: Annotated[int, typer.Option(min=1)] = 1000,
    stop_at: Annotated[
        int | None, typer.Option(metavar="STEP", min=0, help="no soft labels from here on; default: 70 % of the steps")
    ] = None,
    alpha: Annotated[float, typer.Option(min=0.0, help="weight of the teacher's soft labels until then")] = 1.0,
    learning_rate: Annotated[float, typer.Option(min=0.0, help="the highest on the way")] = 3e-4,
    batch_tokens: Annotated[int, typer.Option(min=2, help="tokens of a step, and at most of one row of a text")] = 2048,
    seed: Annotated[int, typer.Option(help="of held-out rows and of the order of the others")] = 0,
    ranks: Annotated[int, typer.Option(min=1, help="processes that share each step's texts and the experts")] = 1,
    as_json: AsJson = False,
) -> None:
    """Train a student of fewer layers from a language model and texts, by its soft labels first (Mixture-of-Students).

    The student begins with the teacher's first and last layer, and with those between at equal distances.
    """
    from agent.environment import set_spinning

    set_spinning()
    with explained():
        from experts.llm.training.distil import DistilOptions  # loads torch
        from experts.llm.training.distil import distil as train_student
        from experts.llm.training.staged import Schedule

        schedule = Schedule(steps, learning_rate, alpha, stop_at)
        options = DistilOptions(depth, schedule, batch_tokens, seed, ranks)
        made = train_student(teacher, student, texts, options, partial(_show_losses, schedule))
    row = asdict(made) | {"steps": steps, "stop_at": schedule.stop_step}
    say(as_json, row, [*_lines(made), "Name it as `weights:` of an expert in the line file."])


def _show_losses(schedule: Schedule, step: int, losses: Losses, held_out: float) -> None:
    alpha = schedule.alpha_at(step - 1)
    stage = f"alpha {alpha:g}, divergence {losses.divergence:.3f}" if alpha else "alpha 0"
    sys.stderr.write(f"step {step}: training loss {losses.cross_entropy:.3f}, held-out {held_out:.3f}, {stage}\n")


def _lines(made: Distilled) -> list[str]:
    layers = ", ".join(map(str, made.kept))
    share = made.parameters / made.teacher_parameters
    experts = f", experts of its layers {list(made.moe_experts)}" if any(made.moe_experts) else ""
    return [
        f"{made.directory}  {made.size_bytes / 1e6:.1f} MB, {share:.0%} of the teacher's parameters",
        f"kept layers {layers}{experts}",
        f"held-out loss {made.loss:.3f}, before the training {made.first_loss:.3f}, the teacher's "
        f"{made.teacher_loss:.3f}",
    ]
