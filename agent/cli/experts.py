"""`coserve experts list`, `compare`, `promote` and `verify`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from agent.cli.arguments import AsJson, LineFile
from agent.cli.endings import FAILED, explained, say

ExpertName = Annotated[str, typer.Argument(metavar="ID", help="the expert that serves, kind/name", show_default=False)]
VERIFIED = {True: "ok ", False: "BAD", None: "-- "}


def list_experts(line: LineFile, as_json: AsJson = False) -> None:
    """The experts of a line: architecture, labels, packed bytes, usage probability, routes."""
    from agent.commands.experts import expert_rows, print_experts
    from agent.config import read_line

    with explained():
        rows = expert_rows(read_line(line))
    if as_json:
        print(json.dumps({"experts": rows}))
    else:
        print_experts(rows)


def compare_expert(line: LineFile, expert: ExpertName, as_json: AsJson = False) -> None:
    """An expert and the version in its shadow: agreement, flips each way, scores, times, images that differ."""
    from agent.commands.experts import comparison_of, comparison_row, print_comparison
    from agent.config import read_line

    with explained():
        config = read_line(line)
        comparison = comparison_of(config, expert)
    if as_json:
        print(json.dumps(comparison_row(comparison)))
    else:
        print_comparison(comparison, config.state / "images")


def promote_expert(line: LineFile, expert: ExpertName, as_json: AsJson = False) -> None:
    """Swap an expert with the version in its shadow, in the line file; the next reload serves it."""
    from agent.commands.experts import promote

    with explained():
        done = promote(line, expert)
    swapped = ", ".join(done.keys) or "nothing: both entries say the same"
    lines = [
        f"{line}: {done.expert} and {done.shadow} have changed places ({swapped}).",
        "A reload serves it; the earlier version goes on in its shadow, and `promote` again takes it back.",
    ]
    say(as_json, {"expert": done.expert, "shadow": done.shadow, "swapped": list(done.keys)}, lines)


def verify_experts(line: LineFile, as_json: AsJson = False) -> None:
    """Hash every packed byte of a line against what was recorded; exit code 1 if anything is not as it was packed.

    Changes nothing, also beside a running agent; what is not packed yet is told, and is no failure.
    """
    from agent.commands.inspection import verify_line
    from agent.commands.progress import progress_on_stderr
    from agent.config import read_line

    with explained():
        config = read_line(line)
        with progress_on_stderr() as progress:
            rows = verify_line(config, progress)
    lines = [f"{VERIFIED[row['ok']]} {row['expert']}{'' if row['ok'] else ': ' + str(row['reason'])}" for row in rows]
    say(as_json, {"experts": rows}, lines)
    if any(row["ok"] is False for row in rows):
        raise typer.Exit(FAILED)
