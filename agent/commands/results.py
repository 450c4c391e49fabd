"""Stored verdicts and boards as rows, for people and scripts: `coserve results`."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any, TextIO

from agent.records.result_reader import ResultReader
from experts.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from agent.config import LineConfig
    from experts.expert import Verdict


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
