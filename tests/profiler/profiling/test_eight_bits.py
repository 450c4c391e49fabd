"""A line of small classifiers of bright and dark images, profiled: which experts run in eight bits, and why not.

Times are seeded so that eight bits are the fastest; whether they agree with fp32 is measured.
"""

import logging
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from agent.deployment.build import detect_box
from agent.deployment.deployment import planned, profiled_box
from agent.device_profile.identity import identity_of
from agent.device_profile.store import ProfileDraft
from agent.runtime.measuring import batches
from agent.runtime.measuring.batches import BatchOptions
from experts.backends import backend_for
from experts.backends.forms import FORMS
from experts.backends.vision.classifier import build_trainable
from experts.calibrations import CalibrationFolder
from experts.expert import Expert, InputSpec, Precision
from profiler.allocation.step import CASUAL
from profiler.microbench import agreement, kinds, packed_forms
from profiler.profiling.profile_expert import profile_expert
from profiler.profiling.profile_line import ProfilingOptions, profile_line
from tests.agent.line_files import LineFile, expert, route
from tests.experts.conftest import tell_apart, trained_looking
from tests.forms import needs
from tests.profiler.lines import as_fast, built_agent

FORM = Precision.ONEDNN_INT8
SECONDS = {FORM: 0.001, Precision.FP32: 0.5}
SMOOTH, ROUGH = 64, 72  # px: two kinds
ARCHITECTURE = "squeezenet1_1"
SHOWN = {"ok": 230, "bad": 25}
EACH = 6  # images of each label, of which half calibrate
LOGIT = 20.0

pytestmark = needs(Precision.ONEDNN_INT8)


def picture(label, number):
    return np.full((80, 80, 3), SHOWN[label] + number, dtype=np.uint8)


class Line(LineFile):
    """Classifiers with a route each. ``smooth`` ones agree with fp32 in eight bits, ``rough`` ones do not."""

    def __init__(self, folder, smooth=(), rough=(), **document):
        folder.mkdir(exist_ok=True)
        sizes = dict.fromkeys(smooth, SMOOTH) | dict.fromkeys(rough, ROUGH)
        experts = {
            f"cls/{name}": expert(f"{name}.safetensors", ARCHITECTURE, size, labels=list(SHOWN))
            for name, size in sizes.items()
        }
        routes = {name: route(f"cls/{name}") for name in sizes}
        on_cpu = {"memory": {"host": "512MiB"}, "executors": {"cpu": 1}, "device": "cpu"}
        super().__init__(folder, experts=experts, routes=routes, **on_cpu | document)
        for number, name in enumerate(sizes):
            self.train(name, number)
        for name in rough:
            self.roughen(name)

    def train(self, name, seed):
        """A last layer on made-up features that is sure of what is bright and what is dark."""
        size = self.document["experts"][f"cls/{name}"]["input"]["size"][0]
        module = trained_looking(build_trainable(ARCHITECTURE, len(SHOWN)), seed)
        expert = Expert("cls/x", ARCHITECTURE, self.folder, tuple(SHOWN), InputSpec(size, size))
        prepare = backend_for(ARCHITECTURE).prepare
        images = torch.stack([prepare(expert, picture(label, EACH // 2)).tensor for label in SHOWN])
        tell_apart(module, images, LOGIT)
        save_file(module.state_dict(), self.weights(name))

    def roughen(self, name, factor=1e4):
        """The same function, but for one channel so large that 256 levels tell nothing of the others beside it."""
        tensors = load_file(self.weights(name))
        for parameter in ("weight", "bias"):
            tensors[f"features.0.{parameter}"][0] *= factor
        tensors["features.3.squeeze.weight"][:, 0] /= factor
        tensors["features.0.bias"][0] += factor
        tensors["features.3.squeeze.bias"] -= tensors["features.3.squeeze.weight"][:, 0, 0, 0] * factor
        save_file(tensors, self.weights(name))

    def weights(self, name):
        return self.folder / f"{name}.safetensors"

    def crops(self, *names, labels=tuple(SHOWN), each=EACH):
        for name in names:
            for label in labels:
                place = self.folder / "crops" / name / label
                place.mkdir(parents=True, exist_ok=True)
                for number in range(each):
                    Image.fromarray(picture(label, number)).save(place / f"{number}.png")
        return self.folder / "crops"

    def profiled(self, samples=None):
        """As if eight bits had been timed as the fastest."""
        options, config = options_with(samples), self.config
        profile_line(config, options, lambda *_: None)
        with ProfileDraft.open(config.profile_file, "test", identity_of(detect_box(config))) as draft:
            for kind in draft.kinds():
                draft.save_kind(as_fast(kind, SECONDS[kind.precision]))
        return profile_line(config, options, lambda *_: None)

    def calibration(self, name):
        return CalibrationFolder.beside(self.config.packed_folder).path(f"cls/{name}")


def options_with(samples):
    return ProfilingOptions(samples=samples, allocation=CASUAL, batches=BatchOptions((1, 2), 1, 0.5, peak_runs=1))


@pytest.fixture(autouse=True, scope="module")
def _quickly():
    """Two forms, with as few runs as possible."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "TRIAL_RUNS", 1)
        patch.setattr(kinds, "BATCHES_TOGETHER", 2)
        patch.setattr(agreement, "LEAST_IMAGES", EACH)
        patch.setattr(agreement, "LEAST_EACH", 0)  # untrained experts fail every image, or none
        with mock.patch.dict(FORMS, {form: FORMS[form] for form in (Precision.FP32, FORM)}, clear=True):
            yield  # afterwards the registry has its order again


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    line = Line(tmp_path_factory.mktemp("lines") / "line", smooth=("a", "b"), rough=("r",))
    return line, line.profiled(line.crops("a", "b", "r"))


def notes_of(done, *words):
    return [note for note in done.notes if all(word in note for word in words)]


def chosen(done):
    """By expert where the line file leaves the choice, else by size."""
    kinds = {kind.split()[1]: form for (kind, _), form in done.profile.precisions.items()}
    return {expert.removeprefix("cls/"): each.precision for (expert, _), each in done.profile.forms.items()} or kinds


class TestAutomaticPrecision:
    def test_expert_runs_in_eight_bits_if_it_agrees_on_all_held_out_images(self, profiled):
        _, done = profiled
        assert chosen(done) == {"a": FORM, "b": FORM, "r": Precision.FP32}
        found = {each.expert: each for each in done.profile.agreements if each.precision == FORM}
        for smooth in (found["cls/a"], found["cls/b"]):
            assert (smooth.images, smooth.labels_differ, smooth.proves) == (EACH, 0, True)  # half of all
        assert (found["cls/r"].images, found["cls/r"].agrees) == (EACH, False)
        assert notes_of(done, f"cls/r: not in {FORM}: ")

    def test_calibrated_expert_is_not_calibrated_again(self, profiled, monkeypatch):
        line, done = profiled
        before = [line.calibration(name).stat() for name in "abr"]
        monkeypatch.setattr(packed_forms, "observed_ranges", lambda *_: pytest.fail("calibrated again"))
        again = line.profiled(line.folder / "crops")
        assert [line.calibration(name).stat() for name in "abr"] == before
        assert chosen(again) == chosen(done)
        assert again.profile.packed == done.profile.packed

    def test_retrained_expert_is_calibrated_and_proven_alone(self, tmp_path):
        line = Line(tmp_path / "line", smooth=("a", "b"))
        line.profiled(line.crops("a", "b"))
        others = line.calibration("b").stat()
        line.train("a", 9)
        with built_agent(line.config) as (agent, _):
            assert agent.setup.precisions["cpu"] == {"cls/a": Precision.FP32, "cls/b": FORM}
            assert "cls/a" in agent.alarms[0]
        done = profile_expert(line.config, "cls/a", options_with(line.folder / "crops"), lambda *_: None)
        assert done.notes == ()
        assert line.calibration("b").stat() == others
        with built_agent(line.config) as (agent, _):
            assert agent.setup.precisions["cpu"] == {"cls/a": FORM, "cls/b": FORM}
            assert agent.alarms == ()


class TestMissingSamples:
    def test_expert_without_samples_stays_in_fp32_and_is_named(self, tmp_path):
        line = Line(tmp_path / "line", smooth=("a", "b"))
        done = line.profiled(line.crops("a"))
        assert chosen(done) == {"a": FORM, "b": Precision.FP32}
        told = f"1 of the 2 experts of {ARCHITECTURE} 64x64 imagenet on cpu stay behind the fastest form: cls/b: not in"
        assert notes_of(done, f"{told} {FORM}: it has no sample images")
        assert not line.calibration("b").exists()
        assert {form for expert, form in done.profile.packed if expert == "cls/b"} == {"fp32", "source"}
        with built_agent(line.config) as (agent, _):
            assert agent.setup.precisions["cpu"] == {"cls/a": FORM, "cls/b": Precision.FP32}
            rows = agent.setup.matrix.experts["cpu"]
            own = {name: row.footprint.own_bytes for name, row in rows.items()}
            assert own["cls/a"] < 0.35 * own["cls/b"]  # each is counted with what it holds in its own form

    def test_samples_of_a_single_label_calibrate_nothing_and_are_noted(self, tmp_path):
        line = Line(tmp_path / "line", smooth=("a",))
        done = line.profiled(line.crops("a", labels=["ok"]))
        told = "its sample images show one label only (ok): give --samples FOLDER with good and bad"
        assert chosen(done) == {"a": Precision.FP32}
        assert notes_of(done, f"{ARCHITECTURE} 64x64 imagenet on cpu is not run in {FORM}: cls/a: {told}")
        assert not line.calibration("a").exists()


class TestNamedPrecision:
    """``precision: onednn-int8``, whatever agrees."""

    def test_named_eight_bit_form_runs_calibrated_experts_and_fp32_the_others(self, tmp_path, caplog):
        line = Line(tmp_path / "line", smooth=("a", "b"), rough=("r",), precision=str(FORM))
        done = line.profiled(line.crops("a", "r"))
        assert chosen(done) == {"64x64": FORM, "72x72": FORM}
        told = (
            f"1 of the 2 experts of {ARCHITECTURE} 64x64 imagenet on cpu run in fp32, not in {FORM}: cls/b: there are"
        )
        assert notes_of(done, told)
        assert not notes_of(done, "cannot be served")
        forms = {"cls/a": FORM, "cls/b": Precision.FP32, "cls/r": FORM}
        plan = planned(line.config, profiled_box(done.profile), done.profile)
        assert (plan.precisions["cpu"], plan.broken) == (forms, {})
        with caplog.at_level(logging.WARNING), built_agent(line.config) as (agent, _):
            assert agent.stored == done.profile
            assert (agent.setup.precisions["cpu"], agent.setup.broken) == (forms, {})
            rows = agent.setup.matrix.experts["cpu"]
            assert {name: row.copy for name, row in rows.items()} == {n: f"{n}@{form}" for n, form in forms.items()}
        assert [each for each in caplog.messages if each.startswith("not_calibrated expert=cls/b")]
