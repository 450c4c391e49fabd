"""Which setting of OpenMP's waiting is chosen: on made-up timings, so that no machine has a say; and one real trial."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.device_profile.openmp import SPINNING, VARIABLES
from experts.errors import CoServeError
from profiler.microbench.spinning import LEAST_GAIN, MOST_LOSS, ROUNDS, SpinTrial, chosen_setting, measure_spinning

SETTINGS = tuple(SPINNING)


class ScriptedBox:
    """Answers with a table's seconds, times what its turn has of noise, and remembers the settings asked for."""

    def __init__(self, times, noise=()):
        self.times = times
        self.noise = itertools.chain(noise, itertools.repeat(1.0))
        self.asked = []

    def run(self, setting):
        self.asked.append(setting)
        factor = next(self.noise)
        one_s, largest_s = self.times[setting]
        return SpinTrial(one_s * factor, largest_s * factor)

    @property
    def chosen(self):
        (chosen,) = (times.setting for times in measure_spinning(self.run) if times.is_chosen)
        return chosen


def test_the_default_stays_where_nothing_is_gained_and_each_setting_is_tried_once():
    box = ScriptedBox({"default": (0.010, 0.080), "short": (0.0099, 0.0790), "none": (0.012, 0.081)})
    assert box.chosen == "default"
    assert box.asked == ["default", "short", "none"]


def test_a_clear_winner_is_tried_in_every_round_in_turn_with_the_default():
    box = ScriptedBox({"default": (0.010, 0.080), "short": (0.008, 0.070), "none": (0.012, 0.081)})
    assert box.chosen == "short"
    assert box.asked == ["default", "short", "none", *["short", "default", "default", "short"], "short", "default"]


def test_where_it_may_not_go_on_the_default_stays_whatever_the_first_round_showed():
    box = ScriptedBox({"default": (0.010, 0.080), "short": (0.001, 0.008), "none": (0.012, 0.081)})
    found = measure_spinning(box.run, may_go_on=lambda: False)
    assert [times.setting for times in found if times.is_chosen] == ["default"]
    assert box.asked == ["default", "short", "none"]


def test_the_faster_of_two_winners_is_chosen():
    assert ScriptedBox({"default": (0.010, 0.080), "short": (0.008, 0.070), "none": (0.007, 0.066)}).chosen == "none"


@pytest.mark.parametrize(
    ("one", "largest", "is_chosen"),
    [
        (1 - LEAST_GAIN - 0.001, 1 - LEAST_GAIN - 0.001, True),
        (1 - LEAST_GAIN + 0.001, 1 - LEAST_GAIN + 0.001, False),
        (0.5, 1 + MOST_LOSS - 0.001, True),
        (0.5, 1 + MOST_LOSS + 0.001, False),
        (1 + MOST_LOSS + 0.001, 0.5, False),
    ],
)
def test_what_a_clear_win_is(one, largest, is_chosen):
    trials = {"default": [SpinTrial(1.0, 1.0)] * ROUNDS, "short": [SpinTrial(one, largest)] * ROUNDS}
    assert chosen_setting(trials) == ("short" if is_chosen else "default")


def test_one_round_in_which_it_was_slower_is_enough_to_stay():
    """A burst of the box's made the default's first turns slow; the last tells."""
    default = [*[SpinTrial(2.0, 2.0)] * 3, SpinTrial(1.0, 1.0)]
    short = [SpinTrial(1.01, 1.01)] * 4
    assert chosen_setting({"default": default, "short": short}) == "default"


def test_a_gain_that_turns_do_not_agree_on_is_not_enough():
    """By hand: 2, 2, 16 and 16 % are 9 % in the mean, with a standard error of 4 %; 8, 9, 9 and 10 % one of 0.4 %."""
    default = [SpinTrial(1.0, 1.0)] * 4
    for parts, chosen in (([0.98, 0.98, 0.84, 0.84], "default"), ([0.92, 0.91, 0.91, 0.90], "short")):
        assert chosen_setting({"default": default, "short": [SpinTrial(part, part) for part in parts]}) == chosen


def test_what_was_not_tried_in_all_rounds_is_not_chosen():
    trials = {"default": [SpinTrial(1.0, 1.0)] * ROUNDS, "short": [SpinTrial(0.1, 0.1)] * (ROUNDS - 1)}
    assert chosen_setting(trials) == "default"


def test_noise_alone_rarely_changes_anything():
    """Of 2000 boxes on which all settings are equal, with 5 % of noise: what is chosen then costs nothing."""
    draw = random.Random(7)
    equal = dict.fromkeys(SETTINGS, (0.01, 0.08))
    changed = sum(
        ScriptedBox(equal, (draw.gauss(1.0, 0.05) for _ in itertools.count())).chosen != "default" for _ in range(2000)
    )
    assert changed <= 100


@settings(deadline=None)
@given(st.lists(st.floats(0.5, 2.0), min_size=9, max_size=9), st.floats(1e-4, 10.0))
def test_what_a_turn_does_to_all_settings_alike_changes_no_choice(turns, second):
    """Each round is as slow as it likes, for all alike."""
    trials = {
        "default": [SpinTrial(turn * second, 3 * turn * second) for turn in turns],
        "short": [SpinTrial(0.9 * turn * second, 2.7 * turn * second) for turn in turns],
        "none": [SpinTrial(1.1 * turn * second, 3.3 * turn * second) for turn in turns],
    }
    assert chosen_setting(trials) == "short"


def test_settings_are_told_apart_by_variables_that_whoever_starts_an_agent_may_set():
    spins = [int(setting["GOMP_SPINCOUNT"]) for setting in SPINNING.values()]
    assert sorted(set(spins), reverse=True) == spins, "none waits longer than the default"
    assert {name for setting in SPINNING.values() for name in setting} <= VARIABLES


def test_a_trial_that_fails_tells_what_it_said_last(tmp_path):
    from profiler.microbench.spinning import try_setting

    class Named:
        """As much of a copy and of a kind as a command line needs."""

        id, precision, max_batch, threads = "cls/none", "fp32", 1, 2

        @property
        def expert(self):
            return self

        packed = expert

    with pytest.raises(CoServeError, match=r"a trial of cls/none failed: .*ConfigError.*no\.yaml"):
        try_setting(tmp_path / "no.yaml", Named(), Named(), "short")
