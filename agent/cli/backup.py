"""`coserve backup` and `restore`: a line's records and measurements in a folder, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agent.cli.arguments import AsJson, LineFile
from agent.cli.endings import explained, say


def backup(
    line: LineFile,
    destination: Annotated[Path, typer.Argument(metavar="DEST", help="a folder that is not there yet")],
    as_json: AsJson = False,
) -> None:
    """Copy a line's results, boards, journal, outbox, line file, profile and calibrations; also while it runs."""
    from agent.commands.backup import back_up
    from agent.config import read_line

    with explained():
        made = back_up(read_line(line), destination)
    text = f"{destination}: line {made.line!r}, {len(made.files)} files; kept images and weights are not in it"
    say(as_json, {"line": made.line, "made_at": made.made_at, "files": made.files}, [text])


def restore(
    line: Annotated[Path, typer.Argument(metavar="LINE.yaml", help="the line file; made where it is not there")],
    source: Annotated[Path, typer.Argument(metavar="BACKUP", help="the folder of a backup")],
    as_json: AsJson = False,
) -> None:
    """Bring a backup back, while no agent serves the line. What lies there is put aside, nothing is overwritten."""
    from agent.commands.backup import restore as bring_back

    with explained():
        done = bring_back(line, source)
    made = done.backup
    aside = [str(path) for path in done.aside]
    lines = [f"{line}: line {made.line!r} as of {made.made_at}, {len(made.files)} files"]
    lines += [f"what lay there before is {path}" for path in aside]
    if done.is_line_file_kept:
        lines.append(
            f"{line} differs from the backup's line file and was left as it is: compare {source / 'line.yaml'}"
        )
    say(as_json, {"line": made.line, "made_at": made.made_at, "files": list(made.files), "aside": aside}, lines)
