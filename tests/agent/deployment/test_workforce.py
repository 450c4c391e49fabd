"""A line whose experts run in workers: processes of this box, each an emulated device with memories of its own."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import psutil

from experts.expert import Verdict
from tests.agent.line_files import LineFile, expert, fake, route

PATIENCE_S = 60.0


class Line(LineFile):
    """Fakes cls/f0 to cls/f2 with a route each, c2 with two steps, in two workers of an emulated device each."""

    def __init__(self, folder, **cluster):
        super().__init__(
            folder,
            experts={f"cls/f{number}": expert(f"f{number}.yaml") for number in range(3)},
            routes={"c0": route("cls/f0"), "c1": route("cls/f1"), "c2": route("cls/f0", "cls/f2")},
            cluster={
                "workers": [{"count": 2, "device": "emulated", "memory": {"host": "30MiB", "device": "20MiB"}}],
                **cluster,
            },
        )
        for number in range(3):
            fake(folder / f"f{number}.yaml", 1_000_000 + number)


IMAGE = np.zeros((8, 8, 3), dtype=np.uint8)


def worker_processes(folder):
    """Process numbers by name of the worker, of this line."""
    found = {}
    for process in psutil.Process().children():
        arguments = process.cmdline()
        if "agent.runtime.workers.processes" in arguments and str(folder) in arguments[-2]:
            found[Path(arguments[-2]).parent.name] = process.pid
    return found


def test_images_are_judged_in_workers(tmp_path):
    with Line(tmp_path).built(starts=True) as (agent, outcomes, _):
        assert worker_processes(tmp_path).keys() == {"w1", "w2"}
        numbers = [agent.loop.submit(IMAGE, component=f"c{number % 3}") for number in range(12)]
        assert agent.loop.wait_until_idle(PATIENCE_S)
        assert {outcomes[number].verdict for number in numbers} == {Verdict.OK}, outcomes
        statistics = agent.loop.statistics()
        assert {pool.name for pool in statistics.engine.pools} == {
            "w1/host", "w1/device", "w2/host", "w2/device"
        }  # fmt: skip
    assert not worker_processes(tmp_path)


def test_killed_workers_lose_nothing_and_come_back(tmp_path):
    with Line(tmp_path).built(starts=True) as (agent, outcomes, _):
        numbers = []
        for round_ in range(3):
            numbers += [agent.loop.submit(IMAGE, component=f"c{number % 3}") for number in range(20)]
            os.kill(worker_processes(tmp_path)[f"w{1 + round_ % 2}"], signal.SIGKILL)
            numbers += [agent.loop.submit(IMAGE, component=f"c{number % 3}") for number in range(20)]
            assert agent.loop.wait_until_idle(PATIENCE_S)
            deadline_s = time.monotonic() + PATIENCE_S
            while agent.loop.statistics().engine.away and time.monotonic() < deadline_s:
                time.sleep(0.05)
            assert not agent.loop.statistics().lost
        assert {outcomes[number].verdict for number in numbers} == {Verdict.OK}
        assert len(outcomes) == len(numbers)
