"""One shape for all benchmarks: rows in columns, in their units, as text, as Markdown and as JSON."""

import json
from dataclasses import dataclass

from profiler.bench.measured import Column, Measured, at_least


@dataclass(frozen=True)
class Row:
    name: str
    seconds: float | None


COLUMNS = (Column("way", "name"), Column("ms", "seconds", ".1f", 1e3))
MEASURED = Measured("a box", COLUMNS, (Row("fast", 0.002), Row("not run", None)), (at_least("gain", 3.0, 2.0),), ("n",))


def test_text_holds_rows_targets_and_notes():
    machine, *table, target, note = MEASURED.text().splitlines()
    assert machine == "machine  a box"
    assert table == ["way       ms", "fast     2.0", "not run    -"]
    assert target.split() == ["gain", "at", "least", "2", "3", "reached"]
    assert note == "note     n"


def test_json_holds_the_same_rows():
    found = json.loads(json.dumps(MEASURED.as_json()))
    assert found["rows"] == [{"name": "fast", "seconds": 0.002}, {"name": "not run", "seconds": None}]
    assert found["targets"][0]["reached"] is True
    assert found["notes"] == ["n"]
