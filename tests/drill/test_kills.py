"""Killed at random moments, over and over: nothing accepted is lost, judged twice, or OK without evidence."""

import random
import time
from contextlib import suppress

import psutil
import pytest

from experts.expert import Verdict
from tests.drill.scene import COLOURS, EXPERTS, Sender, is_full
from tests.waiting import until

KILLS = 100 if is_full() else 4
WORKER_KILLS = 10 if is_full() else 3
LONGEST_LIFE_S = 1.5  # an agent is ready after about half a second


def verdicts_of_all(scene):
    """What each expert says of each colour, asked while nothing disturbs it."""
    keys = [(f"base-{c}-{n}", f"c{c}", n) for c in range(EXPERTS) for n in range(len(COLOURS))]
    scene.order(keys, timeout_s=30.0)
    said = {key: verdict.removeprefix("VERDICT_") for key, verdict in scene.answered.items()}
    assert len(said) == len(keys)
    return {(component, colour): Verdict(said[key]) for key, component, colour in keys}


def test_agents_killed_at_random_moments_lose_and_double_nothing(scene, agents, report):
    chance = random.Random(7)
    agents.serve()
    expected = verdicts_of_all(scene)
    with Sender(scene, seed=11):
        for _ in range(KILLS):
            time.sleep(chance.uniform(0.0, LONGEST_LIFE_S))  # the moment is the experiment
            agents.running.kill()
            agents.start()
    agents.finish()
    report(f"{KILLS} kills", scene.account(expected))


@pytest.mark.slow
def test_workers_killed_at_random_moments_change_no_verdict(scene, agents, report):
    """Each verdict is as without kills: an image is not given up for the loss of a worker that ran it."""
    chance = random.Random(5)
    scene.document["cluster"] = {"workers": [{"count": 3, "device": "cpu", "memory": {"host": "16MiB"}}]}
    scene.write()
    agents.serve()
    expected = verdicts_of_all(scene)
    with Sender(scene, seed=13):
        for _ in range(WORKER_KILLS):
            time.sleep(chance.uniform(0.0, 2 * LONGEST_LIFE_S))
            chance.choice(until(lambda: workers_of(agents.running.pid))).kill()
        time.sleep(LONGEST_LIFE_S)
        agents.running.kill()
        agents.start()
    agents.finish()
    account = scene.account(expected)
    assert "UNKNOWN" not in account
    report(f"{WORKER_KILLS} kills of workers, and one of their agent", account)


def workers_of(agent):
    found = []
    for each in psutil.Process(agent).children():
        with suppress(psutil.NoSuchProcess):  # just killed, a zombie is one
            found += [each] if "agent.runtime.workers.processes" in each.cmdline() else []
    return found
