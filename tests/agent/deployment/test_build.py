"""Agents of a line of fakes on an emulated device: values from its profile, and refusals to start."""

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch

from agent.commands.experts import expert_rows
from agent.commands.inspection import inspect_images
from agent.core.performance import PoolSpec
from agent.deployment.build import AS_SERVED, build_agent, deployment_of, detect_box, doubts
from agent.deployment.deployment import planned
from agent.deployment.line_change import plan_change
from agent.deployment.packed_copies import copies_of, packed_experts
from agent.deployment.profile_in_use import usage_of
from agent.device_profile.identity import decoding_sha256, identity_of, packed_sha256
from agent.device_profile.records import Allocation, ImageDecoding, LinkSpeed, PoolAllocation, UsageProfile
from agent.device_profile.store import ProfileDraft, partial_of
from agent.runtime.expert_copy import kind_name
from agent.runtime.machine.detection import detect
from agent.runtime.machine.threads import use_threads
from agent.runtime.weights.drive import staging_bytes
from experts.errors import ConfigError
from experts.expert import Precision, Verdict
from experts.packed.packing import pack_line
from experts.packed.weights import SegmentStore
from tests.agent.line_files import ThreeFakes, expert, fake, route
from tests.agent.runtime.native_threads import native_threads, on_linux
from tests.profiler.lines import kind_of

PATIENCE_S = 60.0
MIB = 2**20
FORMS = {"emulated": Precision.BF16, "cpu": Precision.FP32}


class Line(ThreeFakes):
    """Three fakes on an emulated device."""

    def __init__(self, folder):
        super().__init__(folder, device="emulated", memory={"host": "30MiB", "device": "20MiB"})

    def profiled(self, **changes):
        """Pack in both precisions, and write a profile of this box by hand with these ``changes``."""
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

    def kind_of(self, name):
        config = self.config
        (program,) = {
            each.program_sha256 for each in packed_experts(config, config.packed_folder) if each.expert == name
        }
        return kind_name(config.catalog.experts[name], program)

    def served(self, **options):
        """An agent that has judged one image of each component, with its outcomes."""
        with self.built(starts=True, **options) as (agent, outcomes, _):
            image = np.zeros((8, 8, 3), dtype=np.uint8)
            numbers = {agent.loop.submit(image, component=name): name for name in self.document["routes"]}
            assert agent.loop.wait_until_idle(PATIENCE_S)
            return agent, {name: outcomes[number] for number, name in numbers.items()}


ALLOCATION = Allocation(
    "searched in simulation",
    {"host": 30 * MIB, "device": 20 * MIB},
    (PoolAllocation("host", 29 * MIB, 1 * MIB, 3), PoolAllocation("device", 15 * MIB, 5 * MIB, 3)),
    {"emulated": 2, "cpu": 1},
)


def kind_profile(kind, processor, precision):
    times = {"K_s": 0.25, "B_s": 0.125, "max_batch": 3, "load_s": {"ssd": 0.02, "host": 0.002}}
    sizes = {"weight_bytes": MIB, "workspace_base_bytes": 64, "workspace_bytes": MIB - 64}
    cores = detect("cpu").cores
    return kind_of(kind, precision, processor=processor, threads=cores, batches=(), **times, **sizes)


@pytest.fixture
def line(tmp_path):
    return Line(tmp_path)


def test_profile_replaces_the_probe_and_sets_what_the_line_leaves_to_auto(line):
    stored = line.profiled()
    with line.built() as (agent, _, stages):
        assert "probe" not in stages
        assert agent.stored == stored
        assert [spec.processor for spec in agent.setup.executors] == ["emulated", "emulated", "cpu"]
        assert agent.setup.pools == (
            PoolSpec("host", 29 * MIB - staging_bytes(30 * MIB), 1 * MIB),
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


def test_planned_setup_equals_the_agents(line):
    stored = line.profiled()
    config = line.config
    found = planned(config, detect_box(config), stored)
    with line.built() as (agent, _, _):
        for name in ("policy", "executors", "pools", "matrix", "limits", "precisions", "broken"):
            assert getattr(found, name) == getattr(agent.setup, name)


def test_line_file_overrides_the_profile(line):
    line.profiled()
    line.document |= {"executors": {"cpu": 1}, "memory": {"host": "25MiB", "workspace": "2MiB"}}
    with line.built() as (agent, _, _):
        assert [spec.processor for spec in agent.setup.executors] == ["cpu"]
        assert agent.setup.pools[0] == PoolSpec("host", 23 * MIB - staging_bytes(25 * MIB), 2 * MIB)


# -- what is refused --


def test_each_mismatch_of_the_profile_is_named_with_its_remedy_and_the_file_stays(line):
    box = identity_of(detect_box(line.config))
    other = replace(box, cores=box.cores + 1, versions={**box.versions, "torch": "1.0"}, model="another")
    line.profiled(box=other)
    line.document["experts"]["cls/f9"] = expert("f1.yaml")
    path, before = line.config.profile_file, line.config.profile_file.read_bytes()
    packed = sorted(line.config.packed_folder.rglob("*"))
    refused = line.refusal(is_profile_strict=True).splitlines()
    assert refused == [
        f"{path} is not valid for this box as it is now:",
        f"  - the device's model is {box.model!r} now, 'another' in the profile",
        f"  - the cores are {box.cores} now, {box.cores + 1} in the profile",
        f"  - torch is {box.versions['torch']} now, 1.0 in the profile",
        f"run `coserve profile {line.folder / 'line.yaml'} --fresh`, or move {path} away to serve with a quick probe",
    ]
    assert path.read_bytes() == before
    assert sorted(line.config.packed_folder.rglob("*")) == packed


@pytest.mark.parametrize("is_damaged", [False, True])
def test_missing_or_foreign_profile_is_replaced_by_a_probe_with_an_alarm(line, is_damaged):
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


def test_changed_or_new_experts_run_in_fp32_and_the_profile_holds_for_others(line):
    """An expert of an unmeasured kind is probed; proofs of unchanged experts stay."""
    line.profiled(kinds=[*line.profiled().kinds, kind_profile(line.kind_of("cls/f0"), "emulated", "fp32")])
    fake(line.folder / "f1.yaml", 2_000_000)
    line.document["experts"]["cls/f9"] = expert("f0.yaml")
    line.document["routes"]["c9"] = route("cls/f9")
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
    """An expert with other weights, and a new expert of a timed kind, get images in full."""
    kinds = [*line.profiled().kinds, kind_profile(line.kind_of("cls/f0"), "emulated", "fp32")]
    decodings = [decoding_of(line, name) for name in ("cls/f0", "cls/f1")]
    line.profiled(kinds=kinds, decodings=[*decodings, replace(decodings[0], expert="cls/f9")])
    fake(line.folder / "f1.yaml", 2_000_000)
    line.document["experts"]["cls/f9"] = expert("f0.yaml")
    with line.built() as (agent, _, _):
        assert agent.loop.scaled == {"cls/f0"}
        rows = agent.setup.matrix.experts["emulated"]
        assert {name for name, row in rows.items() if "reduced" in row.prepared.name} == {"cls/f0"}


def decoding_of(line, name, form="bf16"):
    bound = decoding_sha256(line.config.catalog.graph, line.config.catalog.experts[name], form)
    return ImageDecoding(name, 4, 1.0, 2.0, 1.0, 4, 0, 0.0, 0.02, "of", bound_sha256=bound)


def test_smaller_images_are_for_the_routes_and_the_form_that_they_were_proven_with(line):
    """A proof of another form, and one from before proofs were bound, are for no expert that is served."""
    line.profiled()
    unbound = replace(decoding_of(line, "cls/f1"), bound_sha256="")
    line.profiled(decodings=[decoding_of(line, "cls/f0"), unbound, decoding_of(line, "cls/f2", "fp16")])
    with line.built(starts=True) as (agent, _, _):
        assert agent.loop.scaled == {"cls/f0"}
        assert plan_change(agent, line.config, lambda *_: None).replaced == ()
        line.document["routes"]["c0"][0]["min_score"] = 0.5
        changed = plan_change(agent, line.config, lambda *_: None)
        assert changed.replaced == ("cls/f0",)
        agent.loop.change_line(changed.event, changed.copies)
        assert agent.loop.scaled == frozenset()
    with line.built() as (agent, _, _):
        assert agent.loop.scaled == frozenset()


@on_linux
def test_building_an_agent_leaves_no_thread_team_on_the_executors_cores(line):
    """A thread team of the builder makes executors up to twice as slow: see ``agent.runtime.machine.threads``."""

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


def test_packing_runs_operators_on_one_thread_and_restores_their_number(line):
    """In a team, thousands of small operators wait for a thread without a core where another process is busy."""
    seen = []

    def progress(stage, *_):
        seen.append((stage, torch.get_num_threads()))

    def build():
        use_threads(3)
        agent = build_agent(line.config, lambda *_: None, progress)
        agent.start()
        agent.stop()
        return torch.get_num_threads()

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(build).result() == 3
    assert {count for stage, count in seen if stage == "pack"} == {1}


def test_kind_that_cannot_run_is_quarantined(line):
    stored = line.profiled()
    kinds = {kind.kind: kind for kind in stored.kinds}
    _, *rest = kinds
    kept = [kind for kind in stored.kinds if kind.kind in rest]
    line.profiled(kinds=kept, precisions={key: form for key, form in stored.precisions.items() if key[0] in rest})
    with line.built() as (agent, _, _):
        assert len(agent.setup.broken) == len(kinds) - len(rest)
        assert all("could be run when the box was profiled" in reason for reason in agent.setup.broken.values())


def test_unfinished_profile_is_ignored_and_logged_once(line, caplog):
    config = line.config
    with ProfileDraft.open(config.profile_file, "test", identity_of(detect_box(config))):
        pass
    with caplog.at_level(logging.INFO), line.built() as (agent, _, stages):
        assert agent.stored is None
        assert "probe" in stages
    assert caplog.text.count("profile_not_finished") == 1
    assert partial_of(config.profile_file).exists()


# -- usage and precision --


def test_computed_usage_is_computed_again_and_measured_usage_is_kept(line):
    line.document["boards"] = {"main": {"components": {"c1": 1, "c2": 3}}}
    computed = UsageProfile({"cls/f0": 0.1}, {"cls/f0": 0.5}, "computed from quantities")
    stored = line.profiled(usage=computed)
    assert usage_of(line.config, stored) == {"cls/f0": 0.75, "cls/f1": 0.25, "cls/f2": 0.375}
    served = replace(stored, usage=replace(computed, origin="served", requests=9))
    assert usage_of(line.config, served) == {"cls/f0": 0.1, "cls/f1": 0.0, "cls/f2": 0.0}
    assert usage_of(line.config, None) == {"cls/f0": 0.75, "cls/f1": 0.25, "cls/f2": 0.75}
    assert {row["expert"]: row["usage"] for row in expert_rows(line.config)}["cls/f2"] == 0.375


# -- plans --


def test_plan_names_experts_that_are_not_packed_or_not_profiled(line):
    stored = line.profiled()
    line.document["experts"]["cls/f9"] = expert("f2.yaml")
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


def test_profile_of_the_whole_box_holds_beside_workers_on_it(tmp_path):
    line = Line(tmp_path)
    line.profiled()
    line.document |= {"cluster": {"workers": [{"count": 1}]}, "executors": {"emulated": 1}}
    plan = deployment_of(line.config, line.config.packed_folder, AS_SERVED)
    assert plan.profile is not None
    assert (plan.alarms, plan.box.cores) == ((), max(detect("cpu").cores // 2, 1))
