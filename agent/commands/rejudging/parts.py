"""Answers as Parquet: a part file for each group, in a folder beside the file that they become in the end.

Guarantees: a part, and the file, appears whole or not at all. The name of a part says what it was made with; parts of
another line file, other weights or another selection are refused, never mixed. Needs pyarrow.
"""

from __future__ import annotations

import fcntl
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from experts.errors import ConfigError
from experts.filesystem import make_folder, open_folder, whole_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from agent.commands.rejudging.agreement import Row

TEXT, NUMBER = pa.string(), pa.float64()
SCHEMA = pa.schema({
    "key": TEXT, "path": TEXT, "box": pa.list_(pa.int32()), "component": TEXT, "board": TEXT, "ref": TEXT,
    "verdict": TEXT, "label": TEXT, "score": NUMBER, "reason": TEXT, "experts": pa.list_(TEXT),
    "scores": pa.list_(NUMBER), "stored_verdict": TEXT, "stored_label": TEXT, "stored_score": NUMBER,
    "stored_at": pa.timestamp("us", tz="UTC"), "agrees": pa.bool_(),
})  # fmt: skip


@contextmanager
def parts_of(file: Path) -> Iterator[Path]:
    """Folder of a file's parts, for one run at a time. Raises ConfigError beside another, and if the disk refuses."""
    folder = file.with_name(f"{file.name}.parts")
    try:
        make_folder(folder)
        with open_folder(folder) as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                yield folder
            finally:
                with suppress(OSError):  # it has parts
                    folder.rmdir()
    except BlockingIOError as error:
        raise ConfigError(f"{file}: another run writes it - wait for that, or name another file") from error
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"{file}: {reason} - what is judged is kept: run the command again") from error


def known_keys(folder: Path, made_with: Mapping[str, str]) -> set[str]:
    """Keys of the images that the parts hold. Raises ConfigError for a part that was made with something else."""
    keys: set[str] = set()
    for part in sorted(folder.glob("*.parquet")):
        if other := [name for name, digest in made_with.items() if digest not in part.name.split("-")]:
            raise ConfigError(
                f"{folder} was begun with another {' and other '.join(other)}: its answers would be mixed - "
                "remove that folder, or name another --out"
            )
        try:
            keys.update(pq.read_table(part, columns=["key"])["key"].to_pylist())
        except pa.ArrowInvalid as error:
            raise ConfigError(f"{part} is damaged ({error}) - remove it") from error
    return keys


def write_part(folder: Path, made_with: Mapping[str, str], rows: list[Row]) -> None:
    with whole_file(folder / "-".join((*made_with.values(), f"{time.time_ns()}.parquet"))) as out:
        pq.write_table(pa.Table.from_pylist(rows, SCHEMA), out)


def merged_rows(folder: Path, file: Path) -> Iterator[Row]:
    """Rows of all parts, which become the file meanwhile."""
    parts = sorted(folder.glob("*.parquet"))
    with whole_file(file) as out, pq.ParquetWriter(out, SCHEMA) as writer:
        for part in parts:
            table = pq.read_table(part)
            writer.write_table(table)
            yield from table.to_pylist()
    for part in parts:
        part.unlink()
