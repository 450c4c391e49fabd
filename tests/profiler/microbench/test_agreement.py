"""Agreement between precisions: outputs by hand, experts that really differ, and the choice that follows."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from agent.device_profile.records import Agreement, BatchTimes, KindProfile
from agent.runtime.expert_copy import ExpertCopy
from agent.runtime.machine.detection import detect
from experts.backends.classifier import write_random_weights
from experts.expert import NOTHING_FOUND, BoundingBox, Expert, InputSpec, Precision, Prediction
from experts.packed.packing import pack_line
from experts.packed.weights import SegmentStore
from profiler.microbench.agreement import (
    TOLERANCE,
    candidate_precisions,
    choose_precision,
    compare,
    difference,
    image_s,
)
from profiler.microbench.kinds import Bench
from profiler.workload.samples import LineSamples, Sample

LABELS = ("ok", "bad")


def box(label, score):
    return BoundingBox(label, score, 0.0, 0.0, 1.0, 1.0)


class TestTwoOutputs:
    def test_the_same_label_and_a_score_nearby(self):
        found = difference(Prediction("ok", 0.90), Prediction("ok", 0.87))
        assert found.same_labels
        assert found.score == pytest.approx(0.03)

    def test_another_label(self):
        assert not difference(Prediction("ok", 0.51), Prediction("bad", 0.51)).same_labels

    def test_boxes_are_matched_by_label_and_score_and_not_by_order(self):
        one = Prediction("ok", 0.9, (box("ok", 0.9), box("bad", 0.4), box("ok", 0.5)))
        other = Prediction("ok", 0.89, (box("ok", 0.89), box("ok", 0.55), box("bad", 0.38)))
        found = difference(one, other)
        assert found.same_labels
        assert found.score == pytest.approx(0.05)

    def test_a_box_more_or_of_another_label_differs(self):
        one = Prediction("ok", 0.9, (box("ok", 0.9), box("ok", 0.3)))
        assert not difference(one, Prediction("ok", 0.9, (box("ok", 0.9),))).same_labels
        assert not difference(one, Prediction("ok", 0.9, (box("ok", 0.9), box("bad", 0.3)))).same_labels

    def test_nothing_found_twice_is_the_same(self):
        nothing = Prediction(NOTHING_FOUND, 0.0)
        assert difference(nothing, nothing).score == 0.0
        assert difference(nothing, nothing).same_labels


class Workbench:
    """A line's store and samples; packs experts in one precision or another, from one file or another.

    Each is packed on its own and its files are brought together: a line would keep one file for an expert.
    """

    def __init__(self, folder):
        self.folder = folder
        self.store = SegmentStore(folder / "packed")

    def copy(self, expert, precision):
        alone = SegmentStore(self.folder / f"{expert.weights.stem}-{precision}")
        packed = pack_line([expert], lambda _: {precision}, alone).packed[expert.id][precision]
        alone.close()
        shutil.copytree(alone.directory, self.store.directory, dirs_exist_ok=True)
        return ExpertCopy(f"{expert.id}@{precision}", expert, packed)

    def fake(self, name, precision, label=None):
        weights = self.folder / f"{name}-{label}.yaml"
        weights.write_text(json.dumps({"weight_bytes": 5000, "label": label}))
        return self.copy(Expert(f"cls/{name}", "fake", weights, LABELS, InputSpec(8, 8)), precision)

    def images(self, name, count):
        """Samples of an expert, each of another colour."""
        samples = []
        for number in range(count):
            path = self.folder / f"{name}-{number}.png"
            Image.fromarray(np.full((12, 12, 3), 10 + 40 * number, np.uint8)).save(path)
            samples.append(Sample(path, name, None, "inbox"))
        return tuple(samples)

    def bench(self, **samples):
        by_expert = {f"cls/{name}": listed for name, listed in samples.items()}
        return Bench(detect("cpu"), "cpu", self.store, LineSamples(by_expert), threads=1)


@pytest.fixture
def workbench(tmp_path):
    workbench = Workbench(tmp_path)
    yield workbench
    workbench.store.close()


class TestExperts:
    def test_equal_experts_agree_on_every_image(self, workbench):
        fp32 = [workbench.fake(name, Precision.FP32) for name in "ab"]
        bf16 = [workbench.fake(name, Precision.BF16) for name in "ab"]
        bench = workbench.bench(a=workbench.images("a", 6), b=workbench.images("b", 3))
        found = compare(bench, fp32, bf16)
        assert (found.images, found.labels_differ, found.largest_score_difference) == (9, 0, 0.0)
        assert (found.processor, found.precision, found.tolerance) == ("cpu", "bf16", TOLERANCE)
        assert found.agrees

    def test_one_expert_that_says_something_else_is_enough_to_differ(self, workbench):
        fp32 = [workbench.fake("a", Precision.FP32, "ok"), workbench.fake("b", Precision.FP32, "ok")]
        bf16 = [workbench.fake("a", Precision.BF16, "ok"), workbench.fake("b", Precision.BF16, "bad")]
        bench = workbench.bench(a=workbench.images("a", 5), b=workbench.images("b", 2))
        found = compare(bench, fp32, bf16)
        assert (found.images, found.labels_differ) == (7, 2)
        assert not found.agrees

    def test_without_samples_nothing_is_compared(self, workbench):
        fp32, bf16 = [workbench.fake("a", Precision.FP32)], [workbench.fake("a", Precision.BF16)]
        assert compare(workbench.bench(), fp32, bf16).images == 0

    def test_an_expert_that_is_not_there_in_the_other_precision_differs(self, workbench):
        fp32 = [workbench.fake("a", Precision.FP32), workbench.fake("b", Precision.FP32)]
        bench = workbench.bench(a=workbench.images("a", 2), b=workbench.images("b", 3))
        found = compare(bench, fp32, [workbench.fake("a", Precision.BF16)])
        assert (found.images, found.labels_differ) == (5, 3)

    def test_one_that_cannot_be_loaded_in_it_differs(self, workbench):
        fp32, bf16 = [workbench.fake("a", Precision.FP32, "ok")], [workbench.fake("a", Precision.BF16, "bad")]
        workbench.store.program_path(bf16[0].packed.program_sha256).unlink()
        found = compare(workbench.bench(a=workbench.images("a", 2)), fp32, bf16)
        assert (found.images, found.labels_differ) == (2, 2)

    def test_what_fp32_cannot_judge_says_nothing(self, workbench):
        fp32, bf16 = [workbench.fake("a", Precision.FP32)], [workbench.fake("a", Precision.BF16)]
        good, broken = workbench.images("a", 2)
        broken.path.write_bytes(b"no image")
        found = compare(workbench.bench(a=(good, broken)), fp32, bf16)
        assert (found.images, found.labels_differ) == (1, 0)

    def test_no_other_precision_is_the_callers_error(self, workbench):
        with pytest.raises(ValueError, match="no copy"):
            compare(workbench.bench(), [workbench.fake("a", Precision.FP32)], [])

    def test_a_real_network_in_bf16_is_near_and_not_equal(self, workbench):
        """Random weights say nearly the same of everything: in bf16 the scores differ, and by little."""
        weights = workbench.folder / "w.safetensors"
        write_random_weights(weights, "squeezenet1_1", len(LABELS), seed=3)
        expert = Expert("cls/a", "squeezenet1_1", weights, LABELS, InputSpec(64, 64))
        fp32, bf16 = workbench.copy(expert, Precision.FP32), workbench.copy(expert, Precision.BF16)
        bench = workbench.bench(a=workbench.images("a", 5))
        found = compare(bench, [fp32], [bf16])
        assert found.images == 5
        assert 0.0 < found.largest_score_difference < 0.5
        assert compare(bench, [fp32], [fp32]).largest_score_difference < 1e-5


def kind(precision, K_s, B_s=0.0, max_batch=4, name="resnet18 64x64", processor="cpu"):
    batches = (BatchTimes(1, (K_s + B_s,), 0),)
    return KindProfile(
        name, "resnet18", processor, precision, 2, K_s, B_s, 0.0, max_batch, 1, 0, 0, {"ssd": 0.1}, batches, "synthetic"
    )


def agreement(precision, images=9, labels_differ=0, score=0.0):
    return Agreement("resnet18 64x64", "cpu", precision, images, labels_differ, score, TOLERANCE, "5a")


class TestTheChoice:
    FP32, BF16, FP16 = kind("fp32", 0.030), kind("bf16", 0.010), kind("fp16", 0.005)

    def test_the_fastest_that_agrees(self):
        found = choose_precision(
            [self.FP32, self.BF16, self.FP16], [agreement("bf16"), agreement("fp16", labels_differ=1)]
        )
        assert found == "bf16"

    def test_time_per_image_at_the_own_maximum_batch_decides(self):
        """By hand: 10 + 40/8 = 15 ms against 12 + 8/1 = 20 ms, though 12 < 10 + 40."""
        one, other = kind("fp32", 0.010, 0.040, max_batch=8), kind("bf16", 0.012, 0.008, max_batch=1)
        assert image_s(one) == pytest.approx(0.015)
        hungry, quick = kind("bf16", 0.0008, 0.0156, max_batch=128), kind("onnxruntime", 0.00096, 0.0023, max_batch=96)
        assert image_s(quick) < image_s(hungry)  # in batches that occur
        assert choose_precision([one, other], [agreement("bf16")]) == "fp32"

    @pytest.mark.parametrize(
        "agreements",
        [
            [],
            [agreement("bf16", images=0)],
            [agreement("bf16", labels_differ=1)],
            [agreement("bf16", score=TOLERANCE * 1.01)],
            [agreement("fp16")],
            [replace(agreement("bf16"), processor="cuda")],
            [replace(agreement("bf16"), kind="resnet50 64x64")],
        ],
    )
    def test_what_is_not_proven_is_not_chosen(self, agreements):
        assert choose_precision([self.FP32, self.BF16], agreements) == "fp32"

    def test_the_tolerance_itself_still_agrees(self):
        assert choose_precision([self.FP32, self.BF16], [agreement("bf16", score=TOLERANCE)]) == "bf16"

    def test_a_further_form_joins_by_itself(self):
        assert choose_precision([self.FP32, kind("onnxruntime", 0.02)], [agreement("onnxruntime")]) == "onnxruntime"

    def test_no_precision_at_all_is_an_error(self):
        with pytest.raises(ValueError, match="resnet18 64x64 on cpu: no precision runs"):
            choose_precision([self.BF16], [])

    @pytest.mark.parametrize("other", [kind("bf16", 1.0, name="resnet50"), kind("bf16", 1.0, processor="cuda")])
    def test_kinds_are_not_mixed(self, other):
        with pytest.raises(ValueError, match="one kind on one processor"):
            choose_precision([self.FP32, other], [])


class TestCandidates:
    def test_they_are_the_backends_fp32_first(self):
        found = candidate_precisions("resnet18", "cpu")
        assert found[0] is Precision.FP32
        assert {Precision.BF16, Precision.FP16} < set(found)

    def test_a_device_gets_none_that_only_the_cpu_runs(self):
        assert not any(precision.is_cpu_only for precision in candidate_precisions("resnet18", "cuda"))

    def test_graphs_of_their_owners_have_one(self):
        assert candidate_precisions("onnx", "cpu") == (Precision.FP32,)
