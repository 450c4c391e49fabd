"""Medians by hand, and what the report says of targets, of what was not judged, and of runs that disagree."""

from __future__ import annotations

from dataclasses import replace

import pytest

from profiler.bench.rows import Measurement, Percentiles, PolicyRow, medians, report
from tests.profiler.bench.one_run import FIGURES


def row(*runs, policy="coserve", reasons=()):
    return PolicyRow(
        policy, 60, "fp32", {"host": 10**9, "host_workspace": 10**8}, {"cpu": 1}, medians(runs), runs, reasons
    )


def told(*rows, **changes):
    measurement = Measurement("line-1", "a box, 2 cores", rows, True, 2e9, False, 9.6, ())
    return report(replace(measurement, **changes))


def test_medians_are_taken_field_by_field():
    others = [
        replace(FIGURES, seconds=12.0, switches=4, loads=dict(FIGURES.loads, ssd_host=11)),
        replace(FIGURES, seconds=30.0, switches=9, decision_us=Percentiles(60.0, 900.0)),
    ]
    middle = medians([others[1], FIGURES, others[0]])
    assert (middle.seconds, middle.switches, middle.loads["ssd_host"]) == (12.0, 4, 8)
    assert middle.decision_us == Percentiles(50.0, 200.0)


def test_of_two_a_time_is_their_mean_and_a_count_is_one_that_was_counted():
    middle = medians([FIGURES, replace(FIGURES, seconds=11.0, switches=8)])
    assert (middle.seconds, middle.switches) == (10.5, 3)


def test_what_does_not_apply_stays_so():
    middle = medians([replace(FIGURES, roofline_fraction=None, decision_us=None)] * 2)
    assert (middle.roofline_fraction, middle.decision_us) == (None, None)


def test_targets_that_are_reached_are_said():
    text = told(row(FIGURES))
    for part in ("a box, 2 cores", "line-1", "2000 MB/s", "past the page cache", "6.00", "0.960", "abababab"):
        assert part in text
    assert "coserve: roofline fraction at least 0.95: reached" in text
    assert "coserve: predicted +5.0% (batches took 1.02 of their profile), within 10%: reached" in text
    assert "SHORT" not in text


def test_targets_that_are_missed_are_said():
    text = told(row(replace(FIGURES, roofline_fraction=0.94, prediction_error=-0.11)))
    assert "coserve: roofline fraction at least 0.95: SHORT of its target" in text
    assert "coserve: predicted -11.0% (batches took 1.02 of their profile), within 10%: SHORT of its target" in text


@pytest.mark.parametrize("policy", ["samba", "naive"])
def test_the_floor_is_a_target_of_coserve_alone(policy):
    assert "roofline fraction at least" not in told(row(replace(FIGURES, roofline_fraction=0.2), policy=policy))


def test_what_was_not_judged_is_said_with_its_reasons():
    text = told(row(replace(FIGURES, unknown=2), reasons=("it broke", "it broke again")))
    assert "UNKNOWN    coserve: 2 of 60 were not judged: it broke; it broke again" in text


def test_a_machine_that_others_used_meanwhile_is_said():
    assert "SHARED" not in told(row(FIGURES))
    assert "coserve: other processes had 40% of the cores" in told(row(replace(FIGURES, others_fraction=0.4)))


def test_runs_that_judge_differently_are_said():
    different = row(FIGURES, replace(FIGURES, outputs_sha256="cd" * 32))
    assert not different.outputs_agree
    assert "OUTPUTS    coserve: its runs did not judge every request alike" in told(different)


def test_cold_and_warm_and_a_rate_that_was_held_are_said():
    text = told(row(FIGURES), direct_io=False, is_held=True, notes=("2 loads in it",))
    assert "THROUGH the page cache" in text
    assert "2000 MB/s, held" in text
    assert "note       2 loads in it" in text
