"""`coserve status`, `generate` and `results`."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import typer

from agent.cli.arguments import AsJson, Authority, Certificate, Key, LineFile, Target, TokenFile
from agent.cli.endings import explained
from experts.expert import Verdict


def results(
    line: LineFile,
    since: Annotated[str | None, typer.Option(help="ISO 8601 time; without an offset, local time")] = None,
    verdict: Annotated[Verdict | None, typer.Option(help="only these")] = None,
    output: Annotated[Literal["jsonl", "csv"], typer.Option("--format", help="of each row")] = "jsonl",
    limit: Annotated[int | None, typer.Option(min=1, help="at most so many")] = None,
    boards: Annotated[bool, typer.Option("--boards", help="one row per board instead of per request")] = False,
    out: Annotated[Path | None, typer.Option(help="to this file, which appears whole or not at all")] = None,
    maps: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="write there where NG images are anomalous, small PNGs")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print stored verdicts, one row per request, oldest first; also while the agent runs."""
    if maps is not None and boards:
        raise typer.BadParameter("boards have no maps, their images have - leave --boards or --maps")
    from agent.commands.results import board_rows, result_rows, with_maps, write_file
    from agent.config import read_line
    from agent.records.export import write_rows

    with explained():
        config = read_line(line)
        start = _time(since)
        rows = board_rows(config, start, verdict, limit) if boards else result_rows(config, start, verdict, limit)
        rows = rows if maps is None else with_maps(config, rows, maps)
        if out is not None:
            count = write_file(rows, output, out)
            print(json.dumps({"file": str(out), "rows": count}) if as_json else f"{out}: {count} rows")
        elif as_json:
            print(json.dumps({"results": list(rows)}))
        else:
            write_rows(rows, output, sys.stdout)


def status(
    line: Annotated[Path | None, typer.Argument(metavar="[LINE.yaml]", help="the line file of the agent")] = None,
    target: Target = None,
    ca: Authority = None,
    token_file: TokenFile = None,
    certificate: Certificate = None,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """State of a running agent: queues, memories, experts and sources. Asked at the line's first gRPC address."""
    from agent.commands.asking import AgentAccess, ask_status
    from agent.commands.status import print_status, status_row
    from agent.config import read_line

    if line is None and target is None:
        raise typer.BadParameter("whose status? - name the agent's LINE.yaml, or --target ADDRESS")
    with explained():
        config = None if line is None else read_line(line)
        answered = ask_status(config, AgentAccess(target, ca, token_file, certificate, key))
    if as_json:
        print(json.dumps(status_row(answered)))
    else:
        print_status(answered)


def generate(
    line: LineFile,
    model: Annotated[str, typer.Argument(help="an expert, a route of texts, or auto", show_default=False)],
    prompt: Annotated[str, typer.Argument(help="what to answer; - reads it from stdin", show_default=False)],
    is_prompt: Annotated[bool, typer.Option("--continue", help="write what follows the prompt, not an answer")] = False,
    system: Annotated[str | None, typer.Option(help="what the model is told before the prompt")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="at most so many; default what the context has")] = None,
    temperature: Annotated[float | None, typer.Option(help="0: the likeliest token, always; default 1")] = None,
    top_p: Annotated[float | None, typer.Option(help="draw from the likeliest tokens of this probability")] = None,
    top_k: Annotated[int | None, typer.Option(help="draw from so many of the likeliest tokens")] = None,
    min_p: Annotated[float | None, typer.Option(help="no token less likely than this share of the likeliest")] = None,
    seed: Annotated[int | None, typer.Option(help="the same text each time")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="end before this; may be given several times")] = None,
    deadline: Annotated[float | None, typer.Option(help="end after so many seconds")] = None,
    streams: Annotated[bool, typer.Option("--stream/--no-stream", help="print the text while it is written")] = True,
    target: Target = None,
    ca: Authority = None,
    token_file: TokenFile = None,
    certificate: Certificate = None,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Let a running agent write a text. Asked at the line's first gRPC address."""
    from agent.commands.asking import AgentAccess, chat_messages, closing_line, for_terminal, generated, order_for
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
        order = order_for(model, text, max_tokens, deadline, tuple(stop or ()), sampling)
        row = generated(config, AgentAccess(target, ca, token_file, certificate, key), order, show)
    if as_json:
        print(json.dumps(row))
        return
    print("" if is_shown else clean(row["text"]))
    sys.stderr.write(f"{closing_line(row)}\n")


def _time(text: str | None) -> datetime | None:
    """An aware time, or None. Raises typer.BadParameter for what is not ISO 8601."""
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text).astimezone()
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a time - write 2026-01-31T06:00", param_hint="--since") from error
