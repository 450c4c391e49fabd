"""`coserve status`, `generate`, `explain` and `trace`: what a running agent answers, and why it did what it did."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from agent.cli.arguments import AsJson, Authority, Certificate, Key, LineFile, Target, TokenFile
from agent.cli.endings import explained

LONGEST_S = 600
SECONDS_OF = {"": 1, "s": 1, "m": 60}


def status(
    line: Annotated[Path | None, typer.Argument(metavar="[LINE.yaml]", help="the line file of the agent")] = None,
    target: Target = None,
    ca: Authority = None,
    token_file: TokenFile = None,
    certificate: Certificate = None,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Show the state of a running agent: queues, memories, experts, sources. Uses the line's first gRPC address."""
    from agent.commands.asking import AgentAccess, ask_status
    from agent.commands.status import print_status
    from agent.config import read_line

    if line is None and target is None:
        raise typer.BadParameter("no agent is named - give its LINE.yaml, or --target ADDRESS")
    with explained():
        config = None if line is None else read_line(line)
        answered = ask_status(config, AgentAccess(target, ca, token_file, certificate, key))
    if as_json:
        print(json.dumps(asdict(answered)))
    else:
        print_status(answered)


def generate(
    line: LineFile,
    model: Annotated[str, typer.Argument(help="an expert, a route of texts, or auto", show_default=False)],
    prompt: Annotated[str, typer.Argument(help="what to answer; - reads it from stdin", show_default=False)],
    is_prompt: Annotated[bool, typer.Option("--continue", help="write what follows the prompt, not an answer")] = False,
    system: Annotated[str | None, typer.Option(help="system message before the prompt")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="at most so many; default: as many as the context has room for")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0: always the likeliest token; default 1")] = None,
    top_p: Annotated[float | None, typer.Option(help="draw from the likeliest tokens of this probability")] = None,
    top_k: Annotated[int | None, typer.Option(help="draw from this many of the likeliest tokens")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="skip tokens less likely than this share of the likeliest")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="number that makes the text repeatable")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="end before this text; repeatable")] = None,
    deadline: Annotated[float | None, typer.Option(help="end after this many seconds")] = None,
    streams: Annotated[
        bool, typer.Option("--stream/--no-stream", help="print the text while the agent writes it")
    ] = True,
    target: Target = None,
    ca: Authority = None,
    token_file: TokenFile = None,
    certificate: Certificate = None,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Have a running agent write a text. Uses the line's first HTTP address."""
    from agent.commands.asking import AgentAccess, chat_messages, closing_line, for_terminal, generated, text_call
    from agent.config import read_line

    is_shown = streams and not as_json
    clean = for_terminal if sys.stdout.isatty() else str

    def show(piece: str) -> None:
        if is_shown:
            sys.stdout.write(clean(piece))
            sys.stdout.flush()

    with explained():
        config = read_line(line)
        sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, "seed": seed}
        words = sys.stdin.read() if prompt == "-" else prompt
        text = words if is_prompt else chat_messages(words, system)
        call = text_call(model, text, max_tokens, deadline, tuple(stop or ()), sampling)
        row = generated(config, AgentAccess(target, ca, token_file, certificate, key), call, show)
    if as_json:
        print(json.dumps(row))
        return
    print("" if is_shown else clean(row["text"]))
    sys.stderr.write(f"{closing_line(row)}\n")


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
    matched = re.fullmatch(r"([0-9]{1,4})(s|m|)", last)
    seconds = 0 if matched is None else int(matched[1]) * SECONDS_OF[matched[2]]
    if not 1 <= seconds <= LONGEST_S:
        raise typer.BadParameter(f"{last!r} is no time from 1s to {LONGEST_S // 60}m", param_hint="--last")
    with explained():
        config = None if line is None else read_line(line)
        size_bytes = write_trace(config, AgentAccess(target, ca, token_file, certificate, key), seconds, out)
    print(f"{out}: {size_bytes} bytes; open it at https://ui.perfetto.dev, which reads it within your browser")
