"""`coserve rejudge`, and what `experts compare --over` shares with it."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agent.cli.arguments import AsJson, LineFile
from agent.cli.endings import explained, log_to_stderr, say
from agent.cli.records import time_of
from agent.cli.reviews import truth_lines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent.commands.progress import Report
    from agent.config import LineConfig

PLACES_SHOWN = 10


def rejudge(
    line: LineFile,
    source: Annotated[str, typer.Argument(help="kept, results, reviewed, or a folder of images", show_default=False)],
    out: Annotated[Path, typer.Option(metavar="FILE.parquet", help="answers; flips go to FILE.html beside it")],
    since: Annotated[str | None, typer.Option(help="only images judged (of a folder: written) since then")] = None,
    until: Annotated[str | None, typer.Option(help="only images judged (of a folder: written) before")] = None,
    component: Annotated[str | None, typer.Option(help="only images of this component type")] = None,
    expert: Annotated[str | None, typer.Option(help="only images whose route may reach this expert")] = None,
    cluster: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Ray cluster: auto or HOST:PORT")] = None,
    as_json: AsJson = False,
) -> None:
    """Judge an archive anew by this line file, and compare with the stored verdicts. Interrupted, it goes on."""
    with judging(line) as (config, progress):
        from agent.commands.rejudging.archive import ArchiveQuery
        from agent.commands.rejudging.rejudge import rejudge as judge_anew  # loads torch

        query = ArchiveQuery(source, time_of(since, "--since"), time_of(until, "--until"), component, expert)
        row = judge_anew(config, query, out, progress, cluster)
    say(as_json, row, lines_of(row))


@contextmanager
def judging(line: Path) -> Iterator[tuple[LineConfig, Report]]:
    """The line and its progress, before torch is loaded."""
    from agent.commands.progress import progress_on_stderr
    from agent.config import read_line
    from agent.environment import set_spinning

    log_to_stderr(logging.WARNING)
    with explained(), progress_on_stderr() as progress:
        config = read_line(line)
        set_spinning()
        yield config, progress


def lines_of(row: dict[str, Any]) -> list[str]:
    """A finished run, for people."""
    from agent.commands.rejudging.agreement import DIFFERING

    resumed = f", {row['resumed']} of them judged by an earlier run" if row["resumed"] else ""
    lines = [f"{row['file']}: {row['images']} images{resumed}"] if row["file"] else []
    lines += [f"left out        {count}: {reason}" for reason, count in row["left_out"].most_common()]
    if not row["compared"]:
        return [*lines, "no image has an earlier answer to compare with"]
    lines += [
        "agreement       {agreement:.2%}: {agreeing} of {compared} have the same verdict and label".format_map(row),
        "flips           {ok_to_ng} OK to NG, {ng_to_ok} NG to OK, {to_unknown} to UNKNOWN, {from_unknown} from "
        "UNKNOWN; {other_label} with another label alone".format_map(row),
    ]
    differing = [place for place in row["places"] if place["agreeing"] < place["images"]]
    for place in differing[:PLACES_SHOWN]:
        others = ", ".join(f"{place[kind]} {kind.replace('_', ' ')}" for kind in DIFFERING if place[kind])
        lines.append(f"  {place['component']}, {place['expert'] or 'no expert'}: {others} of {place['images']}")
    if len(differing) > PLACES_SHOWN:
        lines.append(f"  and {len(differing) - PLACES_SHOWN} further components and experts: --json tells all")
    lines += truth_lines(row["reviewed"])
    return [*lines, f"page            {row['page']}"] if row["page"] else lines
