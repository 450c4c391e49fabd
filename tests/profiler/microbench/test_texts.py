"""Language models on the bench: their row is whole, and a precision is chosen only where it says the same."""

from dataclasses import replace

import pytest

from agent.runtime.expert_copy import ExpertCopy
from agent.runtime.machine.detection import detect
from agent.runtime.measuring import text_times
from agent.runtime.measuring.batches import BatchOptions
from experts.devices.graphs import RUNS_BEFORE
from experts.errors import LoadError
from experts.expert import Expert, Precision
from experts.llm.arenas.blocks import BlockArena
from experts.packed.packing import pack_line
from profiler.microbench import graphs
from profiler.microbench.bench import Bench
from profiler.microbench.kinds import measure_kind
from profiler.microbench.texts import compare_texts
from profiler.workload.samples import LineSamples
from tests.experts.llm.conftest import ModelFiles
from tests.experts.played_graphs import PlayedRecorder

SHORT = BatchOptions(repeats=2, limit_s=5.0)


@pytest.fixture
def bench(store):
    return Bench(detect("cpu"), "cpu", store, LineSamples(), SHORT)


@pytest.fixture
def models(tmp_path, store):
    """Copies of llm/a in these precisions, or of others by name; each may alter its tensors before they are packed."""
    files = ModelFiles(tmp_path)

    def build(*precisions, **changes):
        values = files.config("olmoe")
        experts = []
        for name, change in (changes or {"a": None}).items():
            tensors = files.tensors(values)
            if change is not None:
                change(tensors)
            experts.append(Expert(f"llm/{name}", "llm", files.write(values, tensors), (), None))
        packed = pack_line(experts, lambda _: set(precisions), store).packed
        return [
            ExpertCopy(f"{expert.id}@{form}", expert, packed[expert.id][form])
            for expert in experts
            for form in precisions
        ]

    return build


def overflow(tensors):
    tensors["model.norm.weight"] *= 1e30
    tensors["lm_head.weight"] *= 1e30


def test_language_model_that_answers_nan_does_not_speak_for_its_kind(bench, models):
    broken, sound = models(Precision.FP32, broken=overflow, sound=None)
    assert broken.kind == sound.kind
    assert measure_kind(bench, [broken, sound]).K_output_s > 0
    with pytest.raises(LoadError, match="not a number"):
        measure_kind(bench, [broken])


def test_iterations_are_timed_without_graphs_and_with_them(bench, models, monkeypatch):
    monkeypatch.setattr(graphs, "Recorder", lambda: recorder)
    monkeypatch.setattr(text_times, "arena_for", lambda device, most_bytes, **_: BlockArena(most_bytes))
    recorder = PlayedRecorder()
    assert min(graphs.measure_graphs(bench, models(Precision.FP32)[0])) > 0
    assert (recorder.captures, recorder.replays) == (3, 3 * (graphs.TURNS - RUNS_BEFORE))


class TestAgreement:
    def test_bf16_text_agreement_is_close(self, bench, models):
        fp32, bf16 = models(Precision.FP32, Precision.BF16)
        (agreement,), told = compare_texts(bench, [fp32], [bf16], tolerance=0.02)
        assert 0 < agreement.largest_score_difference < 0.1
        assert agreement.precision == "bf16"
        assert "logits off by" in told

    def test_language_model_of_other_weights_differs(self, bench, models):

        def turned(tensors):
            tensors["lm_head.weight"] = tensors["lm_head.weight"].flip(0).contiguous()

        one, turned_one = models(Precision.FP32, one=None, other=turned)
        other = replace(turned_one, expert=replace(turned_one.expert, id="llm/one"))
        (agreement,), _ = compare_texts(bench, [one], [other], tolerance=0.02)
        assert not agreement.agrees
        assert agreement.labels_differ > agreement.images // 10

    def test_language_model_absent_in_the_form_differs_everywhere(self, bench, models):
        fp32, bf16, another, _ = models(Precision.FP32, Precision.BF16, a=None, another=None)
        (_, agreement), _ = compare_texts(bench, [fp32, another], [bf16], tolerance=0.02)
        assert agreement.expert == another.expert.id
        assert agreement.labels_differ == agreement.images > 0
