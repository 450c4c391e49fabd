"""The same events give the same effects in every process, however Python hashes its strings there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("trace", [1, 2])
def test_effects_come_in_one_order_whatever_the_hash_seed(trace):
    program = [sys.executable, "-m", "tests.agent.core.effect_trace", str(trace)]
    started = [
        subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONHASHSEED": str(seed)})
        for seed in (0, 1, 2, 3)
    ]
    told = [process.communicate(timeout=60)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(started)
    assert len(set(told)) == 1
