"""Each thread of ours keeps the number of operator threads that it was given, whatever the others are given."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from agent.runtime.executor import Preparation
from agent.runtime.threads import use_threads
from experts.expert import Expert, InputSpec


def count_after_an_operator():
    torch.ones(512, 512).mm(torch.ones(512, 512))
    return torch.get_num_threads()


@pytest.fixture
def executor():
    """A thread that has been given its count, and has run no operator yet."""
    with ThreadPoolExecutor(1, initializer=use_threads, initargs=(3,)) as thread:
        thread.submit(lambda: None).result()
        yield thread


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
