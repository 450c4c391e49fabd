"""Several precisions on one line: who has rows, what is in them, and that a round of each comes before the next."""

from __future__ import annotations

import pytest

from agent.config import read_line
from agent.records.database import StateLock
from experts.errors import AlreadyRunning
from experts.expert import Precision
from profiler.bench.policy_runs import WARMING_UP, RunOptions
from profiler.bench.side_by_side import run_in_precisions
from profiler.workload.generated_line import LineRecipe, generate_line
from profiler.workload.traces import TracedArrival

RECIPE = LineRecipe(
    classifiers=2, architecture="squeezenet1_1", requests=4, every_s=0.001, memory_for=2, classifier_px=64, seed=3
)
TRACE = tuple(TracedArrival(0.0, expert=f"cls/00{number % 2}") for number in range(4))
ON_CPU = {"COSERVE__DEVICE": "cpu"}
IN_TURN = (Precision.ONNXRUNTIME, "auto")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return read_line(generate_line(tmp_path_factory.mktemp("beside") / "line", RECIPE).line, ON_CPU)


@pytest.fixture(scope="module")
def measured(config):
    """Each precision twice, and the stages in the order they were told."""
    stages = []
    options = RunOptions(policies=("naive", "coserve"), repeats=2, with_roofline=False)
    found = run_in_precisions(config, TRACE, options, IN_TURN, lambda stage, *_: stages.append(stage))
    return found, stages


def test_each_precision_has_its_row_and_the_naive_server_one(measured):
    found, _ = measured
    assert [(row.policy, row.precision) for row in found.rows] == [
        ("naive", "fp32"), ("coserve", "onnxruntime"), ("coserve", "fp32"),
    ]  # fmt: skip
    assert [len(row.runs) for row in found.rows] == [2, 2, 2]
    assert all(row.requests == len(TRACE) and not row.medians.unknown for row in found.rows)


def test_what_auto_ran_in_is_told(measured):
    assert measured[0].notes == ("--precision onnxruntime: ran in onnxruntime", "--precision auto: ran in fp32")


def test_rounds_take_turns(measured):
    turns = [stage for stage in measured[1] if "coserve" in stage]
    assert turns == 2 * ["onnxruntime: coserve", "auto: coserve"]
    assert any(stage.endswith(WARMING_UP) for stage in measured[1])


def test_the_naive_server_alone_is_run_once_a_round(config):
    found = run_in_precisions(config, TRACE, RunOptions(policies=("naive",), with_roofline=False), IN_TURN)
    assert [(row.policy, len(row.runs)) for row in found.rows] == [("naive", 1)]
    assert found.notes == ()


def test_of_none_it_is_the_lines_own(config):
    found = run_in_precisions(config, TRACE, RunOptions(policies=("coserve",), with_roofline=False), ())
    assert [row.precision for row in found.rows] == ["fp32"]


def test_beside_the_lines_agent_nothing_is_measured(config):
    with StateLock(config.state), pytest.raises(AlreadyRunning):
        run_in_precisions(config, TRACE, RunOptions(policies=("coserve",)), IN_TURN)
