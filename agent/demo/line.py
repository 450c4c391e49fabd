"""Line file of a demo: experts, routes and boards, with comments for its reader."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import yaml

from agent.demo.rendering.components import COMPONENTS
from experts.sizes import MEBIBYTE

if TYPE_CHECKING:
    from pathlib import Path

    from agent.demo.training.train import TrainedLine
    from experts.expert import Expert
    from experts.graph import RouteStep

INBOX, LINE_FILE, PICTURE = "inbox", "line.yaml", "board.png"  # in a demo's folder
FILE_PATTERN = r"(?P<board>[^_]+)_(?P<component>[^_]+)_(?P<ref>[^.]+)\.png"


def write_line_yaml(folder: Path, trained: TrainedLine, memory_bytes: int, *, has_boards: bool) -> None:
    """Write a line file that serves the trained experts, with weights relative to it.

    ``memory_bytes``: the budget for experts, rounded down to whole MiB. ``has_boards``: the demo's rendered boards.
    """
    quantities = {component.name: component.quantity for component in COMPONENTS}
    boards = {"boards": {"demo-board": {"takt_s": 60, "components": quantities}}} if has_boards else {}
    sections: list[tuple[str, dict[str, Any]]] = [
        (
            "Classifiers share the tensors of their trunk, which are held once. An anomaly expert knows good parts\n"
            "# alone; its threshold was learned on crops that it was not made from, with the weights of threshold_of.",
            {"experts": {expert.id: expert_values(expert, folder) for expert in trained.experts}},
        ),
        (
            "A part's classifier first; what it passes goes on to a detector that several components share.",
            {"routes": {name: [step_values(step) for step in steps] for name, steps in trained.routes.items()}},
        ),
        (
            "Less memory than all experts need: they take turns.",
            {
                **boards,
                "memory": {"host": f"{memory_bytes // MEBIBYTE}MiB"},
                "intake": {"folders": [{"path": f"./{INBOX}", "pattern": FILE_PATTERN}]},
            },
        ),
    ]
    head = "# Written by `coserve demo`. Paths are relative to this file.\nline: demo\nstate: ./state\n"
    rest = [f"\n# {words}\n{as_yaml(values)}" for words, values in sections]
    (folder / LINE_FILE).write_text(head + "".join(rest), "utf-8")


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
        "task": expert.task and str(expert.task),
        "threshold": expert.threshold,
        "threshold_of": expert.threshold_of,
    }
    return {key: value for key, value in values.items() if value is not None}


def step_values(step: RouteStep) -> dict[str, Any]:
    least = {"min_score": step.min_score} if step.min_score else {}
    return {"expert": step.expert, "pass": sorted(step.passing), **least}
