"""Killed at random moments, over and over: nothing accepted is lost, judged twice, or OK without evidence."""

import random
import time

from experts.expert import Verdict
from tests.drill.scene import COLOURS, EXPERTS, Sender, is_full
from tests.waiting import until

KILLS = 100 if is_full() else 4
LONGEST_LIFE_S = 1.5  # an agent is ready after about half a second


def verdicts_of_all(scene):
    """What each expert says of each colour, asked while nothing disturbs it."""
    keys = [(f"base-{c}-{n}", f"c{c}", n) for c in range(EXPERTS) for n in range(len(COLOURS))]
    scene.order(keys, timeout_s=30.0)
    said = {key: verdict.removeprefix("VERDICT_") for key, verdict in scene.answered.items()}
    assert len(said) == len(keys)
    return {(component, colour): Verdict(said[key]) for key, component, colour in keys}


def test_kill_at_random_moments(scene, agents, told):
    chance = random.Random(7)
    agents.start()
    until(scene.is_up)
    expected = verdicts_of_all(scene)
    with Sender(scene, seed=11):
        for _ in range(KILLS):
            time.sleep(chance.uniform(0.0, LONGEST_LIFE_S))  # the moment is the experiment
            agents.running.kill()
            agents.start()
    until(scene.is_up)
    until(scene.is_finished)
    assert agents.stop() == 0
    told(f"{KILLS} kills", scene.account(expected))
