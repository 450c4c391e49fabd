"""A device profile's records as rows of its tables, and back. The caller has the transaction.

Reading raises ValueError or sqlite3.Error for invalid rows, ProfileDamaged where a path is given.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from agent.core.performance import HOST, SSD
from agent.device_profile.records import (
    Agreement,
    Allocation,
    BatchTimes,
    BoxIdentity,
    ExpertForm,
    ImageDecoding,
    KindProfile,
    LinkSpeed,
    PoolAllocation,
    SearchTrial,
    StoredProfile,
    UsageOrigin,
    UsageProfile,
)
from agent.device_profile.schema import AGAIN, understood
from agent.device_profile.tables import TABLES
from experts.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from sqlite_utils import Database

CPU = "cpu"
REQUIRED = ("links", "precisions", "packed", "usage", "allocation")  # parts: each is saved once for every profile


def put_head(database: Database, line: str, box: BoxIdentity) -> None:
    TABLES["profile"].replace(database, [{"line": line, **asdict(box), "finished_at": None}])


def put_kind(database: Database, kind: KindProfile) -> None:
    key = {"kind": kind.kind, "processor": kind.processor, "precision": kind.precision}
    TABLES["kinds"].put(database, kind)
    TABLES["batches"].delete(database, **key)
    TABLES["batches"].put(database, *(key | asdict(batch) for batch in kind.batches))


def put_speedups(database: Database, processor: str, speedups: Sequence[float]) -> None:
    TABLES["speedups"].put(database, {"processor": processor, "factors": speedups})


def put_usage(database: Database, usage: UsageProfile) -> None:
    experts = dict.fromkeys([*usage.probabilities, *usage.pass_rates])
    rates = usage.pass_rates
    rows = [{"expert": e, "probability": usage.probabilities.get(e), "pass_rate": rates.get(e)} for e in experts]
    TABLES["usage"].replace(database, rows)
    TABLES["usage_origin"].replace(database, [usage])


def put_allocation(database: Database, allocation: Allocation) -> None:
    TABLES["allocation_budgets"].replace_mapping(database, allocation.budget_bytes)
    TABLES["allocation_pools"].replace(database, allocation.pools)
    TABLES["allocation_executors"].replace_mapping(database, allocation.executors)
    TABLES["allocation_origin"].replace(database, [allocation])


def box_in(database: Database) -> BoxIdentity | None:
    head = _head(database)
    return None if head is None else _box(head)


def kinds_in(database: Database) -> tuple[KindProfile, ...]:
    """All kinds, in the order of saving."""
    batches: defaultdict[tuple[str, ...], list[BatchTimes]] = defaultdict(list)
    for row in TABLES["batches"].rows(database):
        batches[_kind_key(row)].append(BatchTimes(row["batch_size"], row["seconds"], row["workspace_bytes"]))
    return tuple(KindProfile(**row, batches=tuple(batches[_kind_key(row)])) for row in TABLES["kinds"].rows(database))


def missing_parts(database: Database) -> list[str]:
    saved = {row["part"] for row in TABLES["parts"].rows(database)}
    missing = [part for part in REQUIRED if part not in saved]
    kinds = {_kind_key(row) for row in TABLES["kinds"].rows(database)}
    if not kinds:
        missing.append("kinds")
    chosen = dict.fromkeys(_kind_key(row) for name in ("precisions", "forms") for row in TABLES[name].rows(database))
    lacking = [each for each in chosen if each not in kinds]
    return missing + [f"the times of {kind} in {precision} on {processor}" for kind, processor, precision in lacking]


def check(database: Database, path: Path) -> None:
    """Raises ProfileDamaged, naming ``path``, unless every row of every table may be read."""
    with understood(path):
        for table in TABLES.values():
            table.rows(database)


def profile_in(database: Database, path: Path) -> StoredProfile:
    """The whole profile. Raises ConfigError, naming ``path``, for one that is not whole."""
    with understood(path):
        head = _head(database)
        if head is None or head["finished_at"] is None:
            raise ConfigError(f"{path} is a half-written profile - {AGAIN}")
        missing = missing_parts(database)
        if missing:
            raise ConfigError(f"{path} lacks {', '.join(missing)} - {AGAIN}")
        profile = _whole(database, head)
        unknown = _unknown_loads(profile)
        if unknown:
            raise ConfigError(f"{path} lacks {', '.join(unknown)} - {AGAIN}")
        return profile


def _whole(database: Database, head: Mapping[str, Any]) -> StoredProfile:
    return StoredProfile(
        line=head["line"],
        written_at=head["finished_at"],
        box=_box(head),
        links=TABLES["links"].records(database, LinkSpeed),
        kinds=kinds_in(database),
        agreements=TABLES["agreements"].records(database, Agreement),
        precisions=TABLES["precisions"].mapping(database),
        packed=TABLES["packed"].mapping(database),
        usage=_usage(database),
        allocation=_allocation(database),
        speedups=TABLES["speedups"].mapping(database),
        trials=TABLES["trials"].records(database, SearchTrial),
        decodings=TABLES["decodings"].records(database, ImageDecoding),
        forms={(each.expert, each.processor): each for each in TABLES["forms"].records(database, ExpertForm)},
    )


def _unknown_loads(profile: StoredProfile) -> list[str]:
    """Kinds with neither a load time nor the link's speed."""
    links = {link.link for link in profile.links}
    is_split = profile.box.device_bytes is not None
    return [
        f"the time to load {kind.kind} from {source} to {kind.processor}"
        for kind in profile.kinds
        for source in ((SSD, HOST) if is_split and kind.processor != CPU else (SSD,))
        if source not in links and source not in kind.load_s
    ]


def _head(database: Database) -> dict[str, Any] | None:
    return next(iter(TABLES["profile"].rows(database)), None)


def _box(head: Mapping[str, Any]) -> BoxIdentity:
    return BoxIdentity(**{field.name: head[field.name] for field in fields(BoxIdentity)})


def _kind_key(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["kind"], row["processor"], row["precision"]


def _usage(database: Database) -> UsageProfile:
    rows, origin = TABLES["usage"].rows(database), _only(database, "usage_origin")
    return UsageProfile(
        probabilities={row["expert"]: row["probability"] for row in rows if row["probability"] is not None},
        pass_rates={row["expert"]: row["pass_rate"] for row in rows if row["pass_rate"] is not None},
        origin=UsageOrigin(origin["origin"]),
        requests=origin["requests"],
    )


def _allocation(database: Database) -> Allocation:
    return Allocation(
        **_only(database, "allocation_origin"),
        budget_bytes=TABLES["allocation_budgets"].mapping(database),
        pools=TABLES["allocation_pools"].records(database, PoolAllocation),
        executors=TABLES["allocation_executors"].mapping(database),
    )


def _only(database: Database, table: str) -> dict[str, Any]:
    found = TABLES[table].rows(database)
    if len(found) != 1:
        raise ValueError(f"{table} has {len(found)} rows, not one")
    return found[0]
