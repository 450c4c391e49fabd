"""Each thread of ours keeps the number of operator threads that it was given, and who is no executor leaves none."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from agent.runtime.preparation import Preparation
from agent.runtime.threads import end_team, use_threads
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
