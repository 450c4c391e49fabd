"""Each thread of ours keeps the number of operator threads that it was given, and who is no executor leaves none."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from agent.core.performance import HOST, ExecutorSpec
from agent.runtime.preparation import Preparation
from agent.runtime.threads import Team, end_team, team_cores, use_threads
from experts.expert import Expert, InputSpec
from tests.agent.runtime.native_threads import native_threads, on_linux


def count_after_an_operator():
    torch.ones(512, 512).mm(torch.ones(512, 512))
    return torch.get_num_threads()


@pytest.fixture
def executor():
    """A thread that has been given its count, and has run no operator yet."""
    with ThreadPoolExecutor(1, initializer=use_threads, initargs=(3,)) as thread:
        thread.submit(lambda: None).result()
        yield thread
        thread.submit(end_team).result()  # waits for its end: no other test is to count it


@pytest.mark.parametrize("others", [1, 2, 5])
def test_a_count_given_to_another_thread_later_is_that_thread_s_alone(executor, others):
    with ThreadPoolExecutor(1, initializer=use_threads, initargs=(others,)) as other:
        assert other.submit(count_after_an_operator).result() == others
        assert executor.submit(count_after_an_operator).result() == 3
        assert other.submit(count_after_an_operator).result() == others


def test_preparing_images_on_one_core_each_leaves_an_executor_its_cores(executor, tmp_path):
    expert = Expert("cls/a", "resnet18", tmp_path / "a.safetensors", ("ok",), InputSpec(64, 64))
    preparation = Preparation(2)
    preparation.start(expert, np.zeros((80, 80, 3), dtype=np.uint8), "a.png").result()
    preparation.stop()
    assert executor.submit(count_after_an_operator).result() == 3


@on_linux
class TestTeams:
    """A team that waits somewhere keeps the executors' from waiting actively: see ``agent.runtime.threads``."""

    def test_a_thread_s_team_ends_and_begins_again(self):
        with ThreadPoolExecutor(1, initializer=use_threads, initargs=(3,)) as thread:
            before = thread.submit(native_threads).result()
            thread.submit(count_after_an_operator).result()
            assert thread.submit(native_threads).result() == before + 2
            for _ in range(2):  # the second time there is none to end
                thread.submit(end_team).result()
                assert thread.submit(native_threads).result() == before
            assert thread.submit(count_after_an_operator).result() == 3
            assert thread.submit(native_threads).result() == before + 2
            thread.submit(end_team).result()

    def test_another_thread_s_team_stays(self, executor):
        executor.submit(count_after_an_operator).result()
        before = native_threads()
        with ThreadPoolExecutor(1) as other:
            other.submit(end_team).result()
        assert native_threads() == before


def affinities():
    """By the system's number, the cores of each thread of this process."""
    return {int(task): os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")}


CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


@on_linux
@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
class TestCores:
    """Each thread of an executor's team has a core of its own, so that Linux does not wake them all on one."""

    @pytest.fixture
    def thread(self):
        with ThreadPoolExecutor(1, initializer=use_threads, initargs=(2,)) as thread:
            yield thread
            thread.submit(end_team).result()

    @staticmethod
    def started_by(thread, *work):
        """The cores of what is new once a thread has done all that."""
        before = affinities()
        for each in work:
            thread.submit(each).result()
        return [cores for task, cores in affinities().items() if task not in before]

    def test_all_but_the_executor_s_own_thread_have_one(self, thread):
        thread.submit(lambda: None).result()
        team = Team(CORES[:2])
        assert self.started_by(thread, team.keep, count_after_an_operator, team.keep) == [{CORES[1]}]
        assert os.sched_getaffinity(thread.submit(threading.get_native_id).result()) == set(CORES)

    def test_those_that_come_after_have_it_again(self, thread):
        thread.submit(lambda: None).result()
        team = Team(CORES[:2])
        work = (team.keep, end_team, count_after_an_operator)
        assert self.started_by(thread, *work) == [set(CORES)]  # nobody asked for it again
        assert thread.submit(team.keep).result() is None
        assert {CORES[1]} in affinities().values()

    @pytest.mark.parametrize("cores", [(), CORES[:1]])
    def test_nothing_is_begun_for_fewer_than_two(self, thread, cores):
        thread.submit(lambda: None).result()
        assert self.started_by(thread, Team(cores).keep) == []

    def test_where_it_is_forbidden_operators_run_as_they_would(self, thread, monkeypatch):
        def forbidden(*_):
            raise PermissionError("not here")

        monkeypatch.setattr(os, "sched_setaffinity", forbidden)
        team = Team(CORES[:2])
        for _ in range(2):
            thread.submit(team.keep).result()
            assert thread.submit(count_after_an_operator).result() == 2


@on_linux
class TestTeamCores:
    def test_each_executor_of_the_cpu_has_its_share_and_no_core_is_in_two(self, monkeypatch):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {8, 3, 5, 4, 9, 7})
        executors = [ExecutorSpec(0, "cuda", "device"), ExecutorSpec(1, "cpu", HOST), ExecutorSpec(2, "cpu", HOST)]
        assert team_cores(executors, 3) == {1: (3, 4, 5), 2: (7, 8, 9)}
        assert team_cores(executors[:1], 6) == {}

    def test_nobody_has_any_where_there_are_fewer_than_threads(self, monkeypatch):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
        executors = [ExecutorSpec(number, "cpu", HOST) for number in range(2)]
        assert team_cores(executors, 2) == {}
        assert team_cores(executors, 1) == {0: (0,), 1: (1,)}
