"""Agents of a line of fakes on an emulated device: what they take from its profile, and when they refuse to start."""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml

from agent.commands.experts import expert_rows
from agent.commands.inspection import inspect_images
from agent.config import read_line
from agent.core.performance import ExecutorSpec, PoolSpec
from agent.deployment.build import AS_SERVED, AgentOptions, build_agent, detect_box, doubts, groundwork_of
from agent.deployment.engine_setup import Given, planned
from agent.deployment.packed_copies import copies_of, lying_packed
from agent.deployment.profile_in_use import precision_of, usage_of
from agent.device_profile.identity import identity_of, packed_sha256
from agent.device_profile.records import Allocation, ImageDecoding, KindProfile, LinkSpeed, PoolAllocation, UsageProfile
from agent.device_profile.store import ProfileDraft, partial_of
from agent.runtime.expert_copy import kind_name
from agent.runtime.machine.detection import detect
from agent.runtime.machine.threads import use_threads
from experts.backends.onednn import operators as onednn_operators
from experts.errors import ConfigError, MemoryExceeded
from experts.expert import Precision, Verdict
from experts.packed.packing import forget_other_forms, pack_line
from experts.packed.weights import SegmentStore
from tests.agent.runtime.native_threads import native_threads, on_linux

PATIENCE_S = 60.0
MIB = 2**20
FORMS = {"emulated": Precision.BF16, "cpu": Precision.FP32}


class Line:
    """Fakes cls/f0 to cls/f2 with a route each, c2 with two steps, on an emulated device."""

    def __init__(self, folder):
        self.folder = folder
        for number in range(3):
            self.declare(number, 1_000_000 + number)  # three programs, so three kinds
        self.document = {
            "line": "test",
            "state": "./state",
            "experts": {f"cls/f{number}": self._expert(number) for number in range(3)},
            "routes": {f"c{number}": [{"expert": f"cls/f{number}", "pass": ["ok"]}] for number in range(2)}
            | {"c2": [{"expert": "cls/f0", "pass": ["ok"]}, {"expert": "cls/f2", "pass": ["ok"]}]},
            "device": "emulated",
            "memory": {"host": "30MiB", "device": "20MiB"},
        }

    def _expert(self, number):
        weights = f"f{number}.yaml"
        return {"architecture": "fake", "weights": weights, "labels": ["ok", "bad"], "input": {"size": [8, 8]}}

    def declare(self, number, weight_bytes):
        content = {"weight_bytes": weight_bytes, "label": "ok", "workspace_bytes": 1000}
        (self.folder / f"f{number}.yaml").write_text(json.dumps(content))

    @property
    def config(self):
        (self.folder / "line.yaml").write_text(yaml.safe_dump(self.document))
        return read_line(self.folder / "line.yaml", {})

    def profiled(self, **changes):
        """Pack in both precisions, and write a profile of this box by hand; ``changes`` are of its parts."""
        config, box = self.config, detect_box(self.config)
        with closing(SegmentStore(config.packed_folder)) as segments:
            report = pack_line(config.catalog.experts.values(), lambda _: set(FORMS.values()), segments)
        every = {processor: dict.fromkeys(report.packed, form) for processor, form in FORMS.items()}
        copies = copies_of(config, every, report.packed)
        kinds = {(copy.kind, p): copy.packed.precision for p, listed in copies.items() for copy in listed}
        parts = {
            "kinds": [kind_profile(*key, precision) for key, precision in kinds.items()],
            "precisions": kinds,
            "usage": UsageProfile({"cls/f0": 0.6, "cls/f1": 0.4}, {"cls/f0": 0.5}, "served", 100),
            "allocation": ALLOCATION,
            "speedups": {"cpu": (1.0, 1.5), "emulated": (1.0, 1.5, 1.5)},
            "box": identity_of(box),
        } | changes
        with ProfileDraft.open(config.profile_file, config.line, parts["box"], fresh=True) as draft:
            draft.save_links([LinkSpeed("ssd", 1e8), LinkSpeed("host", 1e9)])
            for kind in parts["kinds"]:
                draft.save_kind(kind)
            for processor, speedups in parts["speedups"].items():
                draft.save_speedups(processor, speedups)
            draft.save_precisions(parts["precisions"])
            packed = [packed for forms in report.packed.values() for packed in forms.values()]
            draft.save_packed({(each.expert, str(each.precision)): packed_sha256(each) for each in packed})
            draft.save_decodings(parts.get("decodings", ()))
            draft.save_usage(parts["usage"])
            draft.save_allocation(parts["allocation"])
            return draft.finish()

    def kind_name(self, expert):
        config = self.config
        (program,) = {
            each.program_sha256 for each in lying_packed(config, config.packed_folder) if each.expert == expert
        }
        return kind_name(config.catalog.experts[expert], program)

    def forget(self, expert, form):
        """An expert lies packed in its other form only."""
        kept = {name: set(FORMS.values()) - ({form} if name == expert else set()) for name in self.document["experts"]}
        with closing(SegmentStore(self.config.packed_folder)) as segments:
            forget_other_forms(kept, segments)

    @contextmanager
    def built(self, **options):
        """An agent, its outcomes by request and the stages it went through; stopped in the end."""
        outcomes, stages = {}, []
        agent = build_agent(
            self.config, outcomes.__setitem__, lambda stage, *_: stages.append(stage), AgentOptions(**options)
        )
        agent.start()
        try:
            yield agent, outcomes, stages
        finally:
            agent.stop()

    def served(self, **options):
        """An agent that has judged one image of each component; with its outcomes."""
        with self.built(**options) as (agent, outcomes, _):
            image = np.zeros((8, 8, 3), dtype=np.uint8)
            numbers = {agent.loop.submit(image, component=name): name for name in self.document["routes"]}
            assert agent.loop.wait_until_idle(PATIENCE_S)
            return agent, {name: outcomes[number] for number, name in numbers.items()}

    def refusal(self, **options):
        with pytest.raises(ConfigError) as caught:
            build_agent(replace(self.config, **options), lambda *_: None, lambda *_: None)
        return str(caught.value)


ALLOCATION = Allocation(
    "searched in simulation",
    {"host": 30 * MIB, "device": 20 * MIB},
    (PoolAllocation("host", 29 * MIB, 1 * MIB, 3), PoolAllocation("device", 15 * MIB, 5 * MIB, 3)),
    {"emulated": 2, "cpu": 1},
)


def kind_profile(kind, processor, precision):
    return KindProfile(
        kind=kind, architecture="fake", processor=processor, precision=str(precision),
        threads=detect("cpu").cores, K_s=0.25, B_s=0.125, fit_error=0.0, max_batch=3, weight_bytes=MIB,
        workspace_base_bytes=64, workspace_bytes=MIB - 64, load_s={"ssd": 0.02, "host": 0.002}, batches=(),
        samples="synthetic",
    )  # fmt: skip


@pytest.fixture
def line(tmp_path):
    return Line(tmp_path)


def test_with_a_profile_nothing_is_probed_and_everything_that_is_auto_is_the_profile_s(line):
    stored = line.profiled()
    with line.built() as (agent, _, stages):
        assert "probe" not in stages
        assert agent.stored == stored
        assert [spec.processor for spec in agent.setup.executors] == ["emulated", "emulated", "cpu"]
        assert agent.setup.pools == (
            PoolSpec("host", 29 * MIB, 1 * MIB),
            PoolSpec("device", 15 * MIB, 5 * MIB, cache="host", is_one_piece=True),
        )
        assert {processor: set(column.values()) for processor, column in agent.setup.precisions.items()} == {
            processor: {form} for processor, form in FORMS.items()
        }
        rows = agent.setup.matrix.experts
        assert rows["emulated"]["cls/f0"].copy == "cls/f0@bf16"
        assert rows["cpu"]["cls/f0"].copy == "cls/f0@fp32"
        assert rows["cpu"]["cls/f0"].performance.max_batch == 3
        assert agent.setup.matrix.usage == {"cls/f0": 0.6, "cls/f1": 0.4, "cls/f2": 0.0}
        assert agent.setup.broken == {}


def test_an_agent_with_a_profile_judges_as_one_without(line):
    without = line.served()[1]
    line.profiled()
    agent, outcomes = line.served()
    assert agent.stored is not None
    assert {name: outcome.verdict for name, outcome in outcomes.items()} == dict.fromkeys(outcomes, Verdict.OK)
    assert {name: outcome.label for name, outcome in outcomes.items()} == {
        name: outcome.label for name, outcome in without.items()
    }


def test_what_is_planned_is_what_an_agent_decides_with(line):
    stored = line.profiled()
    config = line.config
    found = planned(config, detect_box(config), stored)
    with line.built() as (agent, _, _):
        for name in ("policy", "executors", "pools", "matrix", "limits", "precisions", "broken"):
            assert getattr(found, name) == getattr(agent.setup, name)


def test_the_line_file_comes_before_the_profile(line):
    line.profiled()
    line.document |= {"executors": {"cpu": 1}, "memory": {"host": "25MiB", "workspace": "2MiB"}}
    with line.built() as (agent, _, _):
        assert [spec.processor for spec in agent.setup.executors] == ["cpu"]
        assert agent.setup.pools[0] == PoolSpec("host", 23 * MIB, 2 * MIB)


def test_what_the_caller_gives_comes_before_both(line):
    stored = line.profiled()
    line.config.profile_file.unlink()
    executors = (ExecutorSpec(0, "cpu", "host"),)
    pools = (PoolSpec("host", 9 * MIB, MIB), PoolSpec("device", 8 * MIB, MIB, cache="host"))
    with line.built(profile=stored, given=Given(executors, pools)) as (agent, _, stages):
        assert (agent.setup.executors, agent.setup.pools, agent.stored) == (executors, pools, stored)
        assert "probe" not in stages
    with line.built(profile=None, given=Given(executors, pools)) as (agent, _, stages):
        assert (agent.setup.executors, agent.setup.pools, agent.stored) == (executors, pools, None)
        assert "probe" in stages
    tiny = (PoolSpec("host", 1000, MIB), PoolSpec("device", 1000, MIB, cache="host"))
    with pytest.raises(MemoryExceeded):
        build_agent(
            line.config, lambda *_: None, lambda *_: None, AgentOptions(profile=stored, given=Given(executors, tiny))
        )


def test_whoever_decides_may_be_somebody_else(line):
    line.profiled()
    decided = []

    class Watched:
        def __init__(self, engine):
            self.next_wakeup_s = engine.next_wakeup_s
            self.statistics = engine.statistics
            self.check_invariants = engine.check_invariants
            self._handle = engine.handle

        def handle(self, event, now):
            decided.append(type(event).__name__)
            return self._handle(event, now)

    line.served(decider=Watched)
    assert decided[0] == "Started"
    assert decided.count("Arrived") == 3


# -- what is refused --


def test_every_mismatch_is_told_with_its_remedy_and_the_file_stays_as_it_is(line):
    box = identity_of(detect_box(line.config))
    other = replace(box, cores=box.cores + 1, versions={**box.versions, "torch": "1.0"}, model="another")
    line.profiled(box=other)
    line.document["experts"]["cls/f9"] = line._expert(1)
    path, before = line.config.profile_file, line.config.profile_file.read_bytes()
    packed = sorted(line.config.packed_folder.rglob("*"))
    refused = line.refusal(is_profile_strict=True).splitlines()
    assert refused == [
        f"{path} does not hold for this box as it is now:",
        f"  - the device's model is {box.model!r} now, 'another' in the profile",
        f"  - the cores are {box.cores} now, {box.cores + 1} in the profile",
        f"  - torch is {box.versions['torch']} now, 1.0 in the profile",
        f"run `coserve profile {line.folder / 'line.yaml'} --fresh`, or move {path} away to serve with a quick probe",
    ]
    assert path.read_bytes() == before
    assert sorted(line.config.packed_folder.rglob("*")) == packed


@pytest.mark.parametrize("is_damaged", [False, True])
def test_without_a_profile_of_this_box_it_probes_and_says_so(line, is_damaged):
    box = identity_of(detect_box(line.config))
    line.profiled(box=replace(box, versions={**box.versions, "torch": "1.0"}))
    if is_damaged:
        line.config.profile_file.write_bytes(b"rubbish")
    with line.built() as (agent, _, stages):
        assert "probe" in stages
        assert agent.stored is None
        (alarm,) = agent.alarms
    assert alarm.startswith("device profile not used, served by a quick probe: ")
    assert ("is not a SQLite file" if is_damaged else "1.0 in the profile") in alarm
    assert "coserve profile" in alarm


def test_experts_that_changed_or_came_are_served_in_fp32_and_the_profile_stands_for_the_others(line):
    """What they take is measured where their kind was not; what was proven of the others stays."""
    line.profiled(kinds=[*line.profiled().kinds, kind_profile(line.kind_name("cls/f0"), "emulated", "fp32")])
    line.declare(1, 2_000_000)
    line.document["experts"]["cls/f9"] = line._expert(0)
    line.document["routes"]["c9"] = [{"expert": "cls/f9", "pass": ["ok"]}]
    agent, outcomes = line.served()
    assert agent.stored is not None
    assert {outcome.verdict for outcome in outcomes.values()} == {Verdict.OK}
    assert agent.setup.precisions["emulated"] == {
        "cls/f0": "bf16", "cls/f1": "fp32", "cls/f2": "bf16", "cls/f9": "fp32",
    }  # fmt: skip
    rows = agent.setup.matrix.experts["emulated"]
    assert rows["cls/f9"].performance == rows["cls/f0"].performance  # its kind's, as profiled
    assert rows["cls/f1"].performance.K_s != rows["cls/f0"].performance.K_s  # of a kind that was not: probed
    (alarm,) = agent.alarms
    assert "expert cls/f1 in fp32 has other packed weights than those that were profiled (and 1 more: cls/f9)" in alarm
    assert "line.yaml --expert cls/f1`, then reload" in alarm
    told = " ".join(doubts(line.config, agent.stored))
    assert "cls/f1" in told
    assert "cls/f9" in told
    assert inspect_images(line.config, [], "c0", lambda *_: None) == []


def test_smaller_images_are_for_the_weights_that_they_were_proven_with(line):
    """One with other weights, and one of a kind that is timed: the Engine reckons with what they are shown."""
    proven = ImageDecoding("cls/f0", 4, 1.0, 2.0, 1.0, 4, 0, 0.0, 0.02, "of")
    kinds = [*line.profiled().kinds, kind_profile(line.kind_name("cls/f0"), "emulated", "fp32")]
    decodings = [replace(proven, expert=name) for name in ("cls/f0", "cls/f1", "cls/f9")]
    line.profiled(kinds=kinds, decodings=decodings)
    line.declare(1, 2_000_000)
    line.document["experts"]["cls/f9"] = line._expert(0)
    with line.built() as (agent, _, _):
        assert agent.loop._workshop.preparation.scaled == {"cls/f0"}
        rows = agent.setup.matrix.experts["emulated"]
        assert {name for name, row in rows.items() if "reduced" in row.prepared.name} == {"cls/f0"}


def test_a_broken_expert_is_quarantined_and_the_profile_holds_for_the_others(line):
    line.profiled()
    (line.folder / "f1.yaml").unlink()
    agent, outcomes = line.served()
    assert agent.setup.broken.keys() == {"cls/f1"}
    assert [outcomes[name].verdict for name in ("c0", "c1")] == [Verdict.OK, Verdict.UNKNOWN]


def test_what_experts_are_copies_of_is_made_before_it_starts_and_told(line):
    line.profiled()
    told = []
    agent = build_agent(line.config, lambda *_: None, lambda *step: told.append(step))
    agent.segments.close()
    assert [step for step in told if step[0] == "templates"] == [("templates", number, 6) for number in range(1, 7)]
    assert len(agent.templates.held) == 6  # three programs, on either processor in its precision
    assert agent.templates.failed == {}


@on_linux
def test_whoever_builds_and_starts_an_agent_leaves_its_executors_the_cores(line):
    """A team on the builder's thread makes them take up to twice as long: see ``agent.runtime.machine.threads``."""

    def with_a_team(*_):
        torch.ones(512, 512).mm(torch.ones(512, 512))  # as packing what is larger than fakes does

    def build_and_start():
        use_threads(3)
        before = native_threads()
        with_a_team()
        assert native_threads() == before + 2
        agent = build_agent(line.config, lambda *_: None, with_a_team)
        agent.start()
        try:
            return native_threads() - before
        finally:
            agent.stop()

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(build_and_start).result() == 0


def test_a_program_that_cannot_be_read_is_found_by_the_load(line, caplog):
    """It alone knows whether that passes; the expert is UNKNOWN meanwhile, and no other waits for it."""
    line.profiled()
    config = line.config
    with closing(SegmentStore(config.packed_folder)) as segments:
        packed = next(each for each in lying_packed(config, segments.directory) if each.expert == "cls/f1")
        program = segments.program_path(packed.program_sha256)
    program.write_bytes(program.read_bytes()[::-1])
    agent, outcomes = line.served()
    assert agent.setup.broken == {}
    assert len(agent.templates.held) == 4
    assert "template_left_to_load copy=cls/f1" in caplog.text
    assert {name: outcome.verdict for name, outcome in outcomes.items()} == {
        "c0": Verdict.OK, "c1": Verdict.UNKNOWN, "c2": Verdict.OK,
    }  # fmt: skip


def test_a_kind_that_could_not_be_run_is_quarantined(line):
    stored = line.profiled()
    kinds = {kind.kind: kind for kind in stored.kinds}
    _, *rest = kinds
    kept = [kind for kind in stored.kinds if kind.kind in rest]
    line.profiled(kinds=kept, precisions={key: form for key, form in stored.precisions.items() if key[0] in rest})
    with line.built() as (agent, _, _):
        assert len(agent.setup.broken) == len(kinds) - len(rest)
        assert all("could be run when the box was profiled" in reason for reason in agent.setup.broken.values())


def test_a_processor_without_times_is_probed(line):
    stored = line.profiled()
    on_cpu = [kind for kind in stored.kinds if kind.processor == "cpu"]
    chosen = {key: form for key, form in stored.precisions.items() if key[1] == "cpu"}
    line.profiled(kinds=on_cpu, precisions=chosen)
    with line.built() as (agent, _, stages):
        assert "probe" in stages
        assert agent.setup.matrix.experts["emulated"].keys() == agent.setup.matrix.experts["cpu"].keys()
    line.document["executors"] = {"cpu": 1}
    with line.built() as (agent, _, _):
        assert agent.setup.broken == {}


def test_a_profile_that_is_not_finished_is_left_aside_and_told_once(line, caplog):
    config = line.config
    with ProfileDraft.open(config.profile_file, "test", identity_of(detect_box(config))):
        pass
    with caplog.at_level(logging.INFO), line.built() as (agent, _, stages):
        assert agent.stored is None
        assert "probe" in stages
    assert caplog.text.count("profile_not_finished") == 1
    assert partial_of(config.profile_file).exists()


# -- what is scaled and what falls back --


def test_other_cpu_executors_than_were_profiled_are_scaled_and_told(line, caplog):
    line.document |= {"device": "cpu", "executors": {"cpu": 2}}
    box = detect_box(line.config)
    stored = line.profiled()
    kinds = [kind for kind in stored.kinds if kind.processor == "cpu"]
    chosen = {key: form for key, form in stored.precisions.items() if key[1] == "cpu"}
    allocation = Allocation("casual", {}, (), {"cpu": 1})
    line.profiled(kinds=kinds, precisions=chosen, allocation=allocation, box=identity_of(box))
    with caplog.at_level(logging.INFO), line.built() as (agent, _, _):
        performance = agent.setup.matrix.experts["cpu"]["cls/f0"].performance
    assert (performance.K_s, performance.B_s) == (pytest.approx(0.25 * 2 / 1.5), pytest.approx(0.125 * 2 / 1.5))
    assert caplog.text.count("cpu_times_scaled processor=cpu factor=1.33 executors=2") == 1


def test_a_searched_split_without_room_for_the_largest_expert_gives_way_to_the_casual_rule(line, caplog):
    shares = (PoolAllocation("device", 0, 20 * MIB, 0),)
    kinds = [replace(kind, max_batch=24) for kind in line.profiled().kinds]
    line.profiled(allocation=replace(ALLOCATION, pools=shares), kinds=kinds)
    with line.built() as (agent, _, _):
        assert agent.setup.pools[1].expert_bytes + agent.setup.pools[1].workspace_bytes == 20 * MIB
        assert agent.setup.pools[1].expert_bytes > 14 * MIB
    assert "searched_workspace_left_out pool=device" in caplog.text


# -- usage and precision --


def test_computed_usage_is_computed_again_and_other_usage_is_taken(line):
    line.document["boards"] = {"main": {"components": {"c1": 1, "c2": 3}}}
    computed = UsageProfile({"cls/f0": 0.1}, {"cls/f0": 0.5}, "computed from quantities")
    stored = line.profiled(usage=computed)
    assert usage_of(line.config, stored) == {"cls/f0": 0.75, "cls/f1": 0.25, "cls/f2": 0.375}
    served = replace(stored, usage=replace(computed, origin="served", requests=9))
    assert usage_of(line.config, served) == {"cls/f0": 0.1, "cls/f1": 0.0, "cls/f2": 0.0}
    assert usage_of(line.config, None) == {"cls/f0": 0.75, "cls/f1": 0.25, "cls/f2": 0.75}
    assert {row["expert"]: row["usage"] for row in expert_rows(line.config)}["cls/f2"] == 0.375


def test_a_precision_is_the_line_s_or_the_profile_s_or_fp32(line):
    stored = replace(line.profiled(), precisions={("resnet18 64x64 imagenet", "cpu"): "onnxruntime"})
    line.document["experts"]["cls/r"] = {
        "architecture": "resnet18",
        "weights": "w.safetensors",
        "labels": ["ok", "bad"],
        "input": {"size": [64, 64]},
    }
    auto = line.config
    line.document["precision"] = "onnxruntime"
    given = line.config

    def chosen(config, processor, profile, expert="cls/r"):
        return precision_of(config, expert, processor, profile, None)

    assert chosen(auto, "cpu", stored) is Precision.ONNXRUNTIME
    assert chosen(auto, "cuda", stored) is Precision.FP32
    assert chosen(auto, "cpu", None) is Precision.FP32
    assert chosen(given, "cpu", None) is Precision.ONNXRUNTIME
    assert chosen(given, "cuda", None) is Precision.FP32
    assert chosen(given, "cpu", stored, "cls/f0") is Precision.FP32


def test_a_form_that_this_box_lacks_makes_way_for_the_same_numbers_and_that_is_told(line, monkeypatch, caplog):
    line.document["experts"]["cls/r"] = {
        "architecture": "resnet18",
        "weights": "w.safetensors",
        "labels": ["ok", "bad"],
        "input": {"size": [64, 64]},
    }
    line.document["precision"] = "onednn-bf16"

    def forms():
        return groundwork_of(line.config, line.config.packed_folder, AS_SERVED).precisions["cpu"]

    monkeypatch.setattr(onednn_operators, "why_absent", lambda dtype: None)
    assert forms()["cls/r"] is Precision.ONEDNN_BF16
    assert caplog.messages == []
    monkeypatch.setattr(onednn_operators, "why_absent", lambda dtype: "bf16 path needs avx512bw")
    assert forms() == {"cls/r": Precision.BF16} | {f"cls/f{number}": Precision.FP32 for number in range(3)}
    told = (
        "form_absent precision=onednn-bf16 runs_as=bf16 reason=bf16 path needs avx512bw "
        "advice=write `precision: auto` or fp32"
    )
    assert caplog.messages == [told]
    assert precision_of(line.config, "cls/r", "cuda", None, None) is Precision.BF16


# -- plans --


def test_a_plan_takes_other_settings_and_reads_no_weights(line):
    stored = line.profiled()
    config, box = line.config, detect_box(line.config)
    for file in (config.packed_folder / "segments").iterdir():
        file.unlink()
    found = planned(config.having(policy="samba", memory={"host": 12 * MIB, "workspace": 2 * MIB}), box, stored)
    assert [spec.processor for spec in found.executors] == ["emulated"]
    assert [(pool.expert_bytes, pool.workspace_bytes) for pool in found.pools] == [
        (10 * MIB, 2 * MIB),
        (18 * MIB, 2 * MIB),
    ]
    assert [spec.processor for spec in planned(config.having(executors={"cpu": 2}), box, stored).executors] == [
        "cpu"
    ] * 2
    specs = (ExecutorSpec(0, "cpu", "host"),)
    shares = (PoolSpec("host", 9 * MIB, MIB), PoolSpec("device", 9 * MIB, MIB, cache="host"))
    given = planned(config, box, stored, Given(specs, shares))
    assert (given.executors, given.pools, given.limits.pools) == (specs, shares, shares)
    with pytest.raises(ConfigError, match="no memory is called disk"):
        config.having(memory={"disk": 1})


def test_a_plan_names_experts_that_are_not_packed_or_not_profiled(line):
    stored = line.profiled()
    line.document["experts"]["cls/f9"] = line._expert(2)
    config = line.config
    with pytest.raises(
        ConfigError, match=r"experts\.cls/f9: not packed in fp32 - run `coserve profile .*which packs it"
    ):
        planned(config, detect_box(config), stored)
    found = planned(config, detect_box(config), stored, without={"cls/f9": "broken"})
    assert found.broken == {"cls/f9": "broken"}
    strange = replace(stored, kinds=stored.kinds[:2], packed={})
    with pytest.raises(ConfigError, match=r"experts\.cls/f\d: the device profile has no times of its kind"):
        planned(config, detect_box(config), strange, without={"cls/f9": "broken"})


def test_a_form_is_asked_for_only_where_the_profile_has_a_choice_for_the_kind(line):
    """The kind of cls/f0 fails on the device, and bf16 was chosen for it on the CPU: nothing runs it in fp32."""
    kinds, failing = line.profiled().kinds, line.kind_name("cls/f0")
    able = [kind for kind in kinds if kind.kind != failing]
    stored = line.profiled(
        kinds=[*able, kind_profile(failing, "cpu", Precision.BF16)],
        precisions={(kind.kind, kind.processor): kind.precision for kind in able} | {(failing, "cpu"): "bf16"},
    )
    line.forget("cls/f0", Precision.FP32)
    found = planned(line.config, detect_box(line.config), stored)
    assert found.matrix.experts["emulated"].keys() == {"cls/f1", "cls/f2"}
    assert {name: row.copy for name, row in found.matrix.experts["cpu"].items()} == {
        "cls/f0": "cls/f0@bf16",
        "cls/f1": "cls/f1@fp32",
        "cls/f2": "cls/f2@fp32",
    }
    assert found.broken == {}
    (reason,) = planned(line.config.having(executors={"emulated": 1}), detect_box(line.config), stored).broken.items()
    assert reason == ("cls/f0", f"no expert of its kind ({failing}) could be run when the box was profiled")
    agent, outcomes = line.served()
    assert agent.setup.matrix == found.matrix
    assert {outcome.verdict for outcome in outcomes.values()} == {Verdict.OK}
