"""Operator threads of each thread, and the C library's heaps: how many there are, and what is left of them."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from agent.core.performance import HOST, ExecutorSpec
from agent.runtime.machine.threads import Team, end_team, teams, use_threads
from tests.agent.runtime.native_threads import CORES, cores_by_thread, native_threads, on_linux, on_two_cores

ROOT = Path(__file__).parents[4]
PATIENCE_S = 30.0


def count_after_an_operator():
    torch.ones(512, 512).mm(torch.ones(512, 512))
    return torch.get_num_threads()


@contextmanager
def thread_of(count):
    with ThreadPoolExecutor(1, initializer=use_threads, initargs=(count,)) as thread:
        thread.submit(lambda: None).result()
        yield thread
        thread.submit(end_team).result()  # waits for its end: no other test is to count it


@pytest.mark.parametrize("others", [1, 2, 5])
def test_thread_count_set_from_another_thread_is_that_threads_alone(others):
    with thread_of(3) as executor, thread_of(others) as other:
        assert other.submit(count_after_an_operator).result() == others
        assert executor.submit(count_after_an_operator).result() == 3
        assert other.submit(count_after_an_operator).result() == others


@on_linux
def test_thread_team_ends_and_begins_again():
    with thread_of(3) as thread:
        before = thread.submit(native_threads).result()
        thread.submit(count_after_an_operator).result()
        assert thread.submit(native_threads).result() == before + 2
        for _ in range(2):  # the second time there is none to end
            thread.submit(end_team).result()
            assert thread.submit(native_threads).result() == before
        assert thread.submit(count_after_an_operator).result() == 3
        assert thread.submit(native_threads).result() == before + 2


@on_linux
@on_two_cores
class TestCores:
    """The second thread of an executor's team has a core, so that Linux does not wake it where the first runs."""

    @pytest.fixture
    def thread(self):
        with thread_of(2) as thread:
            yield thread

    @staticmethod
    def started_by(thread, *work):
        before = cores_by_thread()
        for each in work:
            thread.submit(each).result()
        return [cores for task, cores in cores_by_thread().items() if task not in before]

    def test_second_thread_has_one_core_and_the_executors_own_has_all(self, thread):
        team = Team(2, CORES[:2])
        assert self.started_by(thread, team.keep, count_after_an_operator, team.keep) == [{CORES[1]}]
        assert os.sched_getaffinity(thread.submit(threading.get_native_id).result()) == set(CORES)

    def test_team_started_again_is_pinned_again(self, thread):
        team = Team(2, CORES[:2])
        thread.submit(team.keep).result()
        assert self.started_by(thread, end_team, count_after_an_operator) == [set(CORES)]  # nobody asked for it again
        thread.submit(end_team).result()
        assert self.started_by(thread, team.keep, count_after_an_operator) == [{CORES[1]}]

    def test_team_on_forbidden_cores_is_not_pinned(self, thread):
        team = Team(2, (CORES[0], CORES[-1] + 1))
        assert self.started_by(thread, team.keep, count_after_an_operator) == [set(CORES)]


@on_linux
def test_each_cpu_executor_has_two_cores_and_none_is_shared(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {8, 3, 5, 4})
    executors = [ExecutorSpec(0, "cuda", "device"), ExecutorSpec(1, "cpu", HOST), ExecutorSpec(2, "cpu", HOST)]
    assert {each: team.cores for each, team in teams(executors, 2).items()} == {0: (), 1: (3, 4), 2: (5, 8)}
    assert teams(executors[1:], 3)[1].cores == ()


def heaps(*given):
    command = [sys.executable, "-m", "tests.heaps", *given]
    return int(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=ROOT).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc only")
def test_threads_share_few_heaps():
    assert heaps() > 2
    assert heaps("bound") == 2
