"""`coserve serve` ended by what nothing else helps against: exit code 1, nothing judged, and the next one judges it."""

import pytest

from experts.expert import Verdict
from tests.waiting import until

DEADLINE_S = 90.0
IMAGES = [f"B{board}_c{number}_R1.png" for board in range(6) for number in range(2)]

PREAMBLE = """
import threading
import agent.service.inspections.inspector
from agent.service.line_service import LineService
from experts.backends.fake import FakeSkeleton

def once_it_serves(change):
    start = LineService.start
    def started(service):
        change()
        start(service)
    LineService.start = started
"""
LOSING = """
import torch

def infer(*_):
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

once_it_serves(lambda: setattr(FakeSkeleton, "infer", infer))
"""
HANGING = """
from functools import partial
import agent.runtime.loop, experts.packed.direct_reads
from agent.deployment.build import AgentOptions
from agent.runtime.ages import AgeLimits
from agent.runtime.loop import LoopOptions

def hang(*_):
    threading.Event().wait()

ages = AgeLimits(logged_s=0.5, logged_multiple=0.0, ended_s=1.0, ended_multiple=0.0)
options = AgentOptions(loop=LoopOptions(ages=ages))
inspector = agent.service.inspections.inspector
inspector.build_agent = partial(inspector.build_agent, options=options)
agent.runtime.loop.STOP_S = experts.packed.direct_reads.CLOSE_S = 0.5
"""
HANGING_BATCH = HANGING + "once_it_serves(lambda: setattr(FakeSkeleton, 'infer', hang))"
HANGING_LOAD = HANGING + "once_it_serves(lambda: setattr(experts.packed.direct_reads, '_read_part', hang))"
DYING = """
import agent.records.group_commit
from agent.records.group_commit import GroupCommitter

def settle(*_):
    raise RuntimeError("a fault of the program")

once_it_serves(lambda: setattr(GroupCommitter, "_settle", settle))
"""


@pytest.fixture
def line(line):
    """With images waiting for each expert."""
    line.watch()
    for name in IMAGES:
        line.drop(name)
    return line


def serve_broken(forks, line, breaking):
    """Run ``coserve serve`` with something broken in it, to its end."""
    script = f"{PREAMBLE}{breaking}\nfrom coserve import main\nmain()"
    return forks.run(script, "serve", line.write(), timeout_s=DEADLINE_S)


def judge_what_waits(line):
    """Start again, unbroken, until everything has a verdict, and is put away."""
    claimed = line.inbox / ".work"
    with line.served():
        until(lambda: len(line.rows) == len(IMAGES) and not any(claimed.rglob("*.png")))
    assert line.verdicts == sorted((name, Verdict.OK) for name in IMAGES)


def test_lost_device_ends_the_agent_with_1_and_the_next_one_judges_everything(forks, line):
    done = [serve_broken(forks, line, LOSING) for _ in range(3)][-1]  # however often: no image is to blame for it
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1].startswith("the agent crashed: DeviceLost: the device cpu is lost: ")
    assert "expert_quarantined" not in done.stderr
    assert (line.rows, line.shelf("failed"), line.shelf(".work") != []) == ([], [], True)
    judge_what_waits(line)


def test_program_fault_in_a_thread_ends_the_agent_and_the_next_continues(forks, line):
    done = serve_broken(forks, line, DYING)
    assert done.returncode == 1, done.stderr
    assert "thread_died thread=results" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("the agent crashed: RuntimeError: a fault of the program")
    judge_what_waits(line)


@pytest.mark.parametrize("hanging", [HANGING_BATCH, HANGING_LOAD], ids=["a batch", "a load"])
def test_hanging_batch_or_load_ends_the_agents_process(forks, line, hanging):
    done = serve_broken(forks, line, hanging)
    assert done.returncode == 1, done.stderr
    assert "overdue age_s=" in done.stderr
    assert "the agent crashed: WorkOverdue: the " in done.stderr.splitlines()[-1]
    assert line.rows == []
    judge_what_waits(line)
