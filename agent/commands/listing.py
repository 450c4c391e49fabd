"""Rows for people and scripts: stored verdicts, boards, and the experts of a line."""

from __future__ import annotations

import csv
import json
import logging
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.table import Table

from agent.deployment.profile_in_use import find_profile, usage_of
from agent.records.results import ResultReader
from experts.errors import ConfigError
from experts.manifests import ManifestFolder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from agent.config import LineConfig
    from experts.expert import Verdict
    from experts.manifests import Manifest

log = logging.getLogger(__name__)


def packed_manifests(config: LineConfig) -> dict[str, list[Manifest]]:
    """What is packed of each of a line's experts, in one precision or several; an empty list where nothing is."""
    found: dict[str, list[Manifest]] = {name: [] for name in config.catalog.experts}
    for manifest in ManifestFolder(config.packed_folder / "manifests").read_all():
        found.get(manifest.packed.expert, []).append(manifest)
    return found


def packed_bytes(manifests: Iterable[Manifest]) -> int:
    """The size of all packed files of an expert; those that it shares with others counted in full."""
    return sum(segment.size_bytes for manifest in manifests for segment in manifest.packed.segments)


def result_rows(
    config: LineConfig, since: datetime | None, verdict: Verdict | None, limit: int | None
) -> Iterator[dict[str, Any]]:
    """Stored results, oldest first. Raises ConfigError when this line has none yet."""
    for row in _reader(config).query(since=since, verdict=verdict, limit=limit):
        yield {"seq": row.seq} | {name: _plain(value) for name, value in asdict(row.result).items()}


def board_rows(
    config: LineConfig, since: datetime | None, verdict: Verdict | None, limit: int | None
) -> Iterator[dict[str, Any]]:
    """Stored board verdicts, oldest first. Raises ConfigError when this line has none yet."""
    rows = [row for row in _reader(config).boards(since) if verdict is None or row.board.verdict is verdict]
    for row in rows if limit is None else rows[-limit:]:
        board = {name: _plain(value) for name, value in asdict(row.board).items()}
        yield {"seq": row.seq, "revisions": row.revisions} | board


def write_rows(rows: Iterable[dict[str, Any]], output: str, stream: TextIO) -> None:
    """As JSON lines, or as CSV with a header; what is nested stays JSON inside a CSV field."""
    writer = None
    for row in rows:
        if output == "jsonl":
            stream.write(json.dumps(row) + "\n")
            continue
        if writer is None:
            writer = csv.DictWriter(stream, fieldnames=list(row))
            writer.writeheader()
        writer.writerow({key: json.dumps(v) if isinstance(v, dict | list) else v for key, v in row.items()})


def expert_rows(config: LineConfig) -> list[dict[str, Any]]:
    """One row per expert, the most used first: id, architecture, labels, weights, sizes, usage, routes, pin.

    ``usage`` is what the agent counts on: the device profile's, or computed where there is no profile that can be read.
    ``size_bytes`` is what is packed, ``weights_bytes`` the file it comes from; None for what is not there.
    """
    manifests = packed_manifests(config)
    usage = _usage(config)
    routes = config.catalog.graph.routes
    rows = [
        {
            "expert": name,
            "architecture": expert.architecture,
            "labels": list(expert.labels),
            "weights": str(expert.weights),
            "size_bytes": packed_bytes(manifests[name]) if manifests[name] else None,
            "weights_bytes": expert.weights.stat().st_size if expert.weights.is_file() else None,
            "usage": round(usage[name], 6),
            "routes": [route for route, steps in routes.items() if any(step.expert == name for step in steps)],
            "pin": expert.pin,
        }
        for name, expert in config.catalog.experts.items()
    ]
    return sorted(rows, key=lambda row: (-float(str(row["usage"])), str(row["expert"])))


def print_experts(rows: list[dict[str, Any]]) -> None:
    """The same as a table."""
    table = Table("expert", "architecture", "packed", "usage", "labels", "routes", box=None, header_style="bold")
    for row in rows:
        size = "not yet" if row["size_bytes"] is None else f"{row['size_bytes'] / 2**20:.1f} MiB"
        size += ", weights MISSING" if row["weights_bytes"] is None else ""
        pin = " (pinned)" if row["pin"] else ""
        labels, routes = ", ".join(row["labels"]), ", ".join(row["routes"])
        table.add_row(row["expert"] + pin, row["architecture"], size, f"{row['usage']:.4f}", labels, routes)
    Console(width=160 if not Console().is_terminal else None).print(table)


def _usage(config: LineConfig) -> dict[str, float]:
    try:
        return usage_of(config, find_profile(config))
    except ConfigError as error:
        log.warning("usage_computed without the device profile: %s", error)
        return usage_of(config, None)


def _reader(config: LineConfig) -> ResultReader:
    file = config.results_file
    if not file.is_file():
        raise ConfigError(f"{file}: no results yet - start `coserve serve` for this line first")
    return ResultReader(file)


def _plain(value: object) -> object:
    """As JSON knows it; times as ISO 8601 with their offset."""
    if isinstance(value, datetime):
        return value.isoformat()
    return list(value) if isinstance(value, tuple) else value
