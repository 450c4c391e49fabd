"""`coserve rejudge`, and `experts compare --over`: archives judged anew."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agent.cli.arguments import AsJson, LineFile
from agent.cli.endings import explained, log_to_stderr, say
from agent.cli.records import time_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent.commands.rejudging.judging import Progress
    from agent.commands.rejudging.rejudge import Rejudged
    from agent.config import LineConfig

PLACES_SHOWN = 10


def rejudge(
    line: LineFile,
    source: Annotated[
        str,
        typer.Argument(
            help="kept (images that the line keeps), results (stored results whose image is there), or a folder",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE.parquet", help="answers; flips go to FILE.html beside it")],
    since: Annotated[
        str | None, typer.Option(help="only images judged (a folder's: written) from this time on")
    ] = None,
    until: Annotated[str | None, typer.Option(help="only images judged (a folder's: written) before this time")] = None,
    component: Annotated[str | None, typer.Option(help="only images of this component type")] = None,
    expert: Annotated[str | None, typer.Option(help="only images whose route may reach this expert")] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="judge on a Ray cluster: auto or HOST:PORT")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Judge an archive anew by this line file, and compare with the stored verdicts. Interrupted, it goes on."""
    with _judging(line) as (config, progress):
        from agent.commands.rejudging.archive import ArchiveQuery
        from agent.commands.rejudging.rejudge import rejudge as judge_anew  # loads torch

        query = ArchiveQuery(source, time_of(since, "--since"), time_of(until, "--until"), component, expert)
        done = judge_anew(config, query, out, progress, cluster)
    say(as_json, done.as_json(), lines_of(done))


def compare_over(line: Path, expert: str, source: str, weights: Path | None, page: Path | None) -> Rejudged:
    """An expert and its candidate over an archive."""
    with _judging(line) as (config, progress):
        from agent.commands.rejudging.archive import ArchiveQuery
        from agent.commands.rejudging.rejudge import rejudge_candidate  # loads torch

        return rejudge_candidate(config, ArchiveQuery(source, expert=expert), weights, page, progress)


@contextmanager
def _judging(line: Path) -> Iterator[tuple[LineConfig, Progress]]:
    from agent.commands.progress import progress_on_stderr
    from agent.config import read_line, set_spinning

    log_to_stderr(logging.WARNING)
    with explained():
        config = read_line(line)
        set_spinning()
        with progress_on_stderr() as progress:
            yield config, progress


def lines_of(done: Rejudged) -> list[str]:
    """A finished run, for people."""
    compared = done.compared
    lines = [] if done.file is None else [f"{done.file}: {compared.images} images"]
    if done.resumed:
        lines[0] += f", {done.resumed} of them judged by an earlier run"
    lines += [f"left out        {count}: {reason}" for reason, count in done.left_out.most_common()]
    if not compared.compared:
        return [*lines, "no image has an earlier answer to compare with"]
    total = compared.total
    lines += [
        f"agreement       {total['agreeing'] / compared.compared:.2%}: {total['agreeing']} of {compared.compared} have "
        "the same verdict and label",
        f"flips           {total['ok_to_ng']} OK to NG, {total['ng_to_ok']} NG to OK, {total['to_unknown']} to "
        f"UNKNOWN, {total['from_unknown']} from UNKNOWN; {total['other_label']} with another label alone",
    ]
    differing = [(place, counts) for place, counts in compared.least_agreeing() if counts["agreeing"] < counts.total()]
    for place, counts in differing[:PLACES_SHOWN]:
        others = ", ".join(f"{count} {kind}" for kind, count in counts.items() if kind != "agreeing")
        lines.append(
            f"  {place.component}, {place.expert or 'no expert'}: {others.replace('_', ' ')} of {counts.total()}"
        )
    if len(differing) > PLACES_SHOWN:
        lines.append(f"  and {len(differing) - PLACES_SHOWN} further components and experts: --json tells all")
    return lines if done.page is None else [*lines, f"page            {done.page}"]
