"""A line whose experts run in workers: processes of this box, each an emulated device with memories of its own."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from agent.deployment.line_change import plan_change
from agent.runtime.images.sources import EncodedImage, Frame, FramePart
from agent.runtime.workers import host, remote
from experts.expert import Verdict
from tests.agent.line_files import ThreeFakes, expert, fake, route
from tests.pictures import encoded

PATIENCE_S = 60.0


def workers_line(folder, **cluster):
    """Three fakes in two workers of an emulated device each."""
    workers = [{"count": 2, "device": "emulated", "memory": {"host": "30MiB", "device": "20MiB"}}]
    return ThreeFakes(folder, cluster={"workers": workers} | cluster)


IMAGE = np.zeros((8, 8, 3), dtype=np.uint8)


def worker_processes(folder):
    """Process numbers by name of the worker, of this line."""
    found = {}
    for process in psutil.Process().children():
        try:
            arguments = process.cmdline()
        except psutil.NoSuchProcess:  # just killed, a zombie is one
            continue
        if "agent.runtime.workers.processes" in arguments and str(folder) in arguments[-2]:
            found[Path(arguments[-2]).parent.name] = process.pid
    return found


def until_it_is_back(line, agent, name, ended):
    """``ended``: number of the process that the worker had."""
    deadline_s = time.monotonic() + PATIENCE_S
    while worker_processes(line.folder).get(name, ended) == ended or agent.loop.lost:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.fixture(scope="module")
def judging(tmp_path_factory):
    """The line, its agent, and its outcomes; each test leaves both workers at work."""
    line = workers_line(tmp_path_factory.mktemp("line"))
    with line.built(starts=True) as (agent, outcomes, _):
        yield line, agent, outcomes
    assert not worker_processes(line.folder)


def judged(agent, outcomes, sources, components=("c0", "c1", "c2")):
    numbers = [
        agent.loop.submit(source, component=components[place % len(components)]) for place, source in enumerate(sources)
    ]
    assert agent.loop.wait_until_idle(PATIENCE_S)
    return [outcomes[number] for number in numbers]


def test_images_are_judged_in_workers(judging):
    line, agent, outcomes = judging
    assert worker_processes(line.folder).keys() == {"w1", "w2"}
    assert {each.verdict for each in judged(agent, outcomes, [IMAGE] * 12)} == {Verdict.OK}
    pools = {pool.name for pool in agent.loop.statistics().engine.pools}
    assert pools == {"w1/host", "w1/device", "w2/host", "w2/device"}


def test_frames_files_and_broken_images_reach_workers(judging):
    line, agent, outcomes = judging
    content = encoded(Image.new("RGB", (32, 32)))
    (line.folder / "i.png").write_bytes(content)
    frame = Frame(EncodedImage(content, "board.png", 10**6), (32, 32))
    sources = [
        *(FramePart(frame, (left, 0, left + 8, 8), f"part {left}") for left in (0, 8, 16)),
        line.folder / "i.png",
        content,
        line.folder / "gone.png",
        b"no image",
    ]
    found = judged(agent, outcomes, sources, components=("c0",))
    assert [each.verdict for each in found] == [Verdict.OK] * 5 + [Verdict.UNKNOWN] * 2
    assert found[5].reason == "gone.png: cannot be read (No such file or directory)"


def test_killed_workers_lose_nothing_and_come_back(judging):
    line, agent, outcomes = judging
    numbers = [agent.loop.submit(IMAGE, component=f"c{number % 3}") for number in range(20)]
    ended = worker_processes(line.folder)["w1"]
    os.kill(ended, signal.SIGKILL)
    found = judged(agent, outcomes, [IMAGE] * 20)
    assert {each.verdict for each in (*found, *(outcomes[number] for number in numbers))} == {Verdict.OK}
    until_it_is_back(line, agent, "w1", ended)


@pytest.mark.slow
def test_worker_that_does_not_start_is_retried_after_a_longer_pause(judging, caplog):
    line, agent, outcomes = judging
    folder = agent.segments.directory / "workers" / "w2" / "packed"
    ended = worker_processes(line.folder)["w2"]
    aside = folder.rename(folder.with_name("aside"))
    folder.touch()  # no folder for its files
    os.kill(ended, signal.SIGKILL)
    deadline_s = time.monotonic() + PATIENCE_S
    while "worker_not_back worker=w2 retry_s=2 " not in caplog.text:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    folder.unlink()
    aside.rename(folder)
    until_it_is_back(line, agent, "w2", ended)
    assert "retry_s=4" not in caplog.text
    assert {each.verdict for each in judged(agent, outcomes, [IMAGE] * 6)} == {Verdict.OK}


def test_hanging_worker_is_killed_and_its_images_are_judged_elsewhere(judging, monkeypatch):
    line, agent, outcomes = judging
    monkeypatch.setattr(remote, "SILENT_S", 3.0)
    time.sleep(2 * host.BEAT_S)  # a beat takes the new limit over
    stopped = worker_processes(line.folder)["w2"]
    os.kill(stopped, signal.SIGSTOP)
    assert {each.verdict for each in judged(agent, outcomes, [IMAGE] * 30)} == {Verdict.OK}
    until_it_is_back(line, agent, "w2", stopped)


@pytest.mark.slow
def test_line_with_workers_is_reloaded(judging):
    line, agent, outcomes = judging
    fake(line.folder / "f1.yaml", 1_200_000)
    fake(line.folder / "f3.yaml", 1_000_003)
    line.document["experts"]["cls/f3"] = expert("f3.yaml")
    line.document["routes"]["c3"] = route("cls/f3", "cls/f1")
    change = plan_change(agent, line.config, lambda *_: None)
    assert (change.added, change.replaced) == (("cls/f3",), ("cls/f1",))
    agent.loop.change_line(change.event, change.copies)
    everything = ("c0", "c1", "c2", "c3")
    assert {each.verdict for each in judged(agent, outcomes, [IMAGE] * 12, everything)} == {Verdict.OK}
    ended = worker_processes(line.folder)["w1"]
    os.kill(ended, signal.SIGKILL)
    until_it_is_back(line, agent, "w1", ended)
    assert {each.verdict for each in judged(agent, outcomes, [IMAGE] * 12, everything)} == {Verdict.OK}


def test_missing_weights_quarantine_their_expert_with_the_reason(tmp_path):
    line = workers_line(tmp_path)
    (tmp_path / "f1.yaml").unlink()
    with line.built(starts=True) as (agent, outcomes, _):
        missing, found = judged(agent, outcomes, [IMAGE] * 2, components=("c1", "c0"))
    assert (missing.verdict, found.verdict) == (Verdict.UNKNOWN, Verdict.OK)
    assert "f1.yaml is not there" in missing.reason
