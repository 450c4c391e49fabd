"""Line file of a demo: experts, routes and boards, with comments for its reader."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import yaml

from agent.demo.rendering.components import synthetic_components
from experts.sizes import MEBIBYTE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from agent.demo.training.train import TrainedLine
    from experts.expert import Expert
    from experts.graph import RouteStep

INBOX = "inbox"
FILE_PATTERN = r"(?P<board>[^_]+)_(?P<component>[^_]+)_(?P<ref>[^.]+)\.png"


def write_line_yaml(
    path: Path,
    trained: TrainedLine,
    memory_bytes: int,
    boards: Mapping[str, Mapping[str, int]],
    name: str = "demo",
    takt_s: float = 60.0,
) -> None:
    """Write a line file that serves what was trained. Weights are named relative to it; its inbox lies beside it.

    ``memory_bytes``: the budget for experts, rounded down to whole MiB. ``boards``: board type to its components'
    quantities.
    """
    sections = [
        f"# Written by `coserve demo`. Paths are relative to this file.\nline: {scalar(name)}\nstate: ./state\n",
        "# Classifiers share the tensors of their trunk, which are held once.\nexperts:",
        *(expert_yaml(expert, path.parent) for expert in trained.experts),
        "\n# A part's classifier first; what it passes goes on to a detector that several components share.\n"
        "# min_score was chosen on crops set aside from training; an anomaly expert has its threshold.\nroutes:",
        *(route_yaml(component, steps) for component, steps in trained.routes.items()),
        *(["\nboards:"] if boards else []),
        *(board_yaml(board, quantities, takt_s) for board, quantities in boards.items()),
        f"\n# Less than all experts need: they take turns.\nmemory: {{host: {memory_bytes // MEBIBYTE}MiB}}",
        f"intake:\n  folders:\n    - {{path: ./{INBOX}, pattern: '{FILE_PATTERN}'}}",
    ]
    path.write_text("\n".join(sections) + "\n")


def expert_yaml(expert: Expert, folder: Path) -> str:
    weights = os.path.relpath(expert.weights, folder)
    lines = [
        f"  {expert.id}:",
        f"    architecture: {expert.architecture}",
        f"    weights: {scalar(weights)}",
        f"    labels: {flow(expert.labels)}",
        f"    input: {{size: [{expert.pixels.height}, {expert.pixels.width}], normalize: {expert.pixels.normalize}}}",
    ]
    if expert.stem is not None:
        lines.append(f"    stem: {expert.stem}")
    if expert.task is not None:
        lines.append(f"    task: {expert.task}   # it knows good parts alone")
        lines.append(f"    threshold: {expert.threshold!r}   # learned on good and bad crops that it was not made from")
        lines.append(f"    threshold_of: '{expert.threshold_of}'   # its weights and input then")
    return "\n".join(lines)


def route_yaml(component: str, steps: Iterable[RouteStep]) -> str:
    lines = [f"  {scalar(component)}:"]
    for step in steps:
        least = f", min_score: {step.min_score:g}" if step.min_score else ""
        lines.append(f"    - {{expert: {step.expert}, pass: {flow(sorted(step.passing))}{least}}}")
    return "\n".join(lines)


def board_yaml(board: str, quantities: Mapping[str, int], takt_s: float) -> str:
    lines = [f"  {scalar(board)}:", f"    takt_s: {takt_s:g}", "    components:"]
    return "\n".join([*lines, *(f"      {scalar(name)}: {count}" for name, count in quantities.items())])


def flow(words: Iterable[str]) -> str:
    return f"[{', '.join(scalar(word) for word in words)}]"


def scalar(text: str) -> str:
    """The text as YAML reads it back: quoted where it would mean something else, such as ``no`` or ``00041``."""
    return yaml.safe_dump([text], default_flow_style=True, width=10_000).strip()[1:-1]


def synthetic_board() -> dict[str, int]:
    return {component.name: component.quantity for component in synthetic_components()}
