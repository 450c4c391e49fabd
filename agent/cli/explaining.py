"""`coserve explain` and `trace`: why a running agent did what it did, and what it did when."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from agent.cli.arguments import AsJson, Authority, Certificate, Key, Target, TokenFile
from agent.cli.endings import explained


def explain(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[LINE.yaml] SUBJECT",
            help="the line file of the agent; and an image's key, a result's number, an expert or a component",
            show_default=False,
        ),
    ],
    target: Target = None,
    ca: Authority = None,
    token_file: TokenFile = None,
    certificate: Certificate = None,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Tell why: of a result or an image under way, an expert, a component. Uses the line's first gRPC address."""
    from agent.commands.asking import AgentAccess, ask_explanation, for_terminal
    from agent.config import read_line

    *lines, subject = words
    if len(lines) > 1 or not (lines or target):
        raise typer.BadParameter("give one SUBJECT, and LINE.yaml before it or --target ADDRESS")
    with explained():
        config = read_line(Path(lines[0])) if lines else None
        sentences = ask_explanation(config, AgentAccess(target, ca, token_file, certificate, key), subject)
    print(json.dumps({"subject": subject, "sentences": sentences}) if as_json else for_terminal("\n".join(sentences)))
