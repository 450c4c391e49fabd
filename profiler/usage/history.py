"""Served history: experts and verdict of each request, from results.db or from the output of `coserve results`.

Guarantees: nothing is written, and an agent may run on the line meanwhile; another file, or a row that cannot be read,
is a ConfigError naming the file, the line and the key.
"""

from __future__ import annotations

import csv
import json
import sqlite3
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agent.records.result_reader import ResultReader
from experts.errors import ConfigError, FilePlace
from experts.expert import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

SQLITE_MAGIC = b"SQLite format 3\0"
LARGEST_FIELD_BYTES = 2**24  # of CSV: `detail` holds every box of an image


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """Served request of a line: experts in their order, and verdict."""

    line: str
    experts: tuple[str, ...]
    verdict: Verdict


def served_requests(path: Path) -> Iterator[ServedRequest]:
    """Every request of a results database, or of a JSONL or CSV file that `coserve results` printed.

    Raises ConfigError: see the module.
    """
    try:
        with path.open("rb") as file:
            head = file.read(len(SQLITE_MAGIC))
    except OSError as error:
        hint = "name a results.db, or a file that `coserve results` printed"
        raise ConfigError(f"{path}: cannot be read ({error.strerror}) - {hint}") from error
    if head == SQLITE_MAGIC:
        yield from _from_database(path)
    else:
        yield from _from_text(path)


def _from_database(path: Path) -> Iterator[ServedRequest]:
    try:
        for row in ResultReader(path).query():
            yield ServedRequest(row.result.line, row.result.experts, row.result.verdict)
    except (sqlite3.DatabaseError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path}: not a results database of this version ({error}) - name the results.db of a line's state folder"
        ) from error


def _from_text(path: Path) -> Iterator[ServedRequest]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            is_json = file.read(1) == "{"
            file.seek(0)
            rows = _json_rows(path, file) if is_json else _csv_rows(path, file)
            for number, row in rows:
                yield _request(row, path, number)
    except UnicodeDecodeError as error:
        raise _no_history(path, "neither a database nor text") from error


def _json_rows(path: Path, file: Iterator[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, text in enumerate(file, start=1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"not JSON ({error}) - remove this line", FilePlace(path, number, 1, "syntax")) from error
        if not isinstance(row, dict):
            raise ConfigError("not a JSON object - remove this line", FilePlace(path, number, 1, "syntax"))
        yield number, row


def _csv_rows(path: Path, file: Iterator[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    before = csv.field_size_limit(LARGEST_FIELD_BYTES)
    try:
        reader = csv.DictReader(file)
        missing = [key for key in ("line", "experts", "verdict") if key not in (reader.fieldnames or ())]
        if missing:
            raise _no_history(path, f"no column {', '.join(missing)}")
        for row in reader:
            yield reader.line_num, {**row, "experts": _json_or_text(row["experts"])}
    except csv.Error as error:
        raise _no_history(path, f"not CSV ({error})") from error
    finally:
        csv.field_size_limit(before)


def _json_or_text(text: str | None) -> object:
    try:
        return json.loads(text or "")
    except ValueError:
        return text


def _request(row: Mapping[str, Any], path: Path, number: int) -> ServedRequest:
    """Raises ConfigError naming the key that is missing, or holds something else."""
    for key in ("line", "experts", "verdict"):
        if row.get(key) is None:
            raise ConfigError(
                "is missing - name a file that `coserve results` printed", FilePlace(path, number, 1, key)
            )
    experts, verdict = row["experts"], row["verdict"]
    if not isinstance(experts, list) or not all(isinstance(name, str) for name in experts):
        raise ConfigError(f"{experts!r} is no list of experts - correct it", FilePlace(path, number, 1, "experts"))
    if len(set(experts)) < len(experts):
        raise ConfigError(f"{experts!r} names an expert twice - correct it", FilePlace(path, number, 1, "experts"))
    if verdict not in list(Verdict):
        raise ConfigError(
            f"{verdict!r} is not {', '.join(Verdict)} - correct it", FilePlace(path, number, 1, "verdict")
        )
    return ServedRequest(str(row["line"]), tuple(experts), Verdict(verdict))


def _no_history(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path}: {why} - name a results.db, or a file that `coserve results` printed")
