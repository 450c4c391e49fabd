"""Benchmarks: medians, rows and targets as text and as JSON; contestants by turns, under a made-up clock."""

import json
from dataclasses import dataclass, replace

import pytest

from profiler.bench import measured
from profiler.bench.measured import ROUNDS_LEAST, Column, Measured, Plan, at_least, by_turns
from profiler.bench.rows import Measurement, PolicyRow, medians, report
from tests.profiler.bench.one_run import FIGURES


@dataclass(frozen=True)
class Row:
    name: str
    seconds: float | None


COLUMNS = (Column("way", "name"), Column("ms", "seconds", ".1f", 1e3))
MEASURED = Measured("a box", COLUMNS, (Row("fast", 0.002), Row("not run", None)), (at_least("gain", 3.0, 2.0),), ("n",))


def test_text_report_has_rows_targets_and_notes():
    machine, *table, target, note = MEASURED.text().splitlines()
    assert machine == "machine  a box"
    assert table == ["way       ms", "fast     2.0", "not run    -"]
    assert target.split() == ["gain", "at", "least", "2", "3", "reached"]
    assert note == "note     n"


def test_json_report_has_the_same_rows():
    found = json.loads(json.dumps(MEASURED.as_json()))
    assert found["rows"] == [{"name": "fast", "seconds": 0.002}, {"name": "not run", "seconds": None}]
    assert found["targets"][0]["reached"] is True
    assert found["notes"] == ["n"]


class Machine:
    """A clock that stands still until a way runs or a pause is taken."""

    def __init__(self):
        self.at_s = 0.0
        self.ran = []

    def spend(self, seconds):
        self.at_s += seconds

    def way(self, name, *seconds):
        left = list(seconds)

        def run():
            self.ran.append(name)
            self.spend(left.pop(0) if len(left) > 1 else left[0])
            return f"{name}{len(self.ran)}"

        return run


@pytest.fixture
def machine(monkeypatch):
    machine = Machine()
    monkeypatch.setattr(measured, "perf_counter", lambda: machine.at_s)
    monkeypatch.setattr(measured, "sleep", machine.spend)
    monkeypatch.setattr(measured, "PAUSE_S", 0.25)
    return machine


def test_each_round_runs_each_contestant_once_beginning_with_the_next(machine):
    told = []
    plan = Plan(3, warming_up=2, progress=lambda *done: told.append(done))
    found = by_turns({name: machine.way(name, 1.0) for name in "abc"}, plan)
    rounds = ["".join(machine.ran[at : at + 3]) for at in range(0, len(machine.ran), 3)]
    assert rounds[2:] == ["abc", "bca", "cab"]
    assert machine.at_s == pytest.approx(15 * 1.25)
    assert found["a"].results == ("a7", "a12", "a14")
    assert told == [(number, 5) for number in range(1, 6)]


def test_warm_up_rounds_do_not_count(machine):
    times = by_turns({"a": machine.way("a", 9.0, 2.0, 1.0, 4.0)}, Plan(3, warming_up=1))
    assert times["a"].seconds == pytest.approx((2.0, 1.0, 4.0))
    assert times["a"].median_s == pytest.approx(2.0)
    assert times["a"].scaled(0.5).seconds == pytest.approx((1.0, 0.5, 2.0))


@pytest.mark.parametrize(("limit_s", "rounds"), [(0.0, ROUNDS_LEAST), (6.5 * 2, 5), (1000.0, 9)])
def test_rounds_stop_at_the_limit_once_a_median_is_possible(machine, limit_s, rounds):
    times = by_turns({name: machine.way(name, 0.75) for name in "ab"}, Plan(9, limit_s=limit_s))
    assert {len(each.seconds) for each in times.values()} == {rounds}


def row(*runs, policy="coserve", reasons=()):
    return PolicyRow(policy, 60, "fp32", {"host": 10**9}, {"cpu": 1}, medians(runs), runs, reasons)


REACHED = (
    "a box, 2 cores", "line-1", "2000 MB/s", "past the page cache", "6.00", "0.960", "abababab",
    "coserve: roofline fraction at least 0.95: reached",
    "coserve: predicted +5.0% (batches took 1.02 of their profile), within 10%: reached",
)  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "changes", "told", "untold"),
    [
        (row(FIGURES), {}, REACHED, ("SHORT", "SHARED", "UNKNOWN", "OUTPUTS")),
        (
            row(replace(FIGURES, roofline_fraction=0.94, prediction_error=-0.11)), {},
            ("at least 0.95: SHORT of its target", "predicted -11.0% (batches took 1.02", "10%: SHORT of its"), (),
        ),
        (row(replace(FIGURES, roofline_fraction=0.2), policy="samba"), {}, (), ("roofline fraction at least",)),
        (
            row(replace(FIGURES, unknown=2), reasons=("it broke", "it broke again")), {},
            ("UNKNOWN    coserve: 2 of 60 were not judged: it broke; it broke again",), (),
        ),
        (row(replace(FIGURES, others_fraction=0.4)), {}, ("coserve: other processes had 40% of the cores",), ()),
        (
            row(FIGURES, replace(FIGURES, outputs_sha256="cd" * 32)), {},
            ("OUTPUTS    coserve: its runs did not judge every request alike",), (),
        ),
        (
            row(FIGURES), {"direct_io": False, "is_held": True, "notes": ("2 loads in it",)},
            ("THROUGH the page cache", "2000 MB/s, held", "note       2 loads in it"), (),
        ),
    ],
)  # fmt: skip
def test_report_shows_targets_and_caveats(rows, changes, told, untold):
    text = report(replace(Measurement("line-1", "a box, 2 cores", (rows,), True, 2e9, False, 9.6, ()), **changes))
    for part in told:
        assert part in text
    for part in untold:
        assert part not in text
