"""Agreement between precisions: outputs by hand, experts that really differ, and the choice that follows."""

from dataclasses import replace
from pathlib import Path

import pytest

from agent.device_profile.records import BatchTimes
from experts.expert import BoundingBox, Expert, InputSpec, LabelScore, Precision, Prediction
from experts.graph import ExpertGraph, RouteStep
from profiler.microbench.agreement import (
    LEAST_IMAGES,
    TOLERANCE,
    compare,
    compared,
    difference,
    failing_of,
    image_s,
    is_clearly_faster,
)
from profiler.microbench.kinds import failing_experts
from profiler.workload.samples import Sample
from tests.profiler.lines import kind_of

GRAPH = ExpertGraph([], {})


def box(label, score, left=0.0, width=100.0):
    return BoundingBox(label, score, left, 0.0, left + width, 100.0)


class TestOutputs:
    def test_boxes_are_matched_by_label_and_score_in_any_order(self):
        one = Prediction("ok", 0.9, (box("ok", 0.9), box("bad", 0.4), box("ok", 0.5)))
        other = Prediction("ok", 0.89, (box("ok", 0.89), box("ok", 0.55), box("bad", 0.38)))
        found = difference(one, other)
        assert found.is_same
        assert found.score == pytest.approx(0.05)

    @pytest.mark.parametrize(
        ("moved", "is_same"), [(0.0, True), (10.0, True), (20.0, False), (100.0, False)], ids=lambda value: str(value)
    )
    def test_displaced_box_differs(self, moved, is_same):
        """100 px wide and moved by 10: 90 in common of 110, 0.82; by 20: 80 of 120, 0.67."""
        one, other = (Prediction("ok", 0.9, (box("ok", 0.9, left),)) for left in (0.0, moved))
        assert difference(one, other).is_same is is_same

    def test_each_box_is_matched_once(self):
        one = Prediction("ok", 0.9, (box("ok", 0.9), box("ok", 0.8, 200.0)))
        other = Prediction("ok", 0.9, (box("ok", 0.9), box("ok", 0.8)))
        assert not difference(one, other).is_same
        assert difference(one, replace(one, boxes=one.boxes[::-1])).is_same

    def test_held_labels_and_all_outputs_are_compared(self):
        def predicted(scratch, dent):
            outputs = (LabelScore.of("scratch", scratch, 0.5), LabelScore.of("dent", dent, 0.5))
            return Prediction("scratch", scratch, outputs=outputs)

        assert difference(predicted(0.9, 0.52), predicted(0.9, 0.45)).is_same is False
        found = difference(predicted(0.9, 0.3), predicted(0.9, 0.4))
        assert (found.is_same, found.score) == (True, pytest.approx(0.1))


class TestVerdicts:
    """Two outputs that look alike are no agreement where a route makes other verdicts of them."""

    STEPS = (RouteStep("cls/a", frozenset({"ok"}), min_score=0.95), RouteStep("cls/b", frozenset({"ok"})))

    def judged_alike(self, expert, one, other, *steps):
        graph = ExpertGraph(["cls/a", "cls/b", "cls/c"], {"r": steps or self.STEPS})
        (found,) = compared(graph, expert, [Sample(None, "r", None, "inbox")], [one], [other])
        return found.is_same

    def test_score_across_the_passing_minimum_changes_the_verdict(self):
        one, other = Prediction("ok", 0.96), Prediction("ok", 0.945)
        assert difference(one, other).score < TOLERANCE
        assert not self.judged_alike("cls/a", one, other)
        assert self.judged_alike("cls/a", one, Prediction("ok", 0.951))
        assert self.judged_alike("cls/b", one, other)  # whom no least is asked of

    def test_label_that_picks_the_next_expert_has_to_agree(self):
        branching = RouteStep("cls/a", frozenset(), then={"left": "cls/b", "right": "cls/c"})
        left, right = Prediction("left", 0.9), Prediction("right", 0.9)
        assert not self.judged_alike("cls/a", left, right, branching)
        assert self.judged_alike("cls/b", Prediction("x", 0.9), Prediction("x", 0.88), branching)


class TestExperts:
    def test_form_is_proven_by_enough_passing_and_failing_images_only(self, workbench):
        said = {"a": (None, None), "b": ("ok", "bad"), "c": (None, None), "d": ("ok", "ok")}
        fp32 = [workbench.fake(name, Precision.FP32, exact) for name, (exact, _) in said.items()]
        bf16 = [workbench.fake(name, Precision.BF16, other) for name, (_, other) in said.items()]
        counts = dict.fromkeys(said, LEAST_IMAGES) | {"c": LEAST_IMAGES - 1}
        bench = workbench.bench(**{name: workbench.images(name, count) for name, count in counts.items()})
        steps = {name: (RouteStep(f"cls/{name}", frozenset({"ok"})),) for name in said}
        graph = ExpertGraph([f"cls/{name}" for name in said], steps)
        found = {each.expert: each for each in compare(bench, graph, fp32, bf16)}
        assert {name: (each.images, each.labels_differ) for name, each in found.items()} == {
            "cls/a": (LEAST_IMAGES, 0), "cls/b": (LEAST_IMAGES, LEAST_IMAGES), "cls/c": (LEAST_IMAGES - 1, 0),
            "cls/d": (LEAST_IMAGES, 0),
        }  # fmt: skip
        assert {name: (each.agrees, each.proves) for name, each in found.items()} == {
            "cls/a": (True, True), "cls/b": (False, False), "cls/c": (True, False), "cls/d": (True, False),
        }  # fmt: skip
        assert {name: (each.passing, each.failing) for name, each in found.items()} == {
            "cls/a": (20, 10), "cls/b": (LEAST_IMAGES, 0), "cls/c": (19, 10), "cls/d": (LEAST_IMAGES, 0),
        }  # fmt: skip

    def test_router_that_fails_nothing_needs_images_of_two_labels(self):
        graph = ExpertGraph(
            ["cls/a", "cls/b", "cls/c"],
            {"r": (RouteStep("cls/a", frozenset(), then={"left": "cls/b", "right": "cls/c"}),)},
        )
        expert = Expert("cls/a", "fake", Path("a"), ("left", "right"), InputSpec(8, 8))
        samples = [Sample(Path("a.png"), "r", None, "inbox")] * 3
        said = [Prediction(label, 0.9) for label in ("left", "left", "right")]
        assert failing_of(graph, expert, samples, said) == 1
        assert failing_of(graph, expert, samples, [said[0]] * 3) == 0

    def test_expert_absent_or_unloadable_in_the_other_precision_differs(self, workbench):
        fp32 = [workbench.fake(name, Precision.FP32) for name in "abc"]
        bf16 = [workbench.fake("a", Precision.BF16), workbench.fake("c", Precision.BF16, "bad")]
        workbench.store.program_path(bf16[1].packed.program_sha256).unlink()
        bench = workbench.bench(**{name: workbench.images(name, 2) for name in "abc"})
        assert [(each.images, each.labels_differ) for each in compare(bench, GRAPH, fp32, bf16)] == [
            (2, 0),
            (2, 2),
            (2, 2),
        ]

    def test_image_that_only_the_other_form_can_judge_differs(self):
        """Its layers made no number of an image, of which another form's made a plausible one."""
        said = Prediction("ok", 0.9)
        alike = compared(GRAPH, "cls/a", [Sample(None, "r", None, "inbox")] * 3, [None, None, said], [said, None, None])
        assert [each.is_same for each in alike] == [False, False]


def kind(precision, K_s, B_s=0.0, max_batch=4, seconds=()):
    batches = (BatchTimes(1, seconds or (K_s + B_s,), 0),)
    return kind_of("resnet18", precision, K_s=K_s, B_s=B_s, max_batch=max_batch, batches=batches)


class TestTimes:
    def test_time_per_image_counts_three_of_four_images_as_alone(self):
        """By hand: 10 + 40 ms alone and 10 + 40/8 together; 12 + 8 ms either way."""
        hungry, quick = kind("fp32", 0.010, 0.040, max_batch=8), kind("bf16", 0.012, 0.008, max_batch=1)
        assert image_s(hungry) == pytest.approx(0.75 * 0.050 + 0.25 * 0.015)
        assert image_s(quick) == pytest.approx(0.020)
        assert is_clearly_faster(quick, hungry)  # though 10 < 12 in a batch without end

    def test_speedup_within_the_timing_error_does_not_count(self):
        exact = kind("fp32", 0.0100)
        assert not is_clearly_faster(kind("bf16", 0.0096), exact)
        assert is_clearly_faster(kind("bf16", 0.0094), exact)
        shaky = (0.006, 0.008, 0.009, 0.010)  # the middle half spans a fifth and more
        assert not is_clearly_faster(kind("bf16", 0.0085, seconds=shaky), exact)
        assert is_clearly_faster(kind("bf16", 0.0085, seconds=(0.0084, 0.0085, 0.0085, 0.0086)), exact)


def test_expert_that_cannot_be_loaded_fails_and_those_after_it_run(workbench):
    copies = [workbench.fake(name, Precision.FP32, label) for name, label in (("a", "ok"), ("b", "bad"), ("c", None))]
    workbench.store.program_path(copies[0].packed.program_sha256).unlink()
    assert failing_experts(workbench.bench(), copies).keys() == {"cls/a"}
