"""`coserve review` and `rejudge`: what people say about a line's verdicts, and an archive judged again."""

from __future__ import annotations

import json
import logging
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agent.cli.arguments import AsJson, Authority, Certificate, Key, LineFile, Target, TokenFile
from agent.cli.endings import explained, log_to_stderr, say
from agent.cli.records import time_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent.commands.progress import Report
    from agent.config import LineConfig
    from agent.records.station.reviews import ReviewQuery

RATES = ("precision", "recall", "escapes", "false_calls")
MORE_ESCAPES = "WARNING: {expert} lets more defects escape than before, by the images that people reviewed"
review_app = typer.Typer(help="People's verdicts on results: give, list, export.", no_args_is_help=True)
Since = Annotated[str | None, typer.Option(help="only reviews from this time on: 2026-01-31, today, 1h, 7d")]
Until = Annotated[str | None, typer.Option(help="only reviews before this time")]
Judging = Annotated[str | None, typer.Option("--expert", metavar="ID", help="only images that this expert judged")]
Component = Annotated[str | None, typer.Option(help="only images of this component type")]
PLACES_SHOWN = 10


@review_app.command("add")
def add(
    line: LineFile,
    seq: Annotated[int, typer.Argument(metavar="SEQ", help="number of the result", show_default=False)],
    is_ok: Annotated[bool, typer.Option("--ok/--ng", help="what the part is", show_default=False)],
    file: Annotated[
        str | None, typer.Option(metavar="ID", help="results file that SEQ is of; needed once that was replaced")
    ] = None,
    label: Annotated[str | None, typer.Option(help="the defect's name")] = None,
    reason: Annotated[str | None, typer.Option(help="why, for those who read it later")] = None,
    target: Target = None,
    ca: Authority = None,
    token_file: TokenFile = None,
    certificate: Certificate = None,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Say what a part is, beside the machine's verdict, to the running agent. A second review replaces the first."""
    from agent.commands.asking import AgentAccess, web_client
    from agent.config import read_line

    review = {"result": seq, "verdict": "OK" if is_ok else "NG", "label": label, "reason": reason, "file": file}
    with explained():
        access = AgentAccess(target, ca, token_file, certificate, key)
        row = web_client(read_line(line), access).call("POST", "/api/reviews", review)
    found = row["finding"].replace("_", " ")
    say(as_json, row, [f"review {row['number']} of result {seq}: {found}, by {row['who']}"])


@review_app.command("list")
def list_reviews(
    line: LineFile,
    since: Since = None,
    until: Until = None,
    expert: Judging = None,
    component: Component = None,
    as_json: AsJson = False,
) -> None:
    """List reviews that count, oldest first: who, when, what the machine said and what the person says."""
    from agent.commands.progress import console_page
    from agent.commands.reviewing import review_row
    from agent.config import read_line
    from agent.records.truth.reviewed import reviewed_results

    query = _query(since, until, expert, component)
    with explained():
        rows = [review_row(each) for each in reviewed_results(read_line(line), query)]
    if as_json:
        print(json.dumps({"reviews": rows}))
        return
    from rich.table import Table
    from rich.text import Text

    shown = ("number", "at", "who", "seq", "component", "board", "ref", "machine_verdict", "machine_label", "verdict",
             "label", "finding", "reason")  # fmt: skip
    table = Table(*(name.replace("_", " ") for name in shown), box=None, header_style="bold")
    for row in rows:
        table.add_row(*(Text("" if row[name] is None else str(row[name])) for name in shown))
    console_page().print(table)


@review_app.command("export")
def export(
    line: LineFile,
    destination: Annotated[Path, typer.Argument(metavar="DEST", help="a folder that does not exist yet, or is empty")],
    since: Since = None,
    until: Until = None,
    expert: Judging = None,
    component: Component = None,
    as_json: AsJson = False,
) -> None:
    """Export reviewed images: labelled crops, a detector's boxes as YOLO labels, anomaly maps, and a table."""
    from agent.commands.progress import progress_on_stderr
    from agent.commands.reviewing import export_reviews
    from agent.config import read_line

    query = _query(since, until, expert, component)
    with explained(), progress_on_stderr() as progress:
        row = export_reviews(read_line(line), query, destination, progress)
    lines = [f"{row['folder']}: {row['reviews']} reviews, {sum(row['crops'].values())} crops, {row['maps']} maps"]
    lines += [f"crops           {count}: {place}" for place, count in sorted(row["crops"].items())]
    lines += [f"yolo            {count}: {name}" for name, count in sorted(row["yolo"].items())]
    for what in ("left_out", "left_out_of_yolo"):
        lines += [f"{what.replace('_', ' '):<15} {count}: {reason}" for reason, count in sorted(row[what].items())]
    say(as_json, row, lines)


def truth_lines(reviewed: list[dict[str, Any]]) -> list[str]:
    """Figures of versions beside people's verdicts, for people."""
    lines = []
    for row in reviewed:
        before, after = row["before"], row["after"]
        lines.append(
            f"{row['expert']} on {before['images']} reviewed images: before, then after; in brackets the 95 % interval"
        )
        lines += [
            f"  {name.replace('_', ' '):<14}{_rate(before[name]):<34}{_rate(after[name])}".rstrip() for name in RATES
        ]
        if before["unknown"] or after["unknown"]:
            lines.append(f"  {'UNKNOWN':<14}{before['unknown']:<34}{after['unknown']}")
    return lines


def escape_warnings(reviewed: list[dict[str, Any]]) -> list[str]:
    """A sentence for each expert whose new version has more escapes."""
    worse = [row for row in reviewed if row["after"]["escapes"]["count"] > row["before"]["escapes"]["count"]]
    return [MORE_ESCAPES.format_map(row) for row in worse]


def _rate(rate: dict[str, Any]) -> str:
    if not rate["of"]:
        return "none reviewed"
    return "{count} of {of}, {share:.1%} [{low:.1%}, {high:.1%}]".format_map(rate)


def _query(since: str | None, until: str | None, expert: str | None, component: str | None) -> ReviewQuery:
    from agent.records.station.reviews import ReviewQuery

    times = time_of(since, "--since"), time_of(until, "--until")
    return ReviewQuery(since=times[0], until=times[1], expert=expert, component=component)


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
