"""``coserve profile`` from start to end on real files, processes and engines.

No assertion depends on speed: where a test needs one precision to be the fastest, it seeds the draft.
"""

import json
import math
import re
import signal
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file

from agent.deployment.build import detect_box
from agent.deployment.line_change import plan_change
from agent.device_profile.identity import identity_of
from agent.device_profile.records import SOURCE, BatchTimes, UsageOrigin
from agent.device_profile.store import ProfileDraft, partial_of, read_profile
from agent.records.database import state_held
from agent.records.result_writer import ResultStore
from agent.runtime.measuring import batches
from agent.runtime.measuring.batches import BatchOptions
from experts.backends.capabilities import capabilities_of, supposed
from experts.backends.forms import FORMS
from experts.backends.onednn import operators
from experts.backends.vision.classifier import write_random_weights
from experts.errors import ConfigError
from profiler.allocation.search import SEARCHED_IN_SIMULATION, SEARCHED_ON_ENGINE, SearchOptions
from profiler.allocation.step import CASUAL, ENGINE, SIMULATE
from profiler.microbench import agreement, graphs, kinds
from profiler.microbench.agreement import candidate_precisions
from profiler.profiling import profile_line as profiling
from profiler.profiling.profile_line import ProfilingOptions, learn_usage, profile_line
from tests.agent.line_files import LineFile, fake, fakes
from tests.commands import coserve
from tests.experts.played_graphs import PlayedRecorder
from tests.lines import result
from tests.pictures import saved
from tests.profiler.lines import as_fast, built_agent, files_up_to

DEADLINE_S = 120.0
SHORT = BatchOptions(sizes=(1, 2), repeats=1, limit_s=0.5, peak_runs=1)
FEW_RUNS = SearchOptions(engine_requests=12)
SLOW = dict.fromkeys(("fp16", "onnxruntime", "onednn-fp32", "onednn-bf16"), 1.0)
COMPONENTS = 3


class Line(LineFile):
    """Fakes cls/f0 to cls/f2 with a route each; three kinds, as each declares another size."""

    def __init__(self, folder):
        folder.mkdir(exist_ok=True)
        boards = {"main": {"components": {"c0": 3, "c1": 2, "c2": 1}, "takt_s": 5.0}}
        sections = {"boards": boards, "memory": {"host": "512MiB"}, "precision": "fp32"}
        super().__init__(folder, **fakes(COMPONENTS, "f{}.yaml") | sections)
        for number in range(COMPONENTS):
            self.declare(number)

    def declare(self, number, weight_bytes=300_000, **declared):
        fake(self.folder / f"f{number}.yaml", weight_bytes + number, **declared)

    @property
    def path(self):
        return self.config.profile_file

    @property
    def identity(self):
        return identity_of(detect_box(self.config))

    def profiled(self, stages=None, **options):
        found = {"allocation": CASUAL, "batches": SHORT} | options
        return profile_line(self.config, ProfilingOptions(**found), stage_recorder(stages))

    def refusal(self, **options):
        """Reason of a refusal before anything is measured or packed."""
        stages = []
        with pytest.raises(ConfigError) as caught:
            self.profiled(stages, **options)
        assert not [stage for stage in stages if stage != "pack"]
        return str(caught.value)

    def seed(self, kinds=(), **seconds):
        """Kinds as a killed run left them, as fast as is said here of each precision: none is left to measure.

        Those of the finished profile, with all else that it holds, or these alone.
        """
        with ProfileDraft.open(self.path, "test", self.identity) as draft:
            for kind in kinds or draft.kinds():
                draft.save_kind(as_fast(kind, seconds[kind.precision]))

    def crops(self, name="crops", **sizes):
        """A sample folder: two images of each component, or as many as are given."""
        for component in self.document["routes"]:
            for number in range(sizes.get(component, 2)):
                saved(self.folder / name / component / "ok" / f"{number}.png", (40 * number, 100, 30))
        return self.folder / name

    def classify(self, *numbers):
        """Make these experts squeezenets of one kind."""
        for number in numbers:
            write_random_weights(self.weights(number), "squeezenet1_1", 2, seed=number)
            expert = {"architecture": "squeezenet1_1", "weights": self.weights(number).name}
            self.document["experts"][f"cls/f{number}"] |= expert | {"input": {"size": [64, 64]}}

    def retrain(self, number):
        write_random_weights(self.weights(number), "squeezenet1_1", 2, seed=9)

    def without(self, *numbers):
        """Take components off the line, and its boards; returns their experts and routes."""
        self.document.pop("boards", None)
        return [(self.document["experts"].pop(f"cls/f{n}"), self.document["routes"].pop(f"c{n}")) for n in numbers]

    def weights(self, number):
        return self.folder / f"s{number}.safetensors"

    def overflow(self, number, weights=1e12, biases=1e12):
        """Finite weights whose answers are not: it can be packed, but not in fp16, and not be run."""
        tensors = load_file(self.weights(number))
        scaled = {name: each * (biases if name.endswith("bias") else weights) for name, each in tensors.items()}
        last = scaled["classifier.1.bias"]
        scaled["classifier.1.bias"] = last.clamp(min=0.0) + last.new_tensor([1.0, 0.0])  # a black image has an answer
        save_file(scaled, self.weights(number))


@pytest.fixture(autouse=True)
def _few_runs_and_no_notes_on_speed(monkeypatch):
    for module, name, value in (
        (profiling, "QUIET_FRACTION", 1.0),
        (profiling, "MOST_FIT_ERROR", math.inf),
        (profiling, "MOST_UNUSED", 1.0),
        (batches, "TRIAL_RUNS", 1),
        (kinds, "BATCHES_TOGETHER", 2),
        (agreement, "LEAST_IMAGES", 2),  # as many as the crops of a component
        (agreement, "LEAST_EACH", 0),  # good ones alone
    ):
        monkeypatch.setattr(module, name, value)


def written(folder):
    found = {file: file.stat() for file in folder.rglob("*")}
    return {file: (status.st_ino, status.st_size, status.st_mtime_ns) for file, status in found.items()}


def stage_recorder(stages):
    return lambda stage, done, total: None if stages is None else stages.append(stage)


@pytest.fixture
def line(tmp_path):
    return Line(tmp_path / "line")


def times(profile):
    """Batches of each kind, in a profile or a draft: equal only if the kind was not measured again."""
    kinds = profile.kinds() if isinstance(profile, ProfileDraft) else profile.kinds
    return {(kind.kind, kind.processor, kind.precision): kind.batches for kind in kinds}


class TestCompleteProfile:
    @pytest.mark.parametrize(
        ("allocation", "origin"),
        [(SIMULATE, SEARCHED_IN_SIMULATION), (ENGINE, SEARCHED_ON_ENGINE), (CASUAL, "casual")],
    )
    def test_profile_is_written_whole_and_an_agent_starts_from_it_without_a_probe(self, line, allocation, origin):
        done = line.profiled(allocation=allocation, search=FEW_RUNS)
        assert read_profile(line.path) == done.profile
        assert not partial_of(line.path).exists()
        assert done.notes == ()
        assert done.profile.box == line.identity
        assert {(kind.processor, kind.precision) for kind in done.profile.kinds} == {("cpu", "fp32")}
        assert len(done.profile.kinds) == len(done.profile.precisions) == COMPONENTS
        assert done.profile.packed.keys() == {
            (f"cls/f{number}", form) for number in range(COMPONENTS) for form in ("fp32", SOURCE)
        }
        assert (done.profile.usage.origin, done.profile.allocation.origin) == (UsageOrigin.COMPUTED, origin)
        assert done.profile.usage.probabilities == pytest.approx({"cls/f0": 1 / 2, "cls/f1": 1 / 3, "cls/f2": 1 / 6})
        (pool,) = done.profile.allocation.pools
        assert pool.expert_bytes + pool.workspace_bytes == done.profile.allocation.budget_bytes["host"] == 512 * 2**20
        assert pool.experts == COMPONENTS
        assert sum(done.profile.allocation.executors.values()) >= 1
        with built_agent(line.config) as (agent, stages):
            assert agent.stored == done.profile
            assert "probe" not in stages
            assert len(agent.setup.executors) == done.profile.allocation.executors["cpu"]

    def test_gain_of_graphs_is_measured_once_where_a_processor_has_them(self, line, monkeypatch):
        monkeypatch.setattr(graphs, "Recorder", PlayedRecorder)
        assert line.profiled().profile.graphs == {}
        with supposed({"cpu": replace(capabilities_of("cpu"), has_graphs=True)}):
            found = line.profiled().profile.graphs
            assert found["cpu"] > 0
            assert line.profiled().profile.graphs == found

    def test_form_that_this_cpu_lacks_is_replaced_as_by_the_agent_and_noted(self, line, monkeypatch):
        monkeypatch.setattr(operators, "why_absent", lambda dtype: "bf16 path needs avx512bw")
        line.classify(0)
        line.document["precision"] = "onednn-bf16"
        done = line.profiled()
        told = "runs in bf16, not in onednn-bf16, which does not run on this CPU: bf16 path needs avx512bw"
        assert [note.partition(" on cpu ")[2] for note in done.notes] == [f"{told}; write `precision: auto`"]
        with built_agent(line.config) as (agent, stages):
            assert "probe" not in stages
            assert agent.setup.precisions["cpu"] == {"cls/f0": "bf16", "cls/f1": "fp32", "cls/f2": "fp32"}

    def test_retrained_expert_is_proven_beside_a_running_agent(self, line):
        line.classify(0)
        before = line.profiled().profile
        line.retrain(0)
        (line.folder / "f1.yaml").write_text(json.dumps({"weight_bytes": 123_456, "label": "ok"}))  # another kind
        with built_agent(line.config) as (agent, _):
            told = "cls/f0 in fp32 has other packed weights than those that were profiled (and 1 more"
            assert told in agent.alarms[0]
            packed = written(line.config.packed_folder)
            with state_held(line.config.state):  # as a running agent holds it
                for expert in ("cls/f0", "cls/f1"):
                    coserve("profile", line.write(), "--expert", expert, check=0)
            assert written(line.config.packed_folder) == packed
            assert plan_change(agent, line.config, lambda *_: None).agent.alarms == ()
        after = read_profile(line.path)
        assert times(after).items() > times(before).items()
        assert {expert for expert, _ in after.packed} == {"cls/f0", "cls/f1", "cls/f2"}
        assert (after.usage, after.allocation, after.box) == (before.usage, before.allocation, before.box)
        with built_agent(line.config) as (agent, stages):
            assert agent.alarms == ()
            assert "probe" not in stages
        assert "no expert 'cls/g'" in coserve("profile", line.write(), "--expert", "cls/g", check=78).stderr
        assert "leave --fresh" in coserve("profile", line.write(), "--expert", "cls/f0", "--fresh", check=2).stderr

    def test_unservable_expert_is_a_note_and_stops_no_other(self, line):
        (line.folder / "f1.yaml").unlink()
        for allocation in (CASUAL, SIMULATE):
            done = line.profiled(allocation=allocation)
            assert [note for note in done.notes if note.startswith("cls/f1 cannot be served: ")] == list(done.notes)
            assert len(done.notes) == 1
            assert {expert for expert, _ in done.profile.packed} == {"cls/f0", "cls/f2"}


class TestFailingExperts:
    @pytest.mark.parametrize(
        ("allocation", "precision"), [(ENGINE, "fp32"), pytest.param(SIMULATE, "auto", marks=pytest.mark.slow)]
    )
    def test_expert_that_answers_nan_is_a_note_and_stops_no_other(self, line, allocation, precision):
        line.classify(0, 1)
        line.overflow(0)
        line.document["precision"] = precision
        done = line.profiled(allocation=allocation, search=FEW_RUNS)
        (note,) = [note for note in done.notes if "cannot be served" in note]
        assert note.startswith("cls/f0 cannot be served: on cpu: its output has NaN or infinity: check its weights")
        forms = [form for name in ("squeezenet1_1", "fake") for form in candidate_precisions(name, "cpu")]
        forms = [name for name in forms if not FORMS[name].needs_calibration and FORMS[name].why_absent() is None]
        assert len(done.profile.kinds) == (2 if precision == "fp32" else len(forms))
        assert len(done.profile.speedups["cpu"]) == min(line.identity.cores, 4)
        with built_agent(line.config) as (agent, stages):
            assert "probe" not in stages
            assert agent.setup.broken == {}

    def test_expert_that_fails_on_a_sample_leaves_the_search_with_its_components(self, line):
        line.classify(0, 1)
        line.overflow(0, biases=0.0)
        for number in (0, 1):
            line.document["experts"][f"cls/f{number}"]["input"] = {"size": [64, 64], "normalize": "unit"}
        crops = line.crops()
        saved(crops / "c0" / "ok" / "0.png")
        done = line.profiled(allocation=ENGINE, search=FEW_RUNS, samples=crops)
        served = [note for note in done.notes if "cannot be served" in note]
        assert len(served) == 1
        assert served[0].endswith(".png: its output has NaN or infinity: check its weights, or use precision fp32")
        (left_out,) = [note for note in done.notes if note.startswith("the allocation was searched without cls/f0 and")]
        assert left_out.endswith("correct it and profile again, or remove it from the line")
        assert done.profile.allocation.origin == SEARCHED_ON_ENGINE


class TestBusyMachine:
    def test_busy_box_is_noted_once_per_kind_and_once_for_executors(self, line, monkeypatch):
        monkeypatch.setattr(profiling, "QUIET_FRACTION", -1.0)
        done = line.profiled()
        notes = [note for note in done.notes if note.startswith("other processes had ")]
        measured = sorted(note.split(" while ")[1] for note in notes)
        rest = "was measured - profile again with --fresh when the box is quiet"
        kinds = sorted(f"{kind.kind} in fp32 on cpu {rest}" for kind in done.profile.kinds)
        assert measured == [*kinds, f"the gain of several executors of cpu {rest}"]
        assert not [note for note in line.profiled().notes if note.startswith("other processes had ")]

    def test_kind_without_a_straight_curve_makes_a_busy_box_suspected(self, line, monkeypatch):
        monkeypatch.setattr(profiling, "MOST_FIT_ERROR", 0.15)
        line.document["precision"] = "auto"
        line.profiled()
        errors = {"fp32": 0.15, "bf16": 0.9} | dict.fromkeys(SLOW, 0.9)
        with ProfileDraft.open(line.path, "test", line.identity) as draft:
            kinds = draft.kinds()
            crooked = kinds[0].kind
            for kind in kinds:
                off = 0.163 if (kind.kind, kind.precision) == (crooked, "fp32") else errors[kind.precision]
                draft.save_kind(replace(kind, fit_error=off))
        notes = [note for note in line.profiled().notes if "off K n + B" in note]
        told = "batches were up to 16% off K n + B - profile again with --fresh when the box is quiet"
        assert notes == [f"{crooked} in fp32 on cpu: {told}"]


class TestMaximumBatchAtTheTriedLimit:
    @pytest.mark.parametrize(
        ("max_batch", "B_s", "ends"),
        [
            (2, 0.002, ["no larger ones are tried; by its line larger ones might take up to 50% less for an image"]),
            (1, 0.002, []),
            (2, 0.00002, []),
        ],
        ids=["end of the grid", "a plateau before it", "nothing left to gain"],
    )
    def test_maximum_batch_at_the_end_of_the_tried_sizes_is_noted_with_the_reason(
        self, line, monkeypatch, max_batch, B_s, ends
    ):
        monkeypatch.setattr(profiling, "MOST_UNUSED", 0.03)
        line.without(1, 2)
        line.profiled()
        with ProfileDraft.open(line.path, "test", line.identity) as draft:
            (kind,) = draft.kinds()
            batches = tuple(BatchTimes(size, (0.001 * size + B_s,), 1000 * size) for size in (1, 2))
            draft.save_kind(replace(kind, K_s=0.001, B_s=B_s, max_batch=max_batch, batches=batches))
        notes = [note for note in line.profiled().notes if "were not run" in note]
        begin = f"{kind.kind} in fp32 on cpu: batches of more than 2 were not run: "
        assert notes == [begin + end for end in ends]


class TestKindsWithoutAnAllowedForm:
    """A squeezenet of which a killed run measured fp16, that fits fp16 no more, and that does not run in fp32."""

    def test_kind_that_runs_in_no_allowed_form_is_a_note_and_stops_no_other(self, line):
        line.classify(0)
        line.document["precision"] = "fp16"
        options = {"samples": line.crops()}
        kinds = line.profiled(**options).profile.kinds
        line.path.unlink()
        line.seed([kind for kind in kinds if kind.architecture == "squeezenet1_1"], fp16=0.001)
        line.overflow(0)
        line.document["precision"] = "bf16"
        reason = "it does not run in bf16, which the line file gives - write `precision: auto`, or another"
        done = line.profiled(**options, allocation=SIMULATE)
        (kind,) = {kind.kind for kind in done.profile.kinds if kind.architecture == "squeezenet1_1"}
        assert f"{kind} is not run on cpu: {reason}" in done.notes
        assert f"cls/f0 cannot be served: its kind ({kind}) runs on no processor" in done.notes
        assert {name.split()[0] for name, _ in done.profile.precisions} == {"fake"}
        with built_agent(line.config) as (agent, stages):
            assert "probe" not in stages
            assert set(agent.setup.broken) == {"cls/f0"}


class TestUnchangedLines:
    def test_unchanged_line_is_not_measured_again_and_its_profile_is_equal(self, line):
        line.document["precision"] = "auto"
        options = {"allocation": SIMULATE, "samples": line.crops()}
        first = line.profiled(**options).profile
        stages = []
        again = line.profiled(stages, **options).profile
        assert replace(again, written_at=first.written_at) == first
        assert {stage.split()[0] for stage in stages} <= {"pack", "measure", "try"}


KILLED = """
import os, signal
import agent.commands.progress
from contextlib import contextmanager

@contextmanager
def deadly():
    def report(stage, done, total):
        if stage == {stage!r} and done == {done}:
            os.kill(os.getpid(), signal.SIGKILL)
    yield report

agent.commands.progress.progress_on_stderr = deadly
from coserve import main
main()
"""


class TestKilledProfiling:
    def test_killed_profiling_resumes_and_measures_nothing_again(self, line, forks):
        script = KILLED.format(stage="measure on cpu", done=1)
        done = forks.run(script, "profile", line.write(), "--casual", timeout_s=DEADLINE_S)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert not line.path.exists()
        with pytest.raises(ConfigError, match=r"profiling was not finished - `coserve profile LINE.yaml` resumes it"):
            read_profile(line.path)
        with ProfileDraft.open(line.path, "test", line.identity) as draft:
            saved = times(draft)
        assert len(saved) == 1
        assert times(line.profiled().profile).items() > saved.items()
        assert not partial_of(line.path).exists()


class TestProgress:
    def test_charts_that_cannot_be_written_lose_no_profile_and_no_table(self, line):
        place = line.path.with_name("profile")
        line.config.state.mkdir()
        place.write_text("in the way")
        done = coserve("profile", line.write(), "--casual", check=1)
        assert "K ms" in done.stdout
        told = "exists, and is not a folder - make room or correct the path, then run the command again: it resumes"
        assert done.stderr.splitlines()[-1] == f"{place}: {told}"
        assert read_profile(line.path).line == "test"


class TestSamples:
    @pytest.mark.parametrize(("broken", "said"), [(1, "one sample image is"), (2, "2 sample images are")])
    def test_broken_sample_is_skipped_and_named_with_its_reason(self, line, broken, said):
        crops = line.crops()
        paths = [crops / f"c{number}" / "ok" / "0.png" for number in range(broken)]
        for path in paths:
            path.write_bytes(b"")
        (note,) = line.profiled(samples=crops).notes
        assert note.startswith(f"{said} broken and ")
        assert f": {paths[0]}: the file is empty" in note

    def test_sample_that_breaks_meanwhile_leaves_the_search(self, line):
        crops = line.crops()
        broken = crops / "c0" / "ok" / "1.png"

        def spoil(stage, done, total):
            if stage == "executors of cpu" and done == total:
                broken.write_bytes(b"no image")

        options = ProfilingOptions(allocation=ENGINE, search=FEW_RUNS, batches=SHORT, samples=crops)
        done = profile_line(line.config, options, spoil)
        (note,) = done.notes
        assert note.startswith(f"sample image {broken} was left out of the search: ")
        assert note.endswith(" - remove it from the samples, or replace it")
        assert done.profile.allocation.origin == SEARCHED_ON_ENGINE

    def test_usage_without_samples_is_refused_before_anything_is_measured(self, line):
        assert "no sample image yet" in line.refusal(count_usage=True)
        assert not partial_of(line.path).exists()


def served(line, name="test"):
    """A results database of a line of this name: each component once, c0 three times."""
    path = line.folder / f"{name}.db"
    with closing(ResultStore(path)) as store:
        for number, component in enumerate((0, 0, 0, 1, 2)):
            store.record(result(f"{number}", line=name, component=f"c{component}", experts=(f"cls/f{component}",)))
    return path


class TestUsageFromHistory:
    def test_usage_from_history_replaces_the_usage_and_nothing_else(self, line):
        first = line.profiled().profile
        learned = learn_usage(line.config, served(line))
        assert (learned.profile.usage.origin, learned.profile.usage.requests) == (UsageOrigin.SERVED, 5)
        assert replace(learned.profile, usage=first.usage) == first
        assert read_profile(line.path) == learned.profile
        assert any("only 5 requests" in note for note in learned.notes)

    def test_usage_from_history_needs_a_profile_and_measures_none(self, line):
        refused = coserve("profile", line.write(), "--usage-from", served(line), check=78).stderr
        assert f"no finished profile yet - run `coserve profile {line.write()}` first" in refused
        assert not line.path.exists()
        assert not partial_of(line.path).exists()

    def test_usage_from_history_survives_a_new_profile_unless_another_is_asked_for(self, line):
        line.profiled(usage_from=served(line))
        ((expert, route),) = line.without(2)
        learned = line.profiled().profile.usage
        line.document["experts"]["cls/f2"], line.document["routes"]["c2"] = expert, route
        kept = line.profiled()
        assert (kept.profile.usage.origin, kept.profile.usage.requests) == (UsageOrigin.SERVED, 5)
        assert kept.profile.usage.probabilities == learned.probabilities | {"cls/f2": pytest.approx(1 / 3)}
        (note,) = kept.notes
        assert "usage stays as it was learned from 5 served requests" in note
        assert "--fresh" in note
        counted = line.profiled(samples=line.crops(), count_usage=True).profile.usage
        assert counted.origin == "counted on samples"
        learn_usage(line.config, served(line))
        assert line.profiled(fresh=True).profile.usage.origin == UsageOrigin.COMPUTED

    def test_file_that_is_no_history_of_the_line_is_refused_before_measuring(self, line):
        text = line.folder / "notes.txt"
        text.write_bytes(b"\xff\xfe\x00 no rows")
        for history, reason in (
            (text, "notes.txt"),
            (served(line, "other"), "no row of line 'test', only of other (5)"),
        ):
            assert reason in line.refusal(usage_from=history)


def foreign(line):
    with closing(sqlite3.connect(line.path)) as connection, connection:
        connection.execute("UPDATE profile SET device = 'cuda', model = 'RTX 3080 Ti'")


def truncated(line):
    line.path.write_bytes(line.path.read_bytes()[:9000])


class TestExistingProfiles:
    @pytest.mark.parametrize(
        ("spoil", "reason"),
        [(foreign, "is the profile of another box: cuda, RTX 3080 Ti"), (truncated, "is damaged or truncated")],
    )
    def test_existing_profile_stays_unless_all_is_measured_again(self, line, spoil, reason, caplog):
        line.profiled()
        spoil(line)
        content = line.path.read_bytes()
        for command in (["profile", "--casual"], *([["plan"]] if spoil is truncated else [])):
            refused = coserve(command[0], line.write(), *command[1:], check=78).stderr
            assert refused.startswith(f"{line.path} ")
            assert reason in refused
            assert "--fresh" in refused
        image = line.crops() / "c0" / "ok" / "0.png"
        coserve("inspect", line.write(), image, "--component", "c0", check=0)
        assert f"profile_not_used reason={line.path} " in caplog.text
        assert line.path.read_bytes() == content
        assert not partial_of(line.path).exists()
        assert line.profiled(fresh=True).profile.box == line.identity

    def test_running_agent_prevents_profiling(self, line):
        with state_held(line.config.state):
            told = coserve("profile", line.write(), "--casual", check=1).stderr
            assert "is held by another agent or `coserve profile`: stop it first" in told
        assert not line.path.exists()


class TestFullDisk:
    def test_full_disk_is_no_damage_and_measurements_wait_for_room(self, line):
        done = line.profiled()
        line.seed(fp32=0.125)
        file = line.write()
        with files_up_to(512):
            told = coserve("profile", file, "--casual", check=1).stderr
        assert "make room or correct the path, then run the command again: it resumes" in told
        assert "--fresh" not in told
        assert read_profile(line.path) == done.profile
        assert {kind.K_s for kind in line.profiled().profile.kinds} == {0.125}


class TestMemory:
    def test_budget_below_the_largest_expert_is_refused_before_measuring(self, line):
        line.document["memory"] = {"host": "1MiB"}
        line.declare(1, weight_bytes=3 * 2**20)
        refused = line.refusal()
        assert re.search(r"line\.yaml:.* experts\.cls/f1: needs 3\..* but memory\.host is 1\.0 MiB", refused)
        assert "cls/f0" not in refused


class TestCommand:
    def test_profile_command_prints_json_or_a_table_and_draws_charts(self, line):
        line.profiled()  # what takes long: the command itself only searches
        done = coserve("profile", line.write(), "--simulate", "--json", check=0)
        found = json.loads(done.stdout)
        assert found.keys() >= {"device", "architectures", "usage", "allocation", "executors"}
        charts = sorted((line.config.state / "profile").glob("*.png"))
        assert {chart.stem for chart in charts} >= {"average-latency", "batch-latency", "footprint", "usage"}
        text = coserve("profile", line.write(), "--simulate", check=0).stdout
        assert text.splitlines()[-1] == f"written      {line.path}, charts in {line.config.state / 'profile'}"
        assert max(len(each) for each in text.splitlines()[:-1]) <= 120

    @pytest.mark.parametrize(
        ("words", "code", "said"),
        [
            (["--usage-from", "x.db", "--tolerance", "0.5"], 2, "Invalid value for --tolerance: --usage-from "),
            (["--usage-from", "x.db", "--fit-values", "2"], 2, "Invalid value for --fit-values: --usage-from "),
            (["--casual", "--initial-window", "3"], 2, "Invalid value for --initial-window: --casual "),
            (["--simulate", "--casual"], 2, "a search and no search - give one of the two"),
            (["--usage-from", "x.db", "--count-usage"], 2, "usage is learned or counted - give one of the two"),
            (["--error-margin", "1", "--simulate"], 78, "--error-margin: 1.0 never decides - take a fraction between"),
        ],
    )
    def test_contradictory_or_meaningless_options_are_refused(self, line, words, code, said):
        assert said in " ".join(coserve("profile", line.write(), *words, check=code).stderr.replace("│", " ").split())
        assert not line.config.state.exists()
