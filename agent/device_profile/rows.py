"""A device profile's records as rows of its tables, and back.

Guarantees: what is read equals what was written, numbers to the last bit; what no column of a profile holds is refused
before it is written, and when it is read (``profile_columns``). Functions here neither begin nor end a transaction.
Those that read raise ValueError or sqlite3.Error where the file does not hold what was written, and those that take
the file's path ProfileDamaged.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from agent.core.performance import HOST, SSD
from agent.device_profile.columns import TABLES, decoded, encoded
from agent.device_profile.records import (
    Agreement,
    Allocation,
    BatchTimes,
    BoxIdentity,
    KindProfile,
    LinkSpeed,
    PoolAllocation,
    SpinTimes,
    StoredProfile,
    Trial,
    UsageOrigin,
    UsageProfile,
)
from agent.device_profile.schema import AGAIN, is_refused_by_disk
from experts.errors import ConfigError, ProfileDamaged

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path
    from sqlite3 import Connection

    from _typeshed import DataclassInstance

CPU = "cpu"
ID = "id"  # the column by which a table holds one row at most
PARTS = ("links", "precisions", "packed", "usage", "allocation")  # each is saved once for every profile


def put_head(connection: Connection, line: str, box: BoxIdentity) -> None:
    """Whose profile it is; not finished."""
    _put(connection, "profile", {"id": 1, "line": line, **_fields(box), "finished_at": None})


def put_kind(connection: Connection, kind: KindProfile) -> None:
    """A kind's row and its batches, in the place of those that were there."""
    row = {name: value for name, value in _fields(kind).items() if name != "batches"}
    _put(connection, "kinds", row)
    key = {name: row[name] for name in ("kind", "processor", "precision")}
    connection.execute("DELETE FROM batches WHERE (kind, processor, precision) = (?, ?, ?)", tuple(key.values()))
    for batch in kind.batches:
        _put(connection, "batches", key | _fields(batch))


def put_agreement(connection: Connection, agreement: Agreement) -> None:
    """A comparison, in the place of the one that was there."""
    _put(connection, "agreements", _fields(agreement))


def put_speedups(connection: Connection, processor: str, speedups: Sequence[float]) -> None:
    """A processor's, in the place of those that were there."""
    _put(connection, "speedups", {"processor": processor, "factors": speedups})


def forget_speedups(connection: Connection, processor: str) -> None:
    """None of this processor any more."""
    connection.execute("DELETE FROM speedups WHERE processor = ?", (processor,))


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


def put_spinning(connection: Connection, spinning: Iterable[SpinTimes]) -> None:
    """All settings that were tried, in the place of those that were there."""
    _replace(connection, "spinning", [_fields(times) for times in spinning])


def put_part(connection: Connection, part: str) -> None:
    """Note that this part was saved for the profile in this file."""
    _put(connection, "parts", {"part": part})


def box_in(connection: Connection) -> BoxIdentity | None:
    """Whose profile it is; None before that is known."""
    head = _head(connection)
    return None if head is None else _box(head)


def kinds_in(connection: Connection) -> tuple[KindProfile, ...]:
    """All kinds, in the order in which they were saved."""
    batches: defaultdict[tuple[str, ...], list[BatchTimes]] = defaultdict(list)
    for row in _rows(connection, "batches"):
        times = BatchTimes(row["batch_size"], tuple(row["seconds"]), row["workspace_bytes"])
        batches[_kind_key(row)].append(times)
    return tuple(
        KindProfile(**row, batches=tuple(batches.get(_kind_key(row), ()))) for row in _rows(connection, "kinds")
    )


def agreements_in(connection: Connection) -> tuple[Agreement, ...]:
    """All comparisons, in the order in which they were saved."""
    return tuple(Agreement(**row) for row in _rows(connection, "agreements"))


def speedups_in(connection: Connection) -> dict[str, tuple[float, ...]]:
    """By processor."""
    return {row["processor"]: tuple(float(each) for each in row["factors"]) for row in _rows(connection, "speedups")}


def precisions_in(connection: Connection) -> dict[tuple[str, str], str]:
    """By (kind, processor)."""
    return {(row["kind"], row["processor"]): row["precision"] for row in _rows(connection, "precisions")}


def links_in(connection: Connection) -> tuple[LinkSpeed, ...]:
    """All links, in the order in which they were saved."""
    return tuple(LinkSpeed(**row) for row in _rows(connection, "links"))


def packed_in(connection: Connection) -> dict[tuple[str, str], str]:
    """(expert, precision or SOURCE) -> sha256."""
    return {(row["expert"], row["precision"]): row["sha256"] for row in _rows(connection, "packed")}


def spinning_in(connection: Connection) -> tuple[SpinTimes, ...]:
    """The settings that were tried, in the order in which they were saved."""
    return tuple(
        SpinTimes(row["setting"], tuple(row["one_s"]), tuple(row["largest_s"]), bool(row["is_chosen"]))
        for row in _rows(connection, "spinning")
    )


def trials_in(connection: Connection, search: str | None = None) -> tuple[Trial, ...]:
    """The trials of one search, or of all, in the order in which they were saved."""
    trials = (Trial(**row) for row in _rows(connection, "trials"))
    return tuple(trial for trial in trials if search in (None, trial.search))


def missing_parts(connection: Connection) -> list[str]:
    """What a whole profile has and this one has not."""
    saved = {row["part"] for row in _rows(connection, "parts")}
    missing = [part for part in PARTS if part not in saved]
    kinds = {_kind_key(row) for row in _rows(connection, "kinds")}
    if not kinds:
        missing.append("kinds")
    chosen = [_kind_key(row) for row in _rows(connection, "precisions")]
    missing += [
        f"the times of {k} in {precision} on {p}" for k, p, precision in chosen if (k, p, precision) not in kinds
    ]
    return missing


def check(connection: Connection, path: Path) -> None:
    """Raises ProfileDamaged, naming ``path``, unless every row of every table may be read."""
    with _understood(path):
        for table in TABLES:
            _rows(connection, table)


def profile_in(connection: Connection, path: Path) -> StoredProfile:
    """The whole profile. Raises ConfigError, naming ``path``, for one that is not whole."""
    with _understood(path):
        head = _head(connection)
        if head is None or head["finished_at"] is None:
            raise ConfigError(f"{path} is a half-written profile - {AGAIN}")
        missing = missing_parts(connection)
        if missing:
            raise ConfigError(f"{path} lacks {', '.join(missing)} - {AGAIN}")
        profile = _whole(connection, head)
        unknown = _unknown_loads(profile)
        if unknown:
            raise ConfigError(f"{path} lacks {', '.join(unknown)} - {AGAIN}")
        return profile


@contextmanager
def _understood(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        if is_refused_by_disk(error):
            raise
        raise ProfileDamaged(path, f"is damaged ({error})", AGAIN) from error
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise ProfileDamaged(path, f"holds what no profile holds ({error})", AGAIN) from error


def _whole(connection: Connection, head: Mapping[str, Any]) -> StoredProfile:
    return StoredProfile(
        line=head["line"],
        written_at=head["finished_at"],
        box=_box(head),
        links=links_in(connection),
        kinds=kinds_in(connection),
        agreements=agreements_in(connection),
        precisions=precisions_in(connection),
        packed=packed_in(connection),
        usage=_usage(connection),
        allocation=_allocation(connection),
        speedups=speedups_in(connection),
        trials=trials_in(connection),
        spinning=spinning_in(connection),
    )


def _unknown_loads(profile: StoredProfile) -> list[str]:
    """Kinds of which nothing tells how long they take to load: neither a time of their own nor the link's speed."""
    links = {link.link for link in profile.links}
    is_split = profile.box.device_bytes is not None
    return [
        f"the time to load {kind.kind} from {source} to {kind.processor}"
        for kind in profile.kinds
        for source in ((SSD, HOST) if is_split and kind.processor != CPU else (SSD,))
        if source not in links and source not in kind.load_s
    ]


def _head(connection: Connection) -> dict[str, Any] | None:
    """The row of the profile itself, if there is one yet."""
    return next(iter(_rows(connection, "profile")), None)


def _box(head: Mapping[str, Any]) -> BoxIdentity:
    values = {field.name: head[field.name] for field in fields(BoxIdentity)}
    return BoxIdentity(**values | {"processors": tuple(head["processors"])})


def _kind_key(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["kind"], row["processor"], row["precision"]


def _usage(connection: Connection) -> UsageProfile:
    rows = _rows(connection, "usage")
    origin = _only(connection, "usage_origin")
    return UsageProfile(
        probabilities={row["expert"]: row["probability"] for row in rows if row["probability"] is not None},
        pass_rates={row["expert"]: row["pass_rate"] for row in rows if row["pass_rate"] is not None},
        origin=UsageOrigin(origin["origin"]),
        requests=origin["requests"],
    )


def _allocation(connection: Connection) -> Allocation:
    origin = _only(connection, "allocation_origin")
    return Allocation(
        origin=origin["origin"],
        budget_bytes={row["pool"]: row["budget_bytes"] for row in _rows(connection, "allocation_budgets")},
        pools=tuple(PoolAllocation(**row) for row in _rows(connection, "allocation_pools")),
        executors={row["processor"]: row["executors"] for row in _rows(connection, "allocation_executors")},
    )


def _only(connection: Connection, table: str) -> dict[str, Any]:
    found = _rows(connection, table)
    if len(found) != 1:
        raise ValueError(f"{table} has {len(found)} rows, not one")
    return found[0]


def _rows(connection: Connection, table: str) -> list[dict[str, Any]]:
    """All rows as they were written, but for the number of one that is alone in its table."""
    columns = [name for name in TABLES[table].columns if name != ID]
    found = connection.execute(f"SELECT {', '.join(columns)} FROM {table} ORDER BY rowid")
    return [decoded(table, dict(zip(columns, row, strict=True))) for row in found]


def _replace(connection: Connection, table: str, rows: Iterable[Mapping[str, object]]) -> None:
    connection.execute(f"DELETE FROM {table}")
    for row in rows:
        _put(connection, table, row)


def _put(connection: Connection, table: str, row: Mapping[str, object]) -> None:
    columns, marks = ", ".join(row), ", ".join("?" * len(row))
    values = tuple(encoded(table, row).values())
    connection.execute(f"INSERT OR REPLACE INTO {table} ({columns}) VALUES ({marks})", values)


def _fields(record: DataclassInstance) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}
