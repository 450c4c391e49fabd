"""The measurement of dispatch: it times both ways of one layer, and says so when a target is missed."""

from dataclasses import replace

import pytest

from proof.parts.dispatch import DispatchTimes, measure_dispatch, report

TIMES = DispatchTimes(1024, 128, 256, 1, 15, 0.002, 0.010, 0.0005, 0.005, largest_difference=1e-6)


@pytest.mark.parametrize("per_token", [1, 2])
def test_it_measures_both_ways_of_the_same_layer(per_token):
    times = measure_dispatch(64, 4, 16, per_token=per_token, repeats=2)
    assert min(times.table_layer_s, times.einsum_layer_s, times.table_routing_s, times.einsum_routing_s) > 0
    assert times.largest_difference < 1e-4


def test_the_report_names_times_and_targets():
    text = report(TIMES)
    for part in ("1024 tokens, 128 experts, 256 wide", "einsum 10.00 ms, table 2.00 ms", "5, at least 4 - reached"):
        assert part in text
    assert [target.reached for target in TIMES.targets] == [True, True]


def test_a_target_that_is_missed_is_told():
    missed = replace(TIMES, table_layer_s=0.005)
    assert "2, at least 4 - SHORT of its target" in report(missed)
