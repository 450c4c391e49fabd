"""Forms of a line of fakes of one kind: the evidence for each, and the notes on it."""

from dataclasses import replace
from unittest import mock

import pytest
import yaml

from agent.config import read_line
from agent.deployment.build import detect_box
from agent.device_profile.identity import identity_of
from agent.device_profile.store import ProfileDraft
from agent.runtime.measuring.batches import BatchOptions
from experts.backends.forms import FORMS
from experts.expert import Precision
from profiler.allocation.step import CASUAL
from profiler.microbench import agreement
from profiler.profiling.profile_line import ProfilingOptions, profile_line
from profiler.profiling.report import profile_json, profile_table
from tests.pictures import saved
from tests.profiler.lines import as_fast, built_agent, fakes, write_line

SHORT = BatchOptions(sizes=(1, 2), repeats=1, limit_s=0.5)
SECONDS = {"fp32": 0.5, "bf16": 0.001}
LEAST, EACH = 4, 2


class LineOfOneKind:
    """Fakes cls/f0, cls/f1 and so on with a route each, which all declare the same; `precision: auto`."""

    def __init__(self, folder, experts=6, shared=None):
        self.folder = folder
        document = fakes(experts, labels=["ok", "bad"]) | {
            "memory": {"host": "512MiB"}, "device": "cpu", "precision": "auto",
        }  # fmt: skip
        self.config = write_line(folder, document, weight_bytes=300_000, shared=shared or {})

    def crops(self, *components, good=2, bad=2):
        """A sample folder with images of each of these, which the fakes pass and fail."""
        for number in components:
            for label, count, grey in (("ok", good, 155), ("bad", bad, 145)):
                for image in range(count):
                    saved(self.folder / "crops" / f"c{number}" / label / f"{image}.png", (grey, grey, grey))
        return self.folder / "crops"

    def profiled(self, samples):
        """Its profile as if a killed run had measured SECONDS."""
        options = ProfilingOptions(samples=samples, allocation=CASUAL, batches=SHORT)
        profile_line(self.config, options, lambda *_: None)
        with ProfileDraft.open(self.config.profile_file, "test", identity_of(detect_box(self.config))) as draft:
            for kind in draft.kinds():
                draft.save_kind(as_fast(kind, SECONDS[kind.precision]))
        return profile_line(self.config, options, lambda *_: None)


@pytest.fixture
def line(tmp_path):
    return LineOfOneKind(tmp_path)


@pytest.fixture(autouse=True)
def _two_forms_and_few_images(monkeypatch):
    monkeypatch.setattr(agreement, "LEAST_IMAGES", LEAST)
    monkeypatch.setattr(agreement, "LEAST_EACH", EACH)
    with mock.patch.dict(FORMS, {form: FORMS[form] for form in (Precision.FP32, Precision.BF16)}, clear=True):
        yield  # afterwards the registry has its order again


def forms(done):
    return {expert.removeprefix("cls/"): each.precision for (expert, _), each in done.profile.forms.items()}


def notes_with(done, *words):
    return [note for note in done.notes if all(word in note for word in words)]


def test_expert_runs_in_its_proven_form_and_unproven_ones_in_fp32_with_a_note(line):
    line.crops(0, 1, 2)
    line.crops(3, bad=1)
    done = line.profiled(line.folder / "crops")
    assert forms(done) == {f"f{number}": "bf16" if number < 3 else "fp32" for number in range(6)}
    assert set(done.profile.precisions.values()) == {"fp32"}  # of an expert that joins, nothing is proven
    (note,) = notes_with(done, "stay behind the fastest form")
    assert note.startswith("3 of the 6 experts of fake 8x8 imagenet program=")
    assert "cls/f3: not in bf16: it has 3 sample images for that, and a proof takes 4" in note
    assert note.endswith("(and 2 more)")
    whys = {expert: each.why for (expert, _), each in done.profile.forms.items()}
    assert whys["cls/f0"] == (
        "2 samples that fp32 passes and 2 that it fails agree: at 95 % fewer than 150.0% and 150.0% "
        "are decided otherwise"
    )
    assert "it has no sample images" in whys["cls/f4"]
    table = profile_table(done.profile)
    assert "form         cls/f0, cls/f1, cls/f2 in bf16 on cpu: 2 samples that" in table
    assert "form         cls/f4, cls/f5 in fp32 on cpu: not in bf16" in table
    told_as_json = profile_json(done.profile)["experts"]
    assert told_as_json["cls/f3 on cpu"]["precision"] == "fp32"
    with built_agent(line.config) as (agent, _):
        assert agent.stored == done.profile
        rows = agent.setup.matrix.experts["cpu"]
        assert {name.removeprefix("cls/"): row.copy.partition("@")[2] for name, row in rows.items()} == forms(done)


def test_disagreeing_expert_does_not_keep_others_from_a_form(line, monkeypatch):
    judged = agreement.judged

    def turned(rig, copy, samples):
        said = judged(rig, copy, samples)
        is_turned = (copy.expert.id, copy.packed.precision) == ("cls/f2", "bf16")
        return [replace(said[0], label="odd"), *said[1:]] if is_turned else said

    monkeypatch.setattr(agreement, "judged", turned)
    done = line.profiled(line.crops(*range(6)))
    assert forms(done) == {f"f{number}": "fp32" if number == 2 else "bf16" for number in range(6)}
    assert notes_with(done, "cls/f2: not in bf16: 1 of 4 samples are decided otherwise")


def test_samples_that_all_pass_prove_no_form_and_the_note_asks_for_bad_parts(line):
    done = line.profiled(line.crops(*range(6), good=LEAST, bad=0))
    assert set(forms(done).values()) == {"fp32"}
    asked = "fp32 passes 4 of its sample images and fails 0, and 4 prove it, 2 of either - give --samples FOLDER with"
    assert notes_with(done, f"not in bf16: {asked} more good and bad parts")


def test_experts_that_share_tensors_run_in_one_form(tmp_path):
    line = LineOfOneKind(tmp_path, shared={"backbone": 4_000_000})
    done = line.profiled(line.crops(*range(5)))
    assert set(forms(done).values()) == {"fp32"}
    assert notes_with(done, "shares tensors with cls/f5, of which it has no sample images")
    done = line.profiled(line.crops(5))
    assert set(forms(done).values()) == {"bf16"}


def test_changed_passing_score_invalidates_the_proof_of_a_form(line):
    done = line.profiled(line.crops(*range(6)))
    assert set(forms(done).values()) == {"bf16"}
    document = yaml.safe_load((line.folder / "line.yaml").read_text())
    document["routes"]["c2"][0]["min_score"] = 0.5
    (line.folder / "line.yaml").write_text(yaml.safe_dump(document))
    line.config = read_line(line.folder / "line.yaml", {})
    with built_agent(line.config) as (agent, _):
        served = agent.setup.precisions["cpu"]
        assert {name for name, form in served.items() if form == "fp32"} == {"cls/f2"}
        (alarm,) = agent.alarms
        assert "expert cls/f2 has other thresholds or routes than in the proof of its form" in alarm
    stages = []
    options = ProfilingOptions(samples=line.folder / "crops", allocation=CASUAL, batches=SHORT)
    profile_line(line.config, options, lambda stage, *_: stages.append(stage))
    assert [stage for stage in stages if stage.startswith("compare bf16")]
