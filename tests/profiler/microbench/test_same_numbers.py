"""Forms in the numbers of torch's fp32: what outputs prove, without a sample, and what they refute."""

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from agent.config import read_line
from agent.deployment.build import detect_box
from agent.device_profile.identity import identity_of
from agent.device_profile.store import ProfileDraft
from agent.runtime.measuring import batches
from agent.runtime.measuring.batches import BatchOptions
from experts.backends.forms import FORMS
from experts.backends.vision.classifier import write_random_weights
from experts.expert import Expert, InputSpec, Precision
from profiler.allocation.step import CASUAL
from profiler.microbench import kinds
from profiler.microbench.same_numbers import MOST, compare_outputs, largest_difference
from profiler.profiling.profile_line import ProfilingOptions, profile_line
from profiler.profiling.report import profile_table
from tests.forms import each_of, needs
from tests.profiler.lines import as_fast, built_agent, fakes, write_line

FORM = Precision.ONEDNN_FP32
ARCHITECTURE = "squeezenet1_1"


def squeezenet(folder, name="a", seed=0, scale=1.0):
    file = folder / f"{name}-{seed}-{scale:g}.safetensors"
    write_random_weights(file, ARCHITECTURE, 2, seed=seed)
    if scale != 1.0:
        save_file({name: tensor * scale for name, tensor in load_file(file).items()}, file)
    return Expert(f"cls/{name}", ARCHITECTURE, file, ("ok", "bad"), InputSpec(64, 64))


class TestOutputs:
    @pytest.mark.parametrize(
        "form",
        [
            *each_of(FORM),
            pytest.param(Precision.ONNXRUNTIME, marks=[needs(Precision.ONNXRUNTIME), pytest.mark.slow]),
        ],
    )
    def test_form_with_equal_outputs_is_proven_without_a_sample(self, workbench, form):
        expert = squeezenet(workbench.folder)
        copies = [workbench.copy(expert, each) for each in (Precision.FP32, form)]
        (found,) = compare_outputs(workbench.bench(), copies[:1], copies[1:], largest_batch=5)
        assert found.proves
        assert (found.images, found.precision) == (4, form)
        assert found.largest_score_difference < MOST
        bench = workbench.bench(a=workbench.images("a", 3))
        (shown,) = compare_outputs(bench, copies[:1], copies[1:], largest_batch=5)
        assert (shown.images, shown.of_sha256 != found.of_sha256) == (7, True)

    @pytest.mark.parametrize(("seed", "scale"), [(0, 1.001), (0, 1e12)], ids=["a little other", "beyond fp32"])
    def test_different_or_infinite_outputs_refute_a_form(self, workbench, seed, scale):
        fp32 = workbench.copy(squeezenet(workbench.folder), Precision.FP32)
        other = workbench.copy(squeezenet(workbench.folder, seed=seed, scale=scale), Precision.FP32)
        other = replace(other, name="other")
        for one, two in ((fp32, other), (other, fp32)):
            (found,) = compare_outputs(workbench.bench(), [one], [two], largest_batch=1)
            assert not found.proves

    def test_expert_without_a_module_has_no_outputs_to_compare(self, workbench):
        copies = [workbench.fake("a", Precision.FP32, "ok"), workbench.fake("a", Precision.ONNXRUNTIME, "ok")]
        assert compare_outputs(workbench.bench(), copies[:1], copies[1:], largest_batch=1) == []

    def test_output_differences_are_relative_to_their_channel(self):
        boxes = torch.tensor([[[640.0, 320.0], [0.5, 0.1]]])  # (image, channel, place)
        moved, doubted = boxes.clone(), boxes.clone()
        moved[0, 0, 1] += 0.064
        doubted[0, 1, 1] += 0.064
        assert largest_difference([(boxes,)], [(moved,)]) == pytest.approx(1e-4, rel=1e-3)
        assert largest_difference([(boxes,)], [(doubted,)]) == pytest.approx(0.064)
        assert largest_difference([(boxes,)], [(boxes[:, :1],)]) == math.inf
        nothing = boxes.clone()
        nothing[0, 1, 0] = math.nan
        assert largest_difference([(nothing,)], [(boxes,)]) == math.inf == largest_difference([(boxes,)], [(nothing,)])


@pytest.mark.parametrize("form", each_of(FORM))
def test_line_without_samples_gets_the_fastest_form_with_equal_outputs(tmp_path, monkeypatch, form):
    for module, name in ((batches, "TRIAL_RUNS"), (kinds, "BATCHES_TOGETHER")):
        monkeypatch.setattr(module, name, 1)
    document = fakes(2, labels=["ok", "bad"]) | {"memory": {"host": "512MiB"}, "device": "cpu", "precision": "auto"}
    for number in range(2):
        weights = squeezenet(tmp_path, f"f{number}", seed=number).weights.name
        given = {"architecture": ARCHITECTURE, "weights": weights, "input": {"size": [64, 64]}}
        document["experts"][f"cls/f{number}"] = document["experts"][f"cls/f{number}"] | given
    write_line(tmp_path, document)
    config = read_line(tmp_path / "line.yaml", {})
    options = ProfilingOptions(allocation=CASUAL, batches=BatchOptions((1, 2), 1, 0.5, peak_runs=1))
    seconds = {"fp32": 0.5, "bf16": 0.0001, form: 0.001}
    tried = {name: FORMS[name] for name in (Precision.FP32, Precision.BF16, form)}
    with mock.patch.dict(FORMS, tried, clear=True):
        profile_line(config, options, lambda *_: None)
        with ProfileDraft.open(config.profile_file, "test", identity_of(detect_box(config))) as draft:
            for kind in draft.kinds():
                draft.save_kind(as_fast(kind, seconds[kind.precision]))
        done = profile_line(config, options, lambda *_: None)
        assert {each.precision for each in done.profile.forms.values()} == {form}
        assert f"cls/f0, cls/f1 in {form} on cpu: not in bf16: it has no sample images" in profile_table(done.profile)
        with built_agent(config) as (agent, _):
            assert set(agent.setup.precisions["cpu"].values()) == {form}
    assert all(each.proves and each.tolerance == MOST for each in done.profile.agreements)
