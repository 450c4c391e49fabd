"""`coserve explain` and `trace`: why a running agent did what it did, and what it did when."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from agent.cli.arguments import AsJson, Authority, Certificate, Key, Target, TokenFile
from agent.cli.endings import explained

LONGEST_S = 600
SECONDS_OF = {"": 1, "s": 1, "m": 60}


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


def trace(
    line: Annotated[
        Path | None,
        typer.Argument(metavar="[LINE.yaml]", help="the line file of the agent", show_default=False),
    ] = None,
    last: Annotated[str, typer.Option(metavar="TIME", help="of so long ago until now, such as 60s or 5m")] = "60s",
    out: Annotated[Path, typer.Option(help="file to write")] = Path("coserve-trace.json"),
    target: Target = None,
    ca: Authority = None,
    token_file: TokenFile = None,
    certificate: Certificate = None,
    key: Key = None,
) -> None:
    """Write what a running agent did lately, for https://ui.perfetto.dev. Uses the line's first HTTP address."""
    from agent.commands.asking import AgentAccess, write_trace
    from agent.config import read_line

    if line is None and target is None:
        raise typer.BadParameter("no agent is named - give its LINE.yaml, or --target ADDRESS")
    told = re.fullmatch(r"([0-9]{1,4})(s|m|)", last)
    seconds = 0 if told is None else int(told[1]) * SECONDS_OF[told[2]]
    if not 1 <= seconds <= LONGEST_S:
        raise typer.BadParameter(f"{last!r} is no time from 1s to {LONGEST_S // 60}m", param_hint="--last")
    with explained():
        config = None if line is None else read_line(line)
        size_bytes = write_trace(config, AgentAccess(target, ca, token_file, certificate, key), seconds, out)
    print(f"{out}: {size_bytes} bytes; open it at https://ui.perfetto.dev, which reads it within your browser")
