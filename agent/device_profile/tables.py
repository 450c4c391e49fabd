"""Tables of a device profile's file, and its records as rows. The caller has the transaction.

Guarantees: what is read equals what was written, to the last bit. An invalid value is refused by table, column and row:
ValueError when written, ValueError or sqlite3.Error when read, ProfileDamaged where a path is given.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from agent.core.performance import HOST, SSD
from agent.device_profile.records import (
    SOURCE,
    Agreement,
    Allocation,
    BatchTimes,
    BoxIdentity,
    Count,
    ExpertForm,
    Form,
    ImageDecoding,
    KindProfile,
    LinkSpeed,
    MaybeShare,
    MaybeText,
    NumberByName,
    PoolAllocation,
    Positives,
    SearchTrial,
    StoredProfile,
    Text,
    UsageOrigin,
    UsageProfile,
    one_of,
)
from agent.device_profile.schema import AGAIN, understood
from experts.errors import ConfigError
from experts.expert import Precision

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from sqlite_utils import Database

CPU = "cpu"
MOST_SHOWN = 60  # characters of a value that is refused
REQUIRED = ("links", "precisions", "packed", "usage", "allocation")  # parts: each is saved once for every profile

Record = TypeVar("Record")


class Table:
    """One table. ``columns``: name -> type; ``key``: primary key, none for a single row."""

    def __init__(self, name: str, columns: Mapping[str, Any], *key: str) -> None:
        self.name = name
        self._columns = columns
        self._key = key

    def rows(self, database: Database) -> list[dict[str, Any]]:
        found = database.execute(f"SELECT {', '.join(self._columns)} FROM {self.name} ORDER BY rowid")
        return [self._checked(self._decoded(dict(zip(self._columns, row, strict=True)))) for row in found]

    def records(self, database: Database, record: type[Record]) -> tuple[Record, ...]:
        return tuple(record(**row) for row in self.rows(database))

    def mapping(self, database: Database) -> dict[Any, Any]:
        """Key (a tuple if it has several columns) -> the one other column."""
        (column,) = self._columns.keys() - set(self._key)
        key_of = itemgetter(*self._key)
        return {key_of(row): row[column] for row in self.rows(database)}

    def replace_mapping(self, database: Database, values: Mapping[Any, Any]) -> None:
        """Replace all rows by those of a ``mapping``."""
        names = sorted(self._columns, key=lambda name: name not in self._key)  # the key's columns first
        keys = ((*key, value) if len(self._key) > 1 else (key, value) for key, value in values.items())
        self.replace(database, [dict(zip(names, row, strict=True)) for row in keys])

    def put(self, database: Database, *rows: object) -> None:
        """Insert rows, or records with these fields; a row with an equal key is replaced."""
        database.table(self.name).insert_all([self._encoded(row) for row in rows], replace=True)

    def replace(self, database: Database, rows: Iterable[object]) -> None:
        self.delete(database)
        self.put(database, *rows)

    def delete(self, database: Database, **values: str) -> None:
        where = " AND ".join(f"{column} = :{column}" for column in values)
        database.table(self.name).delete_where(where or None, values)

    @cached_property
    def _types(self) -> dict[str, TypeAdapter[Any]]:
        return {name: TypeAdapter(column) for name, column in self._columns.items()}

    @cached_property
    def _schemas(self) -> dict[str, dict[str, Any]]:
        return {name: column.json_schema() for name, column in self._types.items()}

    def _encoded(self, row: object) -> dict[str, Any]:
        """The row as plain JSON values; numpy's numbers become Python's."""
        values = row if isinstance(row, Mapping) else {name: getattr(row, name) for name in self._columns}
        plain: dict[str, Any] = json.loads(json.dumps(values, default=_plain))
        self._checked(plain)
        return plain

    def _decoded(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row with JSON columns decoded; invalid JSON stays text, which the column's type refuses."""
        found = dict(row)
        for name, value in row.items():
            if self._schemas[name].get("type") in {"array", "object"}:
                with suppress(ValueError, TypeError, RecursionError):
                    found[name] = json.loads(value)
        return found

    def _checked(self, row: Mapping[str, Any]) -> dict[str, Any]:
        found = {}
        for name, value in row.items():
            try:
                found[name] = self._types[name].validate_python(value)
            except ValidationError as error:
                key = ", ".join(str(row[part]) for part in self._key)
                place = f"{self.name}.{name}" + (f" of {key}" if key else "")
                text = repr(value)
                shown = text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."
                raise ValueError(f"{place}: {shown} is not {self._schemas[name]['description']}") from error
        return found


def _plain(value: Any) -> object:  # noqa: ANN401  # any type that JSON lacks
    return dict(value) if isinstance(value, Mapping) else value.tolist()


def _fields(record: type) -> dict[str, Any]:
    """A record's fields that are columns; any other field has a table of its own."""
    fields = get_type_hints(record, include_extras=True)
    return {name: column for name, column in fields.items() if get_origin(column) is Annotated}


FormOrSource = Annotated[str, one_of(*Precision, SOURCE)]
Origin = Annotated[str, one_of(*UsageOrigin)]
KIND_KEY = {"kind": Text, "processor": Text, "precision": Form}
_TABLES = (
    Table("profile", {"line": Text, **_fields(BoxIdentity), "graphs": NumberByName, "finished_at": MaybeText}),
    Table("parts", {"part": Text}, "part"),
    Table("links", _fields(LinkSpeed), "link"),
    Table("kinds", _fields(KindProfile), *KIND_KEY),
    Table("batches", KIND_KEY | _fields(BatchTimes), *KIND_KEY, "batch_size"),
    Table("agreements", _fields(Agreement), "expert", "processor", "precision"),
    Table("forms", _fields(ExpertForm), "expert", "processor"),
    Table("precisions", KIND_KEY, "kind", "processor"),
    Table("speedups", {"processor": Text, "factors": Positives}, "processor"),
    Table("packed", {"expert": Text, "precision": FormOrSource, "sha256": Text}, "expert", "precision"),
    Table("usage_origin", {"origin": Origin, "requests": Count}),
    Table("usage", {"expert": Text, "probability": MaybeShare, "pass_rate": MaybeShare}, "expert"),
    Table("allocation_origin", {"origin": Text}),
    Table("allocation_budgets", {"pool": Text, "budget_bytes": Count}, "pool"),
    Table("allocation_pools", _fields(PoolAllocation), "pool"),
    Table("allocation_executors", {"processor": Text, "executors": Count}, "processor"),
    Table("decodings", _fields(ImageDecoding), "expert"),
    Table("trials", _fields(SearchTrial), "search", "number"),
)
TABLES = {table.name: table for table in _TABLES}


def put_head(database: Database, line: str, box: BoxIdentity, graphs: Mapping[str, float]) -> None:
    TABLES["profile"].replace(database, [{"line": line, **asdict(box), "graphs": graphs, "finished_at": None}])


def graphs_in(database: Database) -> dict[str, float]:
    return dict(_only(database, "profile")["graphs"])


def put_kind(database: Database, kind: KindProfile) -> None:
    key = {"kind": kind.kind, "processor": kind.processor, "precision": kind.precision}
    TABLES["kinds"].put(database, kind)
    TABLES["batches"].delete(database, **key)
    TABLES["batches"].put(database, *(key | asdict(batch) for batch in kind.batches))


def put_usage(database: Database, usage: UsageProfile) -> None:
    experts = dict.fromkeys([*usage.probabilities, *usage.pass_rates])
    shares, rates = usage.probabilities, usage.pass_rates
    rows = [{"expert": each, "probability": shares.get(each), "pass_rate": rates.get(each)} for each in experts]
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
    """Read every row of every table. Raises ProfileDamaged, naming ``path``, for an invalid one."""
    with understood(path):
        for table in TABLES.values():
            table.rows(database)


def profile_in(database: Database, path: Path) -> StoredProfile:
    """The whole profile. Raises ConfigError, naming ``path``, if anything is missing."""
    with understood(path):
        head = _head(database)
        if head is None or head["finished_at"] is None:
            raise ConfigError(f"{path} is a half-written profile - {AGAIN}")
        if missing := missing_parts(database):
            raise ConfigError(f"{path} lacks {', '.join(missing)} - {AGAIN}")
        profile = StoredProfile(
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
            graphs=head["graphs"],
        )
        if unknown := _unknown_loads(profile):
            raise ConfigError(f"{path} lacks {', '.join(unknown)} - {AGAIN}")
        return profile


def _unknown_loads(profile: StoredProfile) -> list[str]:
    """Loads for which the profile has neither a time nor the link's speed."""
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
