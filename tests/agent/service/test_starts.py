"""The pauses between starts that end soon."""

from __future__ import annotations

import pytest

from agent.service.service_manager import BACKOFF, FREE_STARTS, HEALTHY_S, Starts


@pytest.fixture
def boot(tmp_path):
    file = tmp_path / "boot_id"
    file.write_text("a boot\n")
    return file


def pauses(state, boot, count):
    return [Starts(state, boot).begin() for _ in range(count)]


def test_the_first_starts_wait_for_nothing_and_then_each_waits_twice_as_long_up_to_a_bound(tmp_path, boot):
    found = pauses(tmp_path, boot, FREE_STARTS + 60)
    assert found[: FREE_STARTS + 4] == [0.0] * FREE_STARTS + [BACKOFF.first_s * factor for factor in (1, 2, 4, 8)]
    assert max(found) == found[-1] == BACKOFF.longest_s
    boot.write_text("another boot")
    assert Starts(tmp_path, boot).begin() == 0.0


def test_serving_for_long_enough_begins_the_count_anew_and_serving_for_less_does_not(tmp_path, boot):
    pauses(tmp_path, boot, FREE_STARTS)
    starts = Starts(tmp_path, boot)
    assert starts.begin() == BACKOFF.first_s
    for now_s in (1000.0, 1000.0 + HEALTHY_S - 1):
        starts.served(now_s)
    assert Starts(tmp_path, boot).begin() == BACKOFF.first_s * 2
    starts.served(1000.0 + HEALTHY_S)
    assert Starts(tmp_path, boot).begin() == 0.0


@pytest.mark.parametrize("content", ["", "[]", '{"boot": "a boot", "starts": 1e999}', '{"boot": "a boot"}'])
def test_a_count_that_cannot_be_read_or_written_costs_the_pause_and_not_the_start(tmp_path, boot, content):
    (tmp_path / "starts.json").write_text(content)
    assert Starts(tmp_path, boot).begin() == 0.0
    assert pauses(tmp_path / "none", boot, FREE_STARTS + 2) == [0.0] * (FREE_STARTS + 2)
