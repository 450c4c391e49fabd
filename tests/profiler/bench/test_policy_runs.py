"""Tiny real lines on the real engine: counts, agreement of labels, floors, and how a broken run is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from agent.config import read_line
from agent.deployment.build import AS_SERVED
from agent.deployment.profile_in_use import usage_of
from agent.runtime.machine.box import MemorySize
from experts.errors import ConfigError, ImageUnreadable
from experts.expert import Precision
from profiler.bench.journal_cost import measure_journal
from profiler.bench.policy_runs import WARMING_UP, RunOptions, run_line
from profiler.bench.roofline import io_bytes, measure_bandwidth, measure_compute, work_of
from profiler.replay.player import experts_of, images_of, player
from profiler.workload.generated_line import LineRecipe, generate_line
from profiler.workload.traces import TracedArrival, read_trace

RECIPE = LineRecipe(classifiers=3, architecture="squeezenet1_1", requests=12, memory_for=2, classifier_px=64, seed=3)
ON_CPU = {"COSERVE__DEVICE": "cpu"}  # the environment: these figures are those of one memory
KEYS = {
    "policy", "requests", "seconds", "images_per_s", "switches", "loads", "evictions", "bytes_read",
    "roofline_images_per_s", "roofline_fraction", "decision_us", "peak_rss_bytes", "outputs_sha256",
}  # fmt: skip
POLICIES = ("coserve", "samba", "em", "naive")
BY_TURNS = tuple(TracedArrival(0.0, expert=f"cls/00{number % 2}") for number in range(4))
NO_FLOOR = RunOptions(with_roofline=False)


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    return generate_line(tmp_path_factory.mktemp("measured") / "line", RECIPE)


@pytest.fixture(scope="module")
def config(generated):
    return read_line(generated.line, ON_CPU)


@pytest.fixture(scope="module")
def trace(generated, config):
    return read_trace(generated.trace, config.catalog)


@pytest.fixture(scope="module")
def measured(config, trace):
    """All policies twice, and the reported stages."""
    stages = []
    options = RunOptions(policies=POLICIES, repeats=2)
    return run_line(config, trace, options, lambda *stage: stages.append(stage)), stages


def room_for(generated, experts):
    return {"host": experts * generated.footprint_bytes + generated.workspace_bytes}


def test_policies_take_turns_and_all_judge_alike(measured):
    found, stages = measured
    turns = [(stage, done) for stage, done, _ in stages if stage not in ("pack", WARMING_UP)]
    assert turns == [(policy, repeat) for repeat in (1, 2) for policy in POLICIES]
    assert [(row.policy, len(row.runs), row.medians.unknown) for row in found.rows] == [
        (policy, 2, 0) for policy in POLICIES
    ]
    assert len({run.outputs_sha256 for row in found.rows for run in row.runs}) == 1


def test_rows_have_the_documented_keys_and_consistent_figures(measured, generated):
    found = json.loads(json.dumps(measured[0].as_json()))
    for row in found["rows"]:
        assert row.keys() >= KEYS
        assert row["loads"].keys() == {"ssd_host", "host_device", "ssd_device"}
        assert row["memory"] == {"host": generated.expert_bytes, "host_workspace": generated.workspace_bytes}
        assert (row["requests"], row["precision"]) == (12, "fp32")
    assert found["rows"][0]["decision_us"].keys() == {"p50", "p99"}
    assert isinstance(found["direct_io"], bool)
    for row in measured[0].rows:
        for run in row.runs:
            floor_s = max(run.compute_floor_s, run.io_floor_s)
            assert run.roofline_images_per_s == pytest.approx(row.requests / floor_s)
            assert run.roofline_fraction == pytest.approx(run.images_per_s / run.roofline_images_per_s)
            if row.policy != "naive":
                assert run.prediction_error == pytest.approx(run.predicted_images_per_s / run.images_per_s - 1)
                assert min(run.scheduling_s, run.busy_s) > 0


def test_precisions_take_turns_and_the_naive_server_has_one_row(config):
    stages = []
    options = RunOptions(("naive", "coserve"), 2, precisions=(Precision.ONNXRUNTIME, "auto"), with_roofline=False)
    found = run_line(config, BY_TURNS, options, lambda stage, *_: stages.append(stage))
    assert [(row.policy, row.precision, len(row.runs)) for row in found.rows] == [
        ("naive", "fp32", 2), ("coserve", "onnxruntime", 2), ("coserve", "fp32", 2),
    ]  # fmt: skip
    assert found.notes == ("--precision onnxruntime: ran in onnxruntime", "--precision auto: ran in fp32")
    assert [stage for stage in stages if "coserve" in stage] == 2 * ["onnxruntime: coserve", "auto: coserve"]


def test_memory_for_one_expert_makes_each_turn_a_load_at_the_given_rate(config, generated):
    """Four requests of two experts in turn, in order: four loads, of which the last three evict.

    The naive server starts full with the more used one of the two, and each of its loads evicts.
    """
    options = RunOptions(("samba", "naive"), memory=room_for(generated, 1), ssd_bytes_per_s=50e6, with_roofline=False)
    found = run_line(config, BY_TURNS, options)
    counted = {
        row.policy: (row.medians.switches, row.medians.loads["ssd_host"], row.medians.evictions) for row in found.rows
    }
    usage = usage_of(config, None)
    loads = 3 if (-usage["cls/000"], "cls/000") < (-usage["cls/001"], "cls/001") else 4
    assert counted == {"samba": (4, 4, 3), "naive": (loads, loads, loads)}
    sizes = [segment.stat().st_size for segment in (config.state / "packed" / "segments").iterdir()]
    samba = found.row("samba").medians
    assert samba.bytes_read in {4 * size for size in sizes}
    assert (found.is_held, found.ssd_bytes_per_s) == (True, 50e6)
    assert samba.seconds >= samba.bytes_read / 50e6


def test_rate_above_that_of_the_ssd_limits_nothing_which_is_noted(config):
    found = run_line(config, BY_TURNS, RunOptions(("naive",), ssd_bytes_per_s=1e15, with_roofline=False))
    assert not found.is_held
    assert "more than this SSD reaches" in found.notes[0]


BROKEN = (TracedArrival(0.0, component="part-000", image=Path("broken.png")),)


@pytest.mark.parametrize(
    ("options", "trace", "told"),
    [
        (RunOptions(policies=("fastest",)), BY_TURNS, "no policy 'fastest' - choose of coserve, .*naive"),
        (RunOptions(repeats=0), BY_TURNS, "nothing to measure"),
        (RunOptions(memory={"disk": 1}), BY_TURNS, "unknown memory disk"),
        (RunOptions(), (), "give a trace with arrivals"),
        (RunOptions(), BROKEN, "broken"),
    ],
)
def test_unusable_trace_or_options_are_refused(config, options, trace, told):
    with pytest.raises((ConfigError, ImageUnreadable), match=told):
        run_line(config, trace, options)


def test_unservable_expert_is_reported_with_its_place(tmp_path):
    generated = generate_line(tmp_path / "line", RECIPE)
    (generated.line.parent / "weights" / "cls-001.safetensors").write_bytes(b"nothing")
    config = read_line(generated.line, ON_CPU)
    with pytest.raises(ConfigError, match=r"line\.yaml:\d+:\d+: experts\.cls/001: cannot be served"):
        run_line(config, BY_TURNS)
    assert run_line(config, BY_TURNS[:1], NO_FLOOR).rows[0].medians.unknown == 0


def play(config, options=AS_SERVED):
    images = images_of(BY_TURNS, config.catalog)
    with player(config, experts_of(BY_TURNS, config.catalog), options) as stage:
        played = stage.play(BY_TURNS, images)
        return stage.agent, played, work_of(played, images)


def test_floor_is_work_without_loads_and_bytes_that_no_memory_held(config, generated):
    """Nothing is placed for samba: both experts are read; with room for all, coserve begins with both."""
    line = RunOptions(memory=room_for(generated, 3)).on(config)
    agent, played, work = play(line.having(policy="samba"))
    assert work.experts == ("cls/000", "cls/001", "cls/000", "cls/001")
    packed = {form.expert: form.own.size_bytes for form in agent.packed.values()}
    assert io_bytes(agent, played, work) == packed["cls/000"] + packed["cls/001"]
    agent, played, work = play(line)
    assert io_bytes(agent, played, work) == 0
    assert measure_bandwidth(agent) > 0
    compute = measure_compute(agent, work)
    assert (compute.loads, compute.substituted, compute.note) == (0, 0, "")


def test_experts_of_a_kind_stand_in_for_others_if_memory_cannot_hold_all(config, generated):
    agent, _, work = play(config)
    small = MemorySize(10**12, int(1.5 * generated.footprint_bytes / 0.7))
    compute = measure_compute(replace(agent, box=replace(agent.box, host=small)), work)
    assert (compute.loads, compute.substituted) == (0, 2)
    assert compute.note.startswith("2 steps ran on other experts of their kind")
    with pytest.raises(ConfigError, match="one expert of each kind needs"):
        measure_compute(replace(agent, box=replace(agent.box, host=MemorySize(10**12, 1000))), work)


def test_journal_is_measured_in_pairs_and_leaves_no_file(config):
    found = measure_journal(config, BY_TURNS, RunOptions(repeats=2))
    (cost,) = found.rows
    assert (cost.requests, cost.repeats) == (4, 2)
    assert min(cost.images_per_s, cost.journaled_images_per_s, cost.image_bytes) > 0
    assert found.targets[0].wanted == "at most 5.0%"
    assert not list(config.state.glob("bench-journal*"))
