"""An agent in a control group with less memory than its line's packed weights, under the kernel's own limit."""

import os
import sqlite3
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.waiting import until

ROOT = Path(__file__).parents[3]
MEBIBYTE = 2**20
EXPERTS = 24
WEIGHT_BYTES = 32 * MEBIBYTE
LIMIT_BYTES = 640 * MEBIBYTE  # the weights of all are 768 MiB, the agent without any 250
PATIENCE_S = 120.0


def memory_groups():
    """(Folder, file of the limit, file of the count of kills) where this process may make groups, by their version."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    for _, place, kind, options, *_ in mounts:
        controllers = Path(place, "cgroup.subtree_control")
        if kind == "cgroup" and "memory" in options.split(","):
            yield Path(place), "memory.limit_in_bytes", "memory.oom_control"
        elif kind == "cgroup2" and controllers.exists() and "memory" in controllers.read_text().split():
            yield Path(place), "memory.max", "memory.events"


@pytest.fixture
def group():
    """A control group of so much memory, and whether the kernel has ended anything in it."""
    for place, limit, kills in memory_groups():
        folder = place / f"coserve-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / limit).write_text(str(LIMIT_BYTES))
            told = folder / kills
            yield folder, lambda told=told: int(dict(map(str.split, told.read_text().splitlines()))["oom_kill"])
        finally:
            folder.rmdir()
        return
    pytest.skip("no control group may be made here that limits memory")


@contextmanager
def served_within(folder, line):
    """The agent, in that group from before it loads anything."""
    command = f'echo $$ > {folder}/cgroup.procs; exec "$0" "$@"'
    agent = subprocess.Popen(
        ["/bin/sh", "-c", command, sys.executable, str(ROOT / "coserve.py"), "serve", str(line)],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield agent
    finally:
        agent.terminate()
        _, said = agent.communicate(timeout=PATIENCE_S)
        assert agent.returncode == 0, said[-2000:]


def test_line_larger_than_its_control_groups_memory_is_served_and_not_killed(line, group):
    folder, killed = group
    for number in range(EXPERTS):
        line.add_expert(number)
        line.fake(number, weight_bytes=WEIGHT_BYTES)
    line.document["memory"] = {"host": "160MiB", "workspace": "10MiB"}
    line.watch()
    for number in range(2 * EXPERTS):
        line.drop(f"b{number // EXPERTS}_c{number % EXPERTS}_R{number}.png")

    def judged():
        with suppress(FileNotFoundError, sqlite3.OperationalError):  # the agent has not made its tables yet
            return [row.verdict for row in line.rows]
        return []

    with served_within(folder, line.write()) as agent:
        until(lambda: len(judged()) == 2 * EXPERTS or agent.poll() is not None)
    assert {str(verdict) for verdict in judged()} == {"OK"}
    assert killed() == 0
