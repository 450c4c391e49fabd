"""`coserve status`: state of a running agent, as a page."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from agent.commands.progress import console_page
from agent.doors.desk import ShadowsView
from experts.sizes import mib

if TYPE_CHECKING:
    from agent.doors.desk import StatusView, TextsView

VERIFY = "`coserve experts verify` proves an expert by known answers, which its `--check DATA` gives"
EXPERTS_SHOWN = 8  # per memory


def print_status(status: StatusView) -> None:
    console = console_page()
    for line in _summary(status):
        console.print(escape(line))
    for table in (_queues(status), _pools(status), _sources(status)):
        if table.row_count:
            console.print()
            console.print(table)
    troubles = [f"alarm: {alarm}" for alarm in status.alarms]
    if unproven := sorted(status.unproven):
        more = f" and {len(unproven) - EXPERTS_SHOWN} more" if len(unproven) > EXPERTS_SHOWN else ""
        named = f"unproven: {', '.join(unproven[:EXPERTS_SHOWN])}{more}"
        troubles.append(f"{named}: {VERIFY}")
    troubles += [f"expert {expert} gets no requests: {why}" for expert, why in sorted(status.standing.items())]
    troubles += [f"advice: {advice}" for advice in status.advice]
    if troubles:
        console.print()
    for trouble in troubles:
        console.print(escape(trouble))


def _summary(status: StatusView) -> list[str]:
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in status.verdicts.items())
    uptime = timedelta(seconds=int(status.uptime_s))
    read = mib(status.bytes_read)
    images = status.requests_in_flight - status.texts.under_way
    doing = "stopping" if status.is_draining else "running"
    return [
        f"line {status.line}, coserve {status.version}, {doing} for {uptime}",
        f"{images} images under way; judged {verdicts}; {status.boards_open} boards open",
        f"{status.switches} switches, {status.loads} loads, {status.evictions} evictions, {read} read",
        *_texts(status.texts),
        *_shadows(status.shadows),
    ]


def _texts(texts: TextsView) -> list[str]:
    """Empty on a line without texts so far."""
    if not texts.under_way + texts.ended:
        return []
    first = f", first output after {texts.first_token_s / texts.shown:.2f} s on average" if texts.shown else ""
    tokens = f"{texts.read_tokens} tokens read, {texts.written_tokens} written{first}"
    return [f"{texts.under_way} texts under way, {texts.ended} ended; {tokens}"]


def _shadows(shadows: ShadowsView) -> list[str]:
    """Empty on a line without images for shadows so far."""
    if shadows == ShadowsView():
        return []
    ended = f"{shadows.ran} shown to shadows, {shadows.failed} failed, {shadows.dropped} dropped"
    return [f"{shadows.waiting + shadows.running} images under way for shadows; {ended}"]


def _queues(status: StatusView) -> Table:
    titles = ("executor", "processor", "queued", "waited for images", "running")
    table = Table(*titles, box=None, header_style="bold")
    for queue in status.queues:
        waited = f"{queue.waited_s / queue.busy_s:.0%}" if queue.busy_s else "-"
        counts = (str(queue.requests), waited)
        table.add_row(str(queue.executor), queue.processor, *counts, escape(queue.running or "-"))
    return table


def _pools(status: StatusView) -> Table:
    leases = ("texts", "of") if any(pool.lease_capacity_bytes for pool in status.pools) else ()
    table = Table("memory", "used", "of", *leases, "experts", "", box=None, header_style="bold")
    for pool in status.pools:
        shown = ", ".join(pool.experts[:EXPERTS_SHOWN])
        more = f" and {len(pool.experts) - EXPERTS_SHOWN} more" if len(pool.experts) > EXPERTS_SHOWN else ""
        sizes = [mib(pool.used_bytes), mib(pool.capacity_bytes)]
        sizes += [mib(pool.lease_bytes), mib(pool.lease_capacity_bytes)] if leases else []
        table.add_row(escape(pool.name), *sizes, str(len(pool.experts)), escape(shown + more))
    return table


def _sources(status: StatusView) -> Table:
    titles = ("source", "kind", "state", "received", "waiting", "dropped", "left alone", "")
    table = Table(*titles, box=None, header_style="bold")
    for source in status.sources:
        counts = (str(source.received), str(source.waiting), str(source.dropped), str(source.left_alone))
        table.add_row(escape(source.name), source.kind, source.state, *counts, escape(source.alarm or ""))
    return table
