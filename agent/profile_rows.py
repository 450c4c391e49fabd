"""A device profile's records as rows of its tables, and back.

Guarantees: what is read equals what was written, numbers to the last bit; whatever is not a finite number is refused
before it is written. Functions here neither begin nor end a transaction.
"""

from __future__ import annotations

import json
import math
from dataclasses import fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from agent.profile_records import (
    Agreement,
    Allocation,
    BatchTimes,
    BoxIdentity,
    KindProfile,
    LinkSpeed,
    PoolAllocation,
    StoredProfile,
    Trial,
    UsageProfile,
)
from agent.profile_schema import AGAIN
from experts.errors import ConfigError
from experts.expert import Precision

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path
    from sqlite3 import Connection, Row

    from _typeshed import DataclassInstance

BOX_JSON = ("processors", "versions")
PARTS = ("links", "precisions", "packed", "usage", "allocation")  # each is saved once for every profile


def put_head(connection: Connection, line: str, box: BoxIdentity) -> None:
    """Whose profile it is; not finished."""
    row = {name: _json(value) if name in BOX_JSON else value for name, value in _fields(box).items()}
    _put(connection, "profile", {"id": 1, "line": line, **row, "finished_at": None})


def put_kind(connection: Connection, kind: KindProfile) -> None:
    """A kind's row and its batches, in the place of those that were there."""
    row = {name: value for name, value in _fields(kind).items() if name != "batches"}
    _put(connection, "kinds", row | {"load_s": _json(kind.load_s)})
    key = {name: row[name] for name in ("kind", "processor", "precision")}
    connection.execute("DELETE FROM batches WHERE (kind, processor, precision) = (?, ?, ?)", tuple(key.values()))
    for batch in kind.batches:
        _put(connection, "batches", key | _fields(batch) | {"seconds": _json(batch.seconds)})


def put_agreement(connection: Connection, agreement: Agreement) -> None:
    """A comparison, in the place of the one that was there."""
    _put(connection, "agreements", _fields(agreement))


def put_speedups(connection: Connection, processor: str, speedups: Sequence[float]) -> None:
    """A processor's, in the place of those that were there."""
    _put(connection, "speedups", {"processor": processor, "factors": _json(speedups)})


def put_links(connection: Connection, links: Iterable[LinkSpeed]) -> None:
    """All links, in the place of those that were there."""
    _replace(connection, "links", [_fields(link) for link in links])


def put_precisions(connection: Connection, precisions: Mapping[tuple[str, str], str]) -> None:
    """All choices, in the place of those that were there."""
    rows = [{"kind": k, "processor": p, "precision": chosen} for (k, p), chosen in precisions.items()]
    _replace(connection, "precisions", rows)


def put_packed(connection: Connection, packed: Mapping[tuple[str, str], str]) -> None:
    """The digests of everything that is packed, in the place of those that were there."""
    rows = [{"expert": expert, "precision": p, "sha256": sha256} for (expert, p), sha256 in packed.items()]
    _replace(connection, "packed", rows)


def put_usage(connection: Connection, usage: UsageProfile) -> None:
    """The usage, in the place of the one that was there."""
    experts = dict.fromkeys([*usage.probabilities, *usage.pass_rates])
    rates = usage.pass_rates
    rows = [{"expert": e, "probability": usage.probabilities.get(e), "pass_rate": rates.get(e)} for e in experts]
    _replace(connection, "usage", rows)
    _put(connection, "usage_origin", {"id": 1, "origin": usage.origin, "requests": usage.requests})


def put_allocation(connection: Connection, allocation: Allocation) -> None:
    """The allocation, in the place of the one that was there."""
    budgets, executors = allocation.budget_bytes.items(), allocation.executors.items()
    _replace(connection, "allocation_budgets", [{"pool": pool, "budget_bytes": size} for pool, size in budgets])
    _replace(connection, "allocation_pools", [_fields(pool) for pool in allocation.pools])
    rows = [{"processor": processor, "executors": count} for processor, count in executors]
    _replace(connection, "allocation_executors", rows)
    _put(connection, "allocation_origin", {"id": 1, "origin": allocation.origin})


def put_trials(connection: Connection, search: str, trials: Iterable[Trial]) -> None:
    """All trials of a search, in the place of those that were there."""
    connection.execute("DELETE FROM trials WHERE search = ?", (search,))
    for trial in trials:
        if trial.search != search:
            raise ValueError(f"a trial of {trial.search!r} among those of {search!r}")
        _put(connection, "trials", _fields(trial))


def put_part(connection: Connection, part: str) -> None:
    """Note that this part was saved for the profile in this file."""
    _put(connection, "parts", {"part": part})


def box_in(connection: Connection) -> BoxIdentity | None:
    """Whose profile it is; None before that is known."""
    row = connection.execute("SELECT * FROM profile").fetchone()
    return None if row is None else _box(row)


def kinds_in(connection: Connection) -> tuple[KindProfile, ...]:
    """All kinds, in the order in which they were saved."""
    return tuple(_kind(connection, row) for row in _rows(connection, "kinds"))


def agreements_in(connection: Connection) -> tuple[Agreement, ...]:
    """All comparisons, in the order in which they were saved."""
    return tuple(Agreement(**row) for row in _rows(connection, "agreements"))


def speedups_in(connection: Connection) -> dict[str, tuple[float, ...]]:
    """By processor."""
    rows = _rows(connection, "speedups")
    return {row["processor"]: tuple(float(factor) for factor in json.loads(row["factors"])) for row in rows}


def links_in(connection: Connection) -> tuple[LinkSpeed, ...]:
    """All links, in the order in which they were saved."""
    return tuple(LinkSpeed(**row) for row in _rows(connection, "links"))


def packed_in(connection: Connection) -> dict[tuple[str, str], str]:
    """(expert, precision or SOURCE) -> sha256."""
    return {(row["expert"], row["precision"]): row["sha256"] for row in _rows(connection, "packed")}


def trials_in(connection: Connection, search: str | None = None) -> tuple[Trial, ...]:
    """The trials of one search, or of all, in the order in which they were saved."""
    trials = (Trial(**row) for row in _rows(connection, "trials"))
    return tuple(trial for trial in trials if search in (None, trial.search))


def missing_parts(connection: Connection) -> list[str]:
    """What a whole profile has and this one has not."""
    saved = {row["part"] for row in _rows(connection, "parts")}
    missing = [part for part in PARTS if part not in saved]
    kinds = {(row["kind"], row["processor"], row["precision"]) for row in _rows(connection, "kinds")}
    if not kinds:
        missing.append("kinds")
    chosen = [(row["kind"], row["processor"], row["precision"]) for row in _rows(connection, "precisions")]
    missing += [
        f"the times of {k} in {precision} on {p}" for k, p, precision in chosen if (k, p, precision) not in kinds
    ]
    return missing


def profile_in(connection: Connection, path: Path) -> StoredProfile:
    """The whole profile. Raises ConfigError, naming ``path``, for one that is not whole."""
    head = connection.execute("SELECT * FROM profile").fetchone()
    if head is None or head["finished_at"] is None:
        raise ConfigError(f"{path} is a half-written profile - {AGAIN}")
    missing = missing_parts(connection)
    if missing:
        raise ConfigError(f"{path} lacks {', '.join(missing)} - {AGAIN}")
    try:
        return _whole(connection, head)
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise ConfigError(f"{path} holds what no profile holds ({error}) - {AGAIN}") from error


def _whole(connection: Connection, head: Row) -> StoredProfile:
    precisions = _rows(connection, "precisions")
    return StoredProfile(
        line=head["line"],
        written_at=head["finished_at"],
        box=_box(head),
        links=links_in(connection),
        kinds=kinds_in(connection),
        agreements=agreements_in(connection),
        precisions={(row["kind"], row["processor"]): str(Precision(row["precision"])) for row in precisions},
        packed=packed_in(connection),
        usage=_usage(connection),
        allocation=_allocation(connection),
        speedups=speedups_in(connection),
        trials=trials_in(connection),
    )


def _box(row: Row) -> BoxIdentity:
    values = {field.name: row[field.name] for field in fields(BoxIdentity)}
    processors, versions = json.loads(row["processors"]), json.loads(row["versions"])
    return BoxIdentity(**values | {"processors": tuple(processors), "versions": dict(versions)})


def _kind(connection: Connection, row: Mapping[str, Any]) -> KindProfile:
    batches = connection.execute(
        "SELECT batch_size, seconds, workspace_bytes FROM batches WHERE (kind, processor, precision) = (?, ?, ?) "
        "ORDER BY rowid",
        (row["kind"], row["processor"], row["precision"]),
    )
    times = tuple(BatchTimes(size, tuple(json.loads(seconds)), most_bytes) for size, seconds, most_bytes in batches)
    return KindProfile(**{**row, "load_s": dict(json.loads(row["load_s"])), "batches": times})


def _usage(connection: Connection) -> UsageProfile:
    rows = _rows(connection, "usage")
    (origin,) = _rows(connection, "usage_origin")
    return UsageProfile(
        probabilities={row["expert"]: row["probability"] for row in rows if row["probability"] is not None},
        pass_rates={row["expert"]: row["pass_rate"] for row in rows if row["pass_rate"] is not None},
        origin=origin["origin"],
        requests=origin["requests"],
    )


def _allocation(connection: Connection) -> Allocation:
    (origin,) = _rows(connection, "allocation_origin")
    return Allocation(
        origin=origin["origin"],
        budget_bytes={row["pool"]: row["budget_bytes"] for row in _rows(connection, "allocation_budgets")},
        pools=tuple(PoolAllocation(**row) for row in _rows(connection, "allocation_pools")),
        executors={row["processor"]: row["executors"] for row in _rows(connection, "allocation_executors")},
    )


def _rows(connection: Connection, table: str) -> list[dict[str, Any]]:
    return [
        {name: row[name] for name in row.keys() if name != "id"}  # noqa: SIM118  # a Row iterates over its values
        for row in connection.execute(f"SELECT * FROM {table} ORDER BY rowid")
    ]


def _replace(connection: Connection, table: str, rows: Iterable[Mapping[str, object]]) -> None:
    connection.execute(f"DELETE FROM {table}")
    for row in rows:
        _put(connection, table, row)


def _put(connection: Connection, table: str, row: Mapping[str, object]) -> None:
    columns, marks = ", ".join(row), ", ".join("?" * len(row))
    values = tuple(_plain(value, f"{table}.{column}") for column, value in row.items())
    connection.execute(f"INSERT OR REPLACE INTO {table} ({columns}) VALUES ({marks})", values)


def _fields(record: DataclassInstance) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _json(value: Mapping[str, object] | Sequence[object]) -> str:
    if hasattr(value, "items"):
        return json.dumps({name: _plain(each, name) for name, each in value.items()})
    return json.dumps([_plain(each, "a list") for each in value])


def _plain(value: object, where: str) -> str | int | float | None:
    """As SQLite and JSON know it; numpy's numbers become Python's."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real) and math.isfinite(value):
        return float(value)
    raise ValueError(f"{where}: {value!r} is not a finite number")
