"""Disks that are full, slow, or give back other bytes than were written."""

import os
import random
import subprocess
import time
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest

import agent.service.inspections.inspector
from agent.deployment.build import AgentOptions, build_agent
from agent.runtime.loop import LoopOptions
from experts.expert import Verdict
from tests.drill.scene import COLOURS, EXPERTS, is_full, picture
from tests.waiting import until

pytestmark = pytest.mark.slow
DAMAGES = 40 if is_full() else 6
SECONDS_FULL = 20.0 if is_full() else 3.0


@pytest.fixture
def small_disk(scene):
    """The state on a filesystem of its own, of a few megabytes."""
    state = scene.folder / "state"
    state.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(state)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no filesystem may be mounted here: {mounted.stderr.decode().strip()}")
    yield state
    subprocess.run(["umount", "-l", str(state)], check=True)


def test_full_disk_raises_an_alarm_and_loses_nothing(scene, small_disk, report):
    with scene.served() as service:
        filler = small_disk / "filler"
        with pytest.raises(OSError, match="No space left"):
            fill(filler)
        scene.drop_many(200)
        ordered_until = time.monotonic() + SECONDS_FULL
        number = 0
        while time.monotonic() < ordered_until:
            scene.order([(f"k{number}-{n}", f"c{n % EXPERTS}", n % len(COLOURS)) for n in range(20)], timeout_s=1.0)
            number += 1
        assert service.desk.status().alarms, "nobody was told"
        filler.unlink()
        until(lambda: scene.is_finished() and not service.store.statistics().pending)
        assert service.desk.status().alarms == ()
    report("disk full", scene.account())


def fill(file):
    with file.open("wb", buffering=0) as out:
        while True:
            out.write(bytes(65536))


def test_torn_or_flipped_weights_give_no_wrong_verdict(scene, report):
    chance = random.Random(3)
    counts = {"damaged": 0, "unknown": 0, "judged by others": 0}
    for damage in range(DAMAGES):
        segments = sorted((scene.folder / "state" / "packed" / "segments").glob("*.bin"))
        if segments:  # the first agent packs, and says what a sound line says
            harm(chance.choice(segments), chance)
            counts["damaged"] += 1
        with scene.served():
            keys = [(f"d{damage}-{n}", f"c{n}", n) for n in range(EXPERTS)]
            scene.order(keys, timeout_s=30.0)
            said = [scene.answered[key] for key, _, _ in keys]
        counts["unknown"] += said.count("VERDICT_UNKNOWN")
        counts["judged by others"] += len(said) - said.count("VERDICT_UNKNOWN")
        assert said.count("VERDICT_UNKNOWN") <= (1 if damage else 0)
    assert counts["unknown"] > 0
    report("torn and flipped weights", counts | scene.account())


def harm(file, chance):
    """Flip a bit, or cut the file short, as a drive that lies does: its time stays."""
    status = file.stat()
    content = bytearray(file.read_bytes())
    if chance.random() < 0.5:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    else:
        del content[chance.randrange(len(content)) :]
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_slow_ssd_makes_no_image_unknown(scene, report, monkeypatch):
    scene.document["memory"] = {"host": "12MiB", "workspace": "8MiB"}  # two experts of four
    slow = AgentOptions(loop=LoopOptions(ssd_bytes_per_s=20e6))
    monkeypatch.setattr(agent.service.inspections.inspector, "build_agent", partial(build_agent, options=slow))
    with scene.served():
        scene.drop_many(120 if is_full() else 24)
        until(scene.is_finished)
    counts = scene.account()
    assert counts.get("UNKNOWN", 0) == 0
    report("slow SSD", counts)


def test_clock_jumps_cost_no_board_a_part(scene, report):
    scene.document["boards"] = {"main": {"components": {f"c{n}": 1 for n in range(EXPERTS)}, "takt_s": 3600.0}}
    off_by, jumps = [timedelta()], 0
    with scene.served(wall=lambda: datetime.now(UTC) + off_by[0]):
        for number in range(EXPERTS * (60 if is_full() else 12)):
            colour = number % len(COLOURS)
            scene.drop_one(colour, picture(colour, size=8 + number % EXPERTS))  # no part is a copy of another
            if number % 7 == 3:
                off_by[0] = timedelta(hours=random.Random(number).choice([-48, -1, 1, 30, 24 * 365]))
                jumps += 1
        until(scene.is_finished)
    boards = list(scene.results.boards())
    assert all(not board.missing for board in boards)
    assert all(board.verdict is not Verdict.OK or board.counts[Verdict.NG] == 0 for board in boards)
    report("clock jumps", {"jumps": jumps, "boards": len(boards)} | scene.account())
