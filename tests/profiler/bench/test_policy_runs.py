"""Tiny real lines on the real engine: what is counted, what must agree, and how anything broken is told."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from agent.config import read_line
from agent.core.events import Arrived
from agent.core.request import Outcome
from agent.deployment.build import AS_SERVED, AgentOptions
from agent.deployment.profile_in_use import usage_of
from agent.records.database import StateLock
from agent.runtime.loop import LoopOptions
from agent.runtime.machine.box import MemorySize
from experts.errors import AgentCrashed, AlreadyRunning, ConfigError, ImageUnreadable
from experts.expert import Precision, Verdict
from profiler.bench.policy_runs import RunOptions, run_line
from profiler.bench.roofline import io_bytes, measure_bandwidth, measure_compute, work_of
from profiler.replay.images import experts_of, images_of
from profiler.replay.player import Player, player
from profiler.workload.generated_line import LineRecipe, generate_line
from profiler.workload.traces import TracedArrival, read_trace

RECIPE = LineRecipe(
    classifiers=3, architecture="squeezenet1_1", requests=24, every_s=0.001, memory_for=2, classifier_px=64, seed=3
)
ON_CPU = {"COSERVE__DEVICE": "cpu"}  # the environment: these figures are those of one memory
KEYS = {
    "policy", "requests", "seconds", "images_per_s", "switches", "loads", "evictions", "bytes_read",
    "roofline_images_per_s", "roofline_fraction", "decision_us", "peak_rss_bytes", "outputs_sha256",
}  # fmt: skip
IN_TURN = tuple(TracedArrival(0.0, expert=f"cls/00{number % 2}") for number in range(4))


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    return generate_line(tmp_path_factory.mktemp("measured") / "line", RECIPE)


@pytest.fixture
def config(generated):
    return read_line(generated.line, ON_CPU)


@pytest.fixture
def trace(generated, config):
    return read_trace(generated.trace, config.catalog)


@pytest.fixture(scope="module")
def measured(generated):
    """Three policies and the naive server, twice each, and the stages in the order they were told."""
    config = read_line(generated.line, ON_CPU)
    stages = []
    options = RunOptions(policies=("coserve", "samba", "em", "naive"), repeats=2)
    trace = read_trace(generated.trace, config.catalog)
    return run_line(config, trace, options, lambda stage, done, total: stages.append((stage, done, total))), stages


def room_for(generated, experts):
    return {"host": experts * generated.footprint_bytes + generated.workspace_bytes}


def test_policies_take_turns_and_every_run_is_kept(measured):
    measurement, stages = measured
    turns = [(stage, done) for stage, done, _ in stages if stage not in ("pack", "warming up")]
    one, two = ([(policy, repeat) for policy in ("coserve", "samba", "em", "naive")] for repeat in (1, 2))
    assert turns == one + two
    assert [len(row.runs) for row in measurement.rows] == [2, 2, 2, 2]


def test_rows_have_the_keys_that_scripts_read_and_are_json(measured):
    document = json.loads(json.dumps(measured[0].as_json()))
    for row in document["rows"]:
        assert row.keys() >= KEYS
        assert row["loads"].keys() == {"ssd_host", "host_device", "ssd_device"}
        assert row["requests"] == 24
    assert document["rows"][0]["decision_us"].keys() == {"p50", "p99"}
    assert isinstance(document["direct_io"], bool)
    assert document["ssd_bytes_per_s"] > 0


def test_every_policy_and_the_naive_server_judge_alike(measured):
    digests = {run.outputs_sha256 for row in measured[0].rows for run in row.runs}
    assert len(digests) == 1
    assert all(row.outputs_agree and row.medians.unknown == 0 for row in measured[0].rows)


def test_the_labels_differ_so_that_agreeing_on_them_says_something(config, trace):
    with player(config, experts_of(trace, config.catalog)) as stage:
        labels = stage.play(trace, images_of(trace, config.catalog)).labels
    assert len(set(labels)) > 1


def test_a_row_says_what_it_ran_on(measured, generated):
    for row in measured[0].rows:
        assert row.memory == {
            "host": generated.expert_bytes,
            "host_workspace": generated.workspace_bytes,
        }
        assert row.precision == "fp32"
        assert sum(row.executors.values()) >= 1


def test_predictions_and_floors_are_there_for_the_engine_and_the_time_that_deciding_took(measured):
    measurement = measured[0]
    for row in measurement.rows:
        for run in row.runs:
            assert run.roofline_fraction == pytest.approx(run.images_per_s / run.roofline_images_per_s)
            floor_s = max(run.compute_floor_s, run.io_floor_s)
            assert run.roofline_images_per_s == pytest.approx(row.requests / floor_s)
            assert (run.predicted_images_per_s is None) == (row.policy == "naive")
            if run.predicted_images_per_s is not None:
                assert run.prediction_error == pytest.approx(run.predicted_images_per_s / run.images_per_s - 1)
                assert run.scheduling_s > 0
                assert run.busy_s > 0
    assert measurement.compute_s > 0


def test_in_a_memory_for_one_expert_each_turn_is_a_load_and_first_come_first_served_counts_them_all(config, generated):
    """Four requests of two experts in turn: four loads, of which the last three evict.

    The naive server starts full: it has the more used one of the two, and each of its loads evicts.
    """
    options = RunOptions(policies=("samba", "naive"), memory=room_for(generated, 1), with_roofline=False)
    measurement = run_line(config, IN_TURN, options)
    counted = {
        row.policy: (row.medians.switches, row.medians.loads["ssd_host"], row.medians.evictions)
        for row in measurement.rows
    }
    usage = usage_of(config, None)
    has_the_first = (-usage["cls/000"], "cls/000") < (-usage["cls/001"], "cls/001")
    loads = 3 if has_the_first else 4
    assert counted == {"samba": (4, 4, 3), "naive": (loads, loads, loads)}
    assert all(row.medians.roofline_fraction is None for row in measurement.rows)
    sizes = {manifest: manifest.stat().st_size for manifest in (config.state / "packed" / "segments").iterdir()}
    assert measurement.row("samba").medians.bytes_read == 4 * max(sizes.values())


def test_what_was_placed_before_the_trace_is_not_counted(config, generated):
    options = RunOptions(policies=("coserve",), memory=room_for(generated, 3), with_roofline=False)
    figures = run_line(config, IN_TURN, options).row("coserve").medians
    assert (figures.switches, sum(figures.loads.values()), figures.evictions, figures.bytes_read) == (0, 0, 0, 0)


def test_a_line_without_overrides_runs_its_own_policy(config):
    measurement = run_line(replace(config, policy="em"), IN_TURN, RunOptions(with_roofline=False))
    assert [row.policy for row in measurement.rows] == ["em"]
    with pytest.raises(KeyError):
        measurement.row("coserve")


def test_overrides_replace_what_the_line_says(config):
    options = RunOptions(memory={"host": 10**9, "workspace": 10**8}, precision=Precision.BF16, executors={"cpu": 2})
    changed = options.on(config)
    assert (changed.memory.host, changed.memory.workspace, changed.memory.device) == (
        10**9,
        10**8,
        config.memory.device,
    )
    assert (changed.precision, changed.executors) == (Precision.BF16, {"cpu": 2})
    assert RunOptions(precision="auto").on(changed).precision is None
    assert RunOptions().on(config) == config


def test_a_rate_that_loads_are_held_to_is_said(config, generated):
    options = RunOptions(policies=("samba",), memory=room_for(generated, 1), ssd_bytes_per_s=50e6, with_roofline=False)
    measurement = run_line(config, IN_TURN, options)
    assert measurement.is_held
    assert measurement.ssd_bytes_per_s == 50e6
    assert measurement.row("samba").medians.seconds >= measurement.row("samba").medians.bytes_read / 50e6


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (RunOptions(policies=("fastest",)), "no policy 'fastest' - choose of coserve, .*naive"),
        (RunOptions(repeats=0), "nothing to measure"),
        (RunOptions(memory={"disk": 1}), "no memory is called disk"),
    ],
)
def test_options_that_make_no_measurement_are_refused(config, options, told):
    with pytest.raises(ConfigError, match=told):
        run_line(config, IN_TURN, options)


def test_an_empty_trace_is_refused(config):
    with pytest.raises(ConfigError, match="give a trace with arrivals"):
        run_line(config, ())


def test_nothing_is_measured_beside_a_running_agent(config):
    with StateLock(config.state):
        with pytest.raises(AlreadyRunning):
            run_line(config, IN_TURN)
        run_line(config, IN_TURN, RunOptions(with_roofline=False, is_locked=True))


def test_an_expert_that_cannot_be_served_is_told_with_its_place(tmp_path):
    generated = generate_line(tmp_path / "line", RECIPE)
    (generated.line.parent / "weights" / "cls-001.safetensors").write_bytes(b"nothing")
    config = read_line(generated.line, ON_CPU)
    with pytest.raises(ConfigError, match=r"line\.yaml:\d+:\d+: experts\.cls/001: cannot be served"):
        run_line(config, IN_TURN)
    alone = (TracedArrival(0.0, expert="cls/000"),)
    assert run_line(config, alone, RunOptions(with_roofline=False)).rows[0].medians.unknown == 0


def test_an_image_that_cannot_be_decoded_is_told_before_anything_runs(config, tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(ImageUnreadable, match="broken"):
        run_line(config, (TracedArrival(0.0, component="part-000", image=broken),))


class Crashing:
    """A Decider that gives up at the first request."""

    def __init__(self, engine):
        self._engine = engine
        self.next_wakeup_s = engine.next_wakeup_s
        self.statistics = engine.statistics
        self.check_invariants = engine.check_invariants

    def handle(self, event, now):
        if isinstance(event, Arrived):
            raise ArithmeticError("gave up")
        return self._engine.handle(event, now)


def play_on(config, setup):
    with player(config, experts_of(IN_TURN, config.catalog), setup) as stage:
        return stage.play(IN_TURN, images_of(IN_TURN, config.catalog))


def test_an_agent_that_crashes_ends_the_measurement(config):
    with pytest.raises(AgentCrashed, match="ArithmeticError: gave up"):
        play_on(config, AgentOptions(decider=Crashing))


def test_requests_that_were_not_judged_are_told_with_their_reasons(config):
    """A route's UNKNOWN is one that was not judged; an expert asked directly always is UNKNOWN, but has a label."""
    played = play_on(config, AgentOptions(loop=LoopOptions(checks_invariants=True)))
    assert played.unknown_reasons(IN_TURN) == ()
    unjudged = Outcome(Verdict.UNKNOWN, None, None, (), "the expert broke")
    component = replace(IN_TURN[0], expert=None, component="part-000")
    changed = replace(played, outcomes=(unjudged, *played.outcomes[1:]))
    assert changed.unknown_reasons((component, *IN_TURN[1:])) == ("the expert broke",)
    assert changed.unknown_reasons(IN_TURN) == ("the expert broke",)


def play_for_its_work(config, options=AS_SERVED):
    with player(config, experts_of(IN_TURN, config.catalog), options) as stage:
        assert isinstance(stage, Player)
        played = stage.play(IN_TURN, images_of(IN_TURN, config.catalog))
        return stage.agent, played, work_of(played, images_of(IN_TURN, config.catalog))


def test_the_floor_counts_bytes_of_what_was_needed_and_not_there(config, generated):
    """Nothing is placed for samba: both experts; with room for all, coserve begins with both."""
    samba = RunOptions(memory=room_for(generated, 3)).on(replace(config, policy="samba"))
    agent, played, work = play_for_its_work(samba)
    assert work.experts == ("cls/000", "cls/001", "cls/000", "cls/001")
    packed = {form.expert: form.own.size_bytes for form in agent.packed.values()}
    assert io_bytes(agent, played, work) == packed["cls/000"] + packed["cls/001"]
    agent, played, work = play_for_its_work(RunOptions(memory=room_for(generated, 3)).on(config))
    assert io_bytes(agent, played, work) == 0
    assert measure_bandwidth(agent) > 0


def test_compute_is_measured_without_a_load(config):
    agent, _, work = play_for_its_work(config)
    compute = measure_compute(agent, work)
    assert (compute.loads, compute.substituted, compute.experts, compute.note) == (0, 0, 2, "")


def test_each_row_is_divided_by_the_floor_of_its_own_executors(config, trace):
    """Samba-CoE runs on one executor, whoever is named first."""
    options = RunOptions(policies=("samba", "coserve", "naive"), executors={"cpu": 2})
    measurement = run_line(config, trace, options)
    executors = {row.policy: row.executors for row in measurement.rows}
    assert (executors["samba"], executors["coserve"]) == ({"cpu": 1}, {"cpu": 2})
    floors_s = {row.policy: row.medians.compute_floor_s for row in measurement.rows}
    assert floors_s["samba"] == floors_s["naive"] != floors_s["coserve"]
    assert measurement.compute_s == pytest.approx(floors_s["samba"])


def test_an_expert_that_the_trace_does_not_use_may_be_larger_than_all_that_it_uses(config, tmp_path):
    fake = {"architecture": "fake", "labels": ["ok", "bad"], "input": {"size": [8, 8]}}
    for name, weight_bytes in (("small", 1000), ("large", 5_000_000)):
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"weight_bytes": weight_bytes, "label": "ok"}))
    document = {
        "line": "two-sizes",
        "state": "./state",
        "experts": {f"cls/{name}": fake | {"weights": f"{name}.yaml"} for name in ("small", "large")},
        "routes": {name: [{"expert": f"cls/{name}", "pass": ["ok"]}] for name in ("small", "large")},
        "memory": {"host": "64MiB"},
    }
    (tmp_path / "line.yaml").write_text(json.dumps(document))
    measurement = run_line(read_line(tmp_path / "line.yaml", ON_CPU), [TracedArrival(0.0, expert="cls/small")])
    assert measurement.rows[0].medians.unknown == 0
    assert measurement.compute_s > 0


def test_a_rate_above_the_ssd_holds_nothing_and_that_is_said(config):
    options = RunOptions(policies=("coserve",), ssd_bytes_per_s=1e15, with_roofline=False)
    measurement = run_line(config, IN_TURN, options)
    assert not measurement.is_held
    assert "more than this SSD reaches" in measurement.notes[0]


def test_where_memory_cannot_hold_all_others_of_the_same_kind_stand_in(config, generated):
    agent, _, work = play_for_its_work(config)
    small = MemorySize(10**12, int(1.5 * generated.footprint_bytes / 0.7))
    compute = measure_compute(replace(agent, box=replace(agent.box, host=small)), work)
    assert (compute.loads, compute.substituted, compute.experts) == (0, 2, 1)
    assert compute.note.startswith("2 steps ran on other experts of their kind")


def test_without_room_for_one_expert_there_is_no_floor(config):
    agent, _, work = play_for_its_work(config)
    none = replace(agent, box=replace(agent.box, host=MemorySize(10**12, 1000)))
    with pytest.raises(ConfigError, match="one expert of each kind needs"):
        measure_compute(none, work)
