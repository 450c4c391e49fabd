"""What each column of a device profile's tables holds: asked before a row is written, and again when it is read.

SQLite does not tell: every column takes text as well, and text counts as more than any number. A file that was edited
is refused where it is read, by table, column and row, instead of failing wherever the value is reckoned with.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from agent.device_profile.openmp import SPINNING
from agent.device_profile.records import SOURCE, UsageOrigin
from experts.expert import Precision

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MOST_SHOWN = 60  # characters of a value that is refused
PRECISIONS = frozenset(Precision)
SHARE_ROUNDING = 1e-9  # shares are sums of quotients

Value = str | int | float | None  # as SQLite keeps it


@dataclass(frozen=True, slots=True)
class Column:
    """``wanted``: what it holds, in words; ``fits``: whether a value is that. What is JSON in the file is decoded."""

    wanted: str
    fits: Callable[[Any], bool]
    is_json: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """``key``: the columns that tell one row from the others, none where there is one row only."""

    columns: Mapping[str, Column]
    key: tuple[str, ...] = ()


def encoded(table: str, row: Mapping[str, object]) -> dict[str, Value]:
    """A row as the file keeps it. Raises ValueError, naming table, column and row, for what no profile holds."""
    declared = TABLES[table]
    plain = {name: _plain(value, f"{table}.{name}") for name, value in row.items()}
    for name, value in plain.items():
        _check(table, name, value, plain)
    return {name: json.dumps(value) if declared.columns[name].is_json else value for name, value in plain.items()}


def decoded(table: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as it was written. Raises ValueError as ``encoded``."""
    found = dict(row)
    for name in row:
        column = TABLES[table].columns[name]
        if column.is_json:
            try:
                found[name] = json.loads(row[name])
            except (ValueError, TypeError, RecursionError) as error:
                raise ValueError(f"{_place(table, name, row)}: {_shown(row[name])} is not {column.wanted}") from error
        _check(table, name, found[name], row)
    return found


def _check(table: str, name: str, value: object, row: Mapping[str, Any]) -> None:
    column = TABLES[table].columns[name]
    if not column.fits(value):
        raise ValueError(f"{_place(table, name, row)}: {_shown(value)} is not {column.wanted}")


def _place(table: str, name: str, row: Mapping[str, Any]) -> str:
    key = ", ".join(str(row[part]) for part in TABLES[table].key)
    return f"{table}.{name} of {key}" if key else f"{table}.{name}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def _plain(value: Any, where: str) -> Any:  # noqa: ANN401  # whatever a record holds
    """As SQLite and JSON know it; numpy's numbers become Python's."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        if not math.isfinite(value):
            raise ValueError(f"{where}: {value!r} is not a finite number")
        return float(value)
    if hasattr(value, "items"):
        return {name: _plain(each, where) for name, each in value.items()}
    return [_plain(each, where) for each in value]


# -- what a column may hold --


def _is_finite(value: object) -> bool:
    """A number that can be reckoned with; JSON's may be too large for a float."""
    if type(value) is float:
        return math.isfinite(value)
    return type(value) is int and abs(value) <= 2**1000


def _is_precision(value: object) -> bool:
    return isinstance(value, str) and value in PRECISIONS


def _whole(least: int) -> Column:
    return Column(f"a whole number from {least}", lambda value: type(value) is int and value >= least)


def _optional(column: Column) -> Column:
    return Column(f"{column.wanted}, or nothing", lambda value: value is None or column.fits(value))


def _json_list(column: Column) -> Column:
    """Of at least one."""
    return Column(
        f"a list, each {column.wanted}",
        lambda value: isinstance(value, list) and bool(value) and all(column.fits(each) for each in value),
        is_json=True,
    )


def _json_mapping(column: Column) -> Column:
    return Column(
        f"names, each with {column.wanted}",
        lambda value: isinstance(value, dict) and all(column.fits(each) for each in value.values()),
        is_json=True,
    )


TEXT = Column("text", lambda value: isinstance(value, str))
PRECISION = Column(f"one of {', '.join(Precision)}", _is_precision)
FORM = Column(f"{PRECISION.wanted}, {SOURCE}", lambda value: value == SOURCE or _is_precision(value))
NUMBER = Column("a finite number from 0", lambda value: _is_finite(value) and value >= 0)
POSITIVE = Column("a finite number above 0", lambda value: _is_finite(value) and value > 0)
SHARE = Column("a number from 0 to 1", lambda value: _is_finite(value) and 0 <= value <= 1 + SHARE_ROUNDING)
ORIGINS = frozenset(UsageOrigin)
ORIGIN = Column(f"one of {', '.join(UsageOrigin)}", lambda value: isinstance(value, str) and value in ORIGINS)
SPIN = Column(f"one of {', '.join(SPINNING)}", lambda value: isinstance(value, str) and value in SPINNING)
FLAG = Column("0 or 1", lambda value: type(value) is int and value in (0, 1))
COUNT, BYTES, POSITIVE_COUNT = _whole(0), _whole(0), _whole(1)

KIND_KEY = {"kind": TEXT, "processor": TEXT, "precision": PRECISION}
TABLES: Mapping[str, Table] = {
    "profile": Table(
        {
            "id": POSITIVE_COUNT,
            "line": TEXT,
            "device": TEXT,
            "model": TEXT,
            "processors": _json_list(TEXT),
            "cores": POSITIVE_COUNT,
            "host_bytes": BYTES,
            "device_bytes": _optional(BYTES),
            "versions": _json_mapping(TEXT),
            "finished_at": _optional(TEXT),
        }
    ),
    "parts": Table({"part": TEXT}, ("part",)),
    "links": Table({"link": TEXT, "bytes_per_s": POSITIVE}, ("link",)),
    "kinds": Table(
        KIND_KEY
        | {
            "architecture": TEXT,
            "threads": POSITIVE_COUNT,
            "K_s": NUMBER,
            "B_s": NUMBER,
            "fit_error": NUMBER,
            "max_batch": POSITIVE_COUNT,
            "weight_bytes": BYTES,
            "workspace_base_bytes": BYTES,
            "workspace_bytes": BYTES,
            "load_s": _json_mapping(NUMBER),
            "samples": TEXT,
        },
        tuple(KIND_KEY),
    ),
    "batches": Table(
        KIND_KEY | {"batch_size": POSITIVE_COUNT, "seconds": _json_list(NUMBER), "workspace_bytes": BYTES},
        (*KIND_KEY, "batch_size"),
    ),
    "agreements": Table(
        KIND_KEY
        | {
            "images": COUNT,
            "labels_differ": COUNT,
            "largest_score_difference": NUMBER,
            "tolerance": NUMBER,
            "samples_sha256": TEXT,
        },
        tuple(KIND_KEY),
    ),
    "precisions": Table(KIND_KEY, ("kind", "processor")),
    "speedups": Table({"processor": TEXT, "factors": _json_list(POSITIVE)}, ("processor",)),
    "packed": Table({"expert": TEXT, "precision": FORM, "sha256": TEXT}, ("expert", "precision")),
    "usage_origin": Table({"id": POSITIVE_COUNT, "origin": ORIGIN, "requests": COUNT}),
    "usage": Table({"expert": TEXT, "probability": _optional(SHARE), "pass_rate": _optional(SHARE)}, ("expert",)),
    "allocation_origin": Table({"id": POSITIVE_COUNT, "origin": TEXT}),
    "allocation_budgets": Table({"pool": TEXT, "budget_bytes": BYTES}, ("pool",)),
    "allocation_pools": Table(
        {"pool": TEXT, "expert_bytes": BYTES, "workspace_bytes": BYTES, "experts": COUNT}, ("pool",)
    ),
    "allocation_executors": Table({"processor": TEXT, "executors": COUNT}, ("processor",)),
    "spinning": Table(
        {"setting": SPIN, "one_s": _json_list(POSITIVE), "largest_s": _json_list(POSITIVE), "is_chosen": FLAG},
        ("setting",),
    ),
    "trials": Table(
        {"search": TEXT, "number": COUNT, "setting": TEXT, "images_per_s": NUMBER, "note": TEXT}, ("search", "number")
    ),
}
