"""`coserve results`: stored verdicts and boards as rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agent.records.export import plain_board, plain_result, write_rows
from agent.records.result_reader import ResultReader
from experts.errors import ConfigError
from experts.filesystem import whole_file, whole_text_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from datetime import datetime
    from pathlib import Path

    from agent.config import LineConfig
    from agent.records.export import Format
    from agent.records.verdict import KeptMap
    from experts.expert import Verdict


def result_rows(
    config: LineConfig, since: datetime | None, verdict: Verdict | None, limit: int | None
) -> Iterator[dict[str, Any]]:
    """Stored results, oldest first. Raises ConfigError if this line has none yet."""
    for row in _reader(config).query(since=since, verdict=verdict, limit=limit):
        yield plain_result(row)


def board_rows(
    config: LineConfig, since: datetime | None, verdict: Verdict | None, limit: int | None
) -> Iterator[dict[str, Any]]:
    for row in _reader(config).board_query(since, verdict, limit):
        yield plain_board(row)


def with_maps(config: LineConfig, rows: Iterable[dict[str, Any]], folder: Path) -> Iterator[dict[str, Any]]:
    """Rows with ``maps``: anomaly pictures written to ``folder``. Raises ConfigError if the disk refuses."""
    reader = _reader(config)
    for row in rows:
        yield row | {"maps": [_write_map(folder, row["seq"], each) for each in reader.maps(row["seq"])]}


def _write_map(folder: Path, seq: int, kept: KeptMap) -> str:
    file = folder / f"{seq}-{kept.step}-{kept.expert.replace('/', '-')}.png"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with whole_file(file) as out:
            out.write(kept.png)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error} - name a folder that can be written") from error
    return str(file)


def write_file(
    rows: Iterable[dict[str, Any]], output: Format, path: Path, head: str = "", columns: Sequence[str] | None = None
) -> int:
    """``head``, then ``write_rows``, to a file that appears whole or not at all. Raises ConfigError."""
    try:
        with whole_text_file(path) as stream:
            stream.write(head)
            return write_rows(rows, output, stream, columns)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error} - name a file that can be written") from error


def _reader(config: LineConfig) -> ResultReader:
    file = config.results_file
    if not file.is_file():
        raise ConfigError(f"{file}: no results yet - start `coserve serve` for this line first")
    return ResultReader(file)
