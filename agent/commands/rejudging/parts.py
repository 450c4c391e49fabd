"""Answers as Parquet: a part file for each group, in a folder beside the file that they become in the end.

Guarantees: a part, and the file, appears whole or not at all. Each part says what it was made with; parts of another
line file, other weights or another selection are refused, never mixed.

    FILE.parts/00001.parquet, ...    while images are judged; then FILE, and the folder is removed
"""

from __future__ import annotations

import fcntl
import json
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from experts.errors import ConfigError
from experts.filesystem import make_folder, open_folder, whole_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import pyarrow

MADE_WITH = b"coserve"  # key of a part's metadata
ROWS_AT_ONCE = 4096
MISSING = "Parquet files need pyarrow - pip install 'coserve[cluster]'"


def require_parquet() -> None:
    """Raises ConfigError where pyarrow is not installed."""
    if find_spec("pyarrow") is None:
        raise ConfigError(MISSING)


def schema() -> pyarrow.Schema:
    import pyarrow as pa

    text, number, time = pa.string(), pa.float64(), pa.timestamp("us", tz="UTC")
    place = [("key", text), ("path", text), ("box", pa.list_(pa.int32()))]
    place += [(name, text) for name in ("component", "board", "ref")]
    given = [("verdict", text), ("label", text), ("score", number), ("reason", text)]
    given += [("experts", pa.list_(text)), ("scores", pa.list_(number))]
    stored = [("stored_verdict", text), ("stored_label", text), ("stored_score", number), ("stored_at", time)]
    return pa.schema([*place, *given, *stored, ("agrees", pa.bool_())])


def refuse_file(file: Path) -> None:
    """Raises ConfigError for a file that exists, or whose folder is missing."""
    if file.exists():
        raise ConfigError(f"{file} exists - name another file, or move it away")
    if not file.parent.is_dir():
        raise ConfigError(f"{file.parent} is no folder - make it, or name another file")


@contextmanager
def answer_parts(file: Path, made_with: Mapping[str, str]) -> Iterator[AnswerParts]:
    """Parts of ``file``, for one run at a time. ``made_with``: by name, what each part must have been made with.

    Raises ConfigError for parts that were made with something else, beside another run, and if the disk refuses.
    """
    parts = AnswerParts(file, made_with)
    try:
        make_folder(parts.folder)
        with open_folder(parts.folder) as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            parts.refuse_others()
            yield parts
    except BlockingIOError as error:
        raise ConfigError(f"{file}: another run writes it - wait for that, or name another file") from error
    except OSError as error:
        raise ConfigError(
            f"{file}: {error.strerror or error} - what is judged is kept: run the command again"
        ) from error
    finally:
        with suppress(OSError):  # it has parts
            parts.folder.rmdir()


class AnswerParts:
    """Part files of one Parquet file; see ``answer_parts``."""

    def __init__(self, file: Path, made_with: Mapping[str, str]) -> None:
        self.file = file
        self.folder = file.with_name(f"{file.name}.parts")
        self._made_with = dict(made_with)

    def keys(self) -> set[str]:
        """Keys of the images that the parts hold."""
        import pyarrow.parquet as pq

        return {key for part in self._parts() for key in pq.read_table(part, columns=["key"])["key"].to_pylist()}

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write one further part. Raises OSError."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        of_part = schema().with_metadata({MADE_WITH: json.dumps(self._made_with)})
        with whole_file(self.folder / f"{len(self._parts()) + 1:05}.parquet") as out:
            pq.write_table(pa.Table.from_pylist(list(rows), of_part), out)

    def merge(self) -> None:
        """Write the file, and remove the parts. Raises OSError; then the parts stay."""
        import pyarrow.parquet as pq

        with whole_file(self.file) as out, pq.ParquetWriter(out, schema()) as writer:
            for part in self._parts():
                writer.write_table(pq.read_table(part).replace_schema_metadata())
        for part in self._parts():
            part.unlink()

    def refuse_others(self) -> None:
        """Raises ConfigError for a part that was made with something else."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        for part in self._parts():
            try:
                found = json.loads((pq.read_schema(part).metadata or {})[MADE_WITH])
            except (pa.ArrowException, KeyError, ValueError) as error:
                raise ConfigError(f"{part}: not a part of {self.file.name} ({error}) - remove it") from error
            if other := [name for name, value in self._made_with.items() if found.get(name) != value]:
                raise ConfigError(
                    f"{self.folder} was begun with another {' and other '.join(other)}: its answers would be mixed - "
                    "remove that folder, or name another --out"
                )

    def _parts(self) -> list[Path]:
        return sorted(self.folder.glob("*.parquet"))


def rows_of(file: Path) -> Iterator[dict[str, Any]]:
    """Rows of a Parquet file, read in portions."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(file) as opened:
        for batch in opened.iter_batches(ROWS_AT_ONCE):
            yield from batch.to_pylist()
