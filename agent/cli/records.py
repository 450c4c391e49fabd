"""`coserve results`, `backup` and `restore`: a line's records, also while its agent runs."""

from __future__ import annotations

import json
import re
import sys
from datetime import UTC, datetime, time, timedelta
from pathlib import Path
from typing import Annotated, Literal

import typer

from agent.cli.arguments import AsJson, LineFile
from agent.cli.endings import explained, say, say_rows
from experts.expert import Verdict

WHEN = "2026-01-31, 2026-01-31T06:00 (local time, or with an offset), today, yesterday, or 30m, 1h, 7d ago"
DAYS_AGO = ("today", "yesterday")
UNITS = {"m": "minutes", "h": "hours", "d": "days"}
AGO = re.compile(r"(\d{1,6}) ?([mhd])(?: ago)?")


def results(
    line: LineFile,
    since: Annotated[
        str | None, typer.Option(help="only results from this time on: 2026-01-31T06:00, today, yesterday, 1h, 7d")
    ] = None,
    verdict: Annotated[Verdict | None, typer.Option(help="only this verdict")] = None,
    output: Annotated[Literal["jsonl", "csv"], typer.Option("--format", help="format of the rows")] = "jsonl",
    limit: Annotated[int | None, typer.Option(min=1, help="at most this many rows")] = None,
    boards: Annotated[bool, typer.Option("--boards", help="one row per board instead of per request")] = False,
    bom: Annotated[bool, typer.Option("--bom", help="begin csv with a byte order mark, as Excel needs it")] = False,
    out: Annotated[Path | None, typer.Option(help="write to this file, which appears whole or not at all")] = None,
    maps: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="write anomaly maps of NG images there, as small PNGs")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print stored verdicts, one row per request, oldest first; also while the agent runs."""
    if maps is not None and boards:
        raise typer.BadParameter("only images have maps, boards have none - leave out --boards or --maps")
    from agent.commands.results import board_rows, result_rows, with_maps, write_file
    from agent.config import read_line
    from agent.records.export import BOARD_COLUMNS, RESULT_COLUMNS, csv_head, write_rows

    with explained():
        config = read_line(line)
        start = time_of(since, "--since")
        rows = board_rows(config, start, verdict, limit) if boards else result_rows(config, start, verdict, limit)
        rows = rows if maps is None else with_maps(config, rows, maps)
        columns = BOARD_COLUMNS if boards else RESULT_COLUMNS + (() if maps is None else ("maps",))
        head = csv_head(columns, bom=bom) if output == "csv" else ""
        if out is not None:
            count = write_file(rows, output, out, head, columns)
            print(json.dumps({"file": str(out), "rows": count}) if as_json else f"{out}: {count} rows")
        elif as_json:
            say_rows("results", rows)
        else:
            sys.stdout.write(head)
            write_rows(rows, output, sys.stdout, columns)


def backup(
    line: LineFile,
    destination: Annotated[Path, typer.Argument(metavar="DEST", help="a folder that does not exist yet")],
    as_json: AsJson = False,
) -> None:
    """Copy a line's results, boards, journal, outbox, line file, profile and calibrations; also while it runs."""
    from agent.commands.backup import back_up
    from agent.config import read_line

    with explained():
        made = back_up(read_line(line), destination)
    text = f"{destination}: line {made.line!r}, {len(made.files)} files; kept images and weights are not included"
    say(as_json, {"line": made.line, "made_at": made.made_at, "files": made.files}, [text])


def restore(
    line: Annotated[
        Path, typer.Argument(metavar="LINE.yaml", help="the line file; without one, the backup's is written there")
    ],
    source: Annotated[Path, typer.Argument(metavar="BACKUP", help="the folder of a backup")],
    as_json: AsJson = False,
) -> None:
    """Restore a backup while no agent serves the line. Existing files are renamed, nothing is overwritten."""
    from agent.commands.backup import restore as bring_back

    with explained():
        done = bring_back(line, source)
    made = done.backup
    aside = [str(path) for path in done.aside]
    lines = [f"{line}: line {made.line!r} as of {made.made_at}, {len(made.files)} files"]
    lines += [f"the earlier file is now {path}" for path in aside]
    if done.is_line_file_kept:
        lines.append(f"{line} differs from the backup's line file and was not changed: compare {source / 'line.yaml'}")
    say(as_json, {"line": made.line, "made_at": made.made_at, "files": list(made.files), "aside": aside}, lines)


def time_of(text: str | None, option: str, now: datetime | None = None) -> datetime | None:
    """Parse one of WHEN into an aware time. Raises typer.BadParameter for other texts."""
    if text is None:
        return None
    word, now = text.strip().lower(), (now or datetime.now()).astimezone()
    try:
        if word in DAYS_AGO:
            day = now.date() - timedelta(days=DAYS_AGO.index(word))
            return datetime.combine(day, time()).astimezone(UTC)
        if ago := AGO.fullmatch(word):
            return now.astimezone(UTC) - timedelta(**{UNITS[ago[2]]: int(ago[1])})
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise typer.BadParameter(f"{text!r} is not a time - write {WHEN}", param_hint=option) from error
