"""The tables of a device profile's file: what their columns hold is what the records' fields are.

Guarantees: what is read equals what was written, to the last bit; an invalid value is refused by table, column and row,
when written (ValueError) and when read (ValueError or sqlite3.Error).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from agent.device_profile.columns import Count, Form, MaybeShare, MaybeText, Positives, Text, one_of
from agent.device_profile.records import (
    SOURCE,
    Agreement,
    BatchTimes,
    BoxIdentity,
    ExpertForm,
    ImageDecoding,
    KindProfile,
    LinkSpeed,
    PoolAllocation,
    SearchTrial,
    UsageOrigin,
)
from experts.expert import Precision

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlite_utils import Database

MOST_SHOWN = 60  # characters of a value that is refused

Record = TypeVar("Record")


class Table:
    """``columns``: their types; ``key``: primary key, none for a single row."""

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
        """Key (a tuple where it has several columns) -> the one other column."""
        (column,) = self._columns.keys() - set(self._key)
        key_of = itemgetter(*self._key)
        return {key_of(row): row[column] for row in self.rows(database)}

    def replace_mapping(self, database: Database, values: Mapping[Any, Any]) -> None:
        """All rows by what ``mapping`` returns."""
        (column,) = self._columns.keys() - set(self._key)
        keys = ((key if len(self._key) > 1 else (key,), value) for key, value in values.items())
        self.replace(database, [dict(zip(self._key, key, strict=True)) | {column: value} for key, value in keys])

    def put(self, database: Database, *rows: object) -> None:
        """Insert rows, or records with these fields; an equal key is replaced."""
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
    def _told(self) -> dict[str, dict[str, Any]]:
        return {name: column.json_schema() for name, column in self._types.items()}

    def _encoded(self, row: object) -> dict[str, Any]:
        """Plain JSON values; numpy's numbers become Python's."""
        values = row if isinstance(row, Mapping) else {name: getattr(row, name) for name in self._columns}
        plain: dict[str, Any] = json.loads(json.dumps(values, default=_plain))
        self._checked(plain)
        return plain

    def _decoded(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """JSON columns decoded; an invalid one stays text, and is refused as such."""
        found = dict(row)
        for name, value in row.items():
            if self._told[name].get("type") in {"array", "object"}:
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
                raise ValueError(f"{place}: {_shown(value)} is not {self._told[name]['description']}") from error
        return found


def _plain(value: Any) -> object:  # noqa: ANN401  # what JSON has no word for
    return dict(value) if isinstance(value, Mapping) else value.tolist()


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def _fields(record: type) -> dict[str, Any]:
    """A record's fields that are columns; what is not has a table of its own."""
    fields = get_type_hints(record, include_extras=True)
    return {name: column for name, column in fields.items() if get_origin(column) is Annotated}


FormOrSource = Annotated[str, one_of(*Precision, SOURCE)]
Origin = Annotated[str, one_of(*UsageOrigin)]
KIND_KEY = {"kind": Text, "processor": Text, "precision": Form}
ALL_TABLES = (
    Table("profile", {"line": Text, **_fields(BoxIdentity), "finished_at": MaybeText}),
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
TABLES = {table.name: table for table in ALL_TABLES}
