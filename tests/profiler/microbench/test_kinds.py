"""Microbenchmarks on real files, memories and threads: what is measured is whole, in each form that can be packed."""

import json
from contextlib import closing

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from agent.config import read_line
from agent.runtime.expert_copy import ExpertCopy, kind_name
from agent.runtime.machine.detection import detect
from agent.runtime.measuring.batches import BatchOptions
from agent.runtime.measuring.fits import LEAST_S
from agent.runtime.measuring.loads import measure_links
from agent.runtime.measuring.meter import ResidentMeter
from experts.backends.vision.classifier import build_trainable
from experts.devices.graphs import RUNS_BEFORE
from experts.errors import LoadError
from experts.expert import Expert, InputSpec, Precision
from experts.packed.packing import pack_line
from experts.packed.weights import SegmentStore
from profiler.microbench import graphs, kinds
from profiler.microbench.bench import Bench
from profiler.microbench.kinds import measure_kind, measure_speedups
from profiler.microbench.packed_forms import LinePacking
from profiler.microbench.texts import ESTIMATED
from profiler.workload.generated_line import LineRecipe, generate_line
from profiler.workload.samples import LineSamples, Sample
from tests.experts.played_graphs import PlayedRecorder
from tests.forms import needs

LABELS = ("ok", "missing", "shifted")
SHORT = BatchOptions(sizes=(1, 2, 4), repeats=2)
RECIPE = LineRecipe(classifiers=2, architecture="squeezenet1_1", requests=1, classifier_px=72)  # a size of its own


@pytest.fixture
def fakes(tmp_path, store):
    """Copies of fakes, by name; each with bytes of its own and some that all share."""

    def build(*names, workspace_bytes=70_000, **weight_bytes):
        experts = []
        for name in names:
            weights = tmp_path / f"{name}.yaml"
            own = {"weight_bytes": weight_bytes.get(name, 1_000_000), "workspace_bytes": workspace_bytes}
            weights.write_text(json.dumps(own | {"shared": {"trunk": 1_200_000}}))
            experts.append(Expert(f"cls/{name}", "fake", weights, LABELS, InputSpec(16, 16)))
        report = pack_line(experts, lambda _: {Precision.FP32}, store)
        return [ExpertCopy(f"{each.id}@fp32", each, report.packed[each.id][Precision.FP32]) for each in experts]

    return build


@pytest.fixture
def bench(store):
    return Bench(detect("cpu"), "cpu", store, LineSamples(), SHORT)


class TestClassifiers:
    def test_small_batches_are_timed_without_graphs_and_with_them(self, resnets, monkeypatch):
        store, copies = resnets
        monkeypatch.setattr(graphs, "Recorder", lambda: recorder)
        recorder = PlayedRecorder()
        bench = Bench(detect("cpu"), "cpu", store, LineSamples(), SHORT)
        assert min(graphs.measure_graphs(bench, copies[Precision.FP32])) > 0
        assert (recorder.captures, recorder.replays) == (3, 3 * (graphs.TURNS - RUNS_BEFORE))

    @pytest.fixture(scope="class")
    @classmethod
    def resnets(cls, tmp_path_factory):
        """A resnet18 for crops of 64 px, packed in two precisions."""
        folder = tmp_path_factory.mktemp("resnet")
        torch.manual_seed(0)
        save_file(build_trainable("resnet18", len(LABELS), "3x3").state_dict(), folder / "w.safetensors")
        expert = Expert("cls/r", "resnet18", folder / "w.safetensors", LABELS, InputSpec(64, 64), stem="3x3")
        store = SegmentStore(folder / "packed")
        packed = pack_line([expert], lambda _: {Precision.FP32, Precision.BF16}, store).packed["cls/r"]
        yield store, {precision: ExpertCopy(f"cls/r@{precision}", expert, form) for precision, form in packed.items()}
        store.close()

    @pytest.mark.parametrize("precision", [Precision.FP32, pytest.param(Precision.BF16, marks=pytest.mark.slow)])
    def test_kind_of_a_real_classifier_has_every_value(self, resnets, precision, tmp_path):
        store, copies = resnets
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(tmp_path / "a.png")
        sample = Sample(tmp_path / "a.png", "r", None, "crops")
        bench = Bench(detect("cpu"), "cpu", store, LineSamples({"cls/r": (sample,)}), SHORT)
        kind = measure_kind(bench, [copies[precision]])
        assert kind.kind == kind_name(copies[precision].expert, None)
        assert (kind.architecture, kind.processor, kind.precision) == ("resnet18", "cpu", precision)
        assert (kind.threads, kind.samples.split(";")[0]) == (bench.threads, "1 image from crops")
        assert [batch.batch_size for batch in kind.batches] == [1, 2, 4]
        assert all(len(batch.seconds) == 2 and min(batch.seconds) > 0 for batch in kind.batches)
        assert kind.max_batch in {1, 2, 4}
        assert min(kind.K_s, kind.B_s) >= LEAST_S
        assert kind.weight_bytes == copies[precision].footprint.total_bytes

    def test_workspace_of_a_real_classifier_is_measured_and_covered(self, resnets, monkeypatch):
        store, copies = resnets
        options = BatchOptions(sizes=(1, 8, 48), repeats=1)
        monkeypatch.setattr(kinds, "meter_for", lambda processor: ResidentMeter())
        kind = measure_kind(Bench(detect("cpu"), "cpu", store, LineSamples(), options), [copies[Precision.FP32]])
        weighed = {batch.batch_size: batch.workspace_bytes for batch in kind.batches}
        assert 12 * 2**20 < weighed[48] < 200 * 2**20
        assert all(
            kind.workspace_base_bytes + size * kind.workspace_bytes >= needed for size, needed in weighed.items()
        )
        assert kind.samples == "synthetic"


class TestKinds:
    def test_workspace_without_a_meter_is_the_backends_estimate_and_marked(self, bench, fakes, monkeypatch):
        monkeypatch.setattr(kinds, "meter_for", lambda processor: None)
        kind = measure_kind(bench, fakes("a", workspace_bytes=2**17))
        assert {batch.batch_size: batch.workspace_bytes for batch in kind.batches} == {1: 2**17, 2: 2**18, 4: 2**19}
        assert (kind.workspace_base_bytes, kind.workspace_bytes) == (0, 2**17)
        assert kind.samples == f"synthetic; {ESTIMATED}"

    @pytest.mark.parametrize("processor", ["emulated", "cpu"])
    def test_split_memory_times_loads_from_the_host_too(self, store, fakes, processor):
        bench = Bench(detect("emulated"), processor, store, LineSamples(), SHORT)
        kind = measure_kind(bench, fakes("a", "b"))
        assert kind.load_s.keys() == ({"ssd", "host"} if processor == "emulated" else {"ssd"})
        assert all(seconds > 0 for seconds in kind.load_s.values())

    def test_kind_that_runs_nowhere_is_an_error_that_names_an_expert(self, bench, fakes):
        broken, sound = fakes("a", "b")
        bench.segments.segment_path(broken.packed.own.sha256).unlink()
        with pytest.raises(LoadError, match=r"expert cls/a: .*pack the line again"):
            measure_kind(bench, [broken])
        assert measure_kind(bench, [broken, sound]).batches


class TestLoadsAndLinks:
    @pytest.mark.parametrize(("device", "links"), [("cpu", ["ssd"]), ("emulated", ["ssd", "host"])])
    def test_every_link_of_the_box_has_a_speed(self, store, fakes, device, links):
        speeds = measure_links(detect(device), 2 * fakes("a", "b"), store, loads=2)
        assert list(speeds) == links
        assert min(speeds.values()) > 0

    def test_expert_that_cannot_be_loaded_is_skipped(self, store, fakes):
        large, small = fakes("a", "b", a=3_000_000)
        store.segment_path(large.packed.own.sha256).unlink()
        assert measure_links(detect("cpu"), [small, large], store, loads=1)
        assert measure_links(detect("cpu"), [large], store, loads=1) == {}


class TestSpeedups:
    @pytest.mark.parametrize("device", ["cpu", "integrated"])
    def test_speedup_is_measured_for_each_number_of_executors(self, store, fakes, device):
        bench = Bench(detect(device), device, store, LineSamples(), SHORT)
        speedups = measure_speedups(bench, fakes("a", "b"), most=3, max_batch=4)
        assert len(speedups) == 3
        assert speedups[0] == 1.0
        assert min(speedups) > 0


@pytest.fixture
def wrong_convolutions():
    """oneDNN's convolutions answer with zeros, until the test ends."""

    def zeros(images, weight, bias, padding, stride, dilation, groups, *_):
        shape = torch.conv2d(images.to("meta"), torch.empty(weight.shape, device="meta", dtype=images.dtype), None,
                             stride, padding, dilation, groups).shape  # fmt: skip
        return torch.zeros(shape, dtype=images.dtype).contiguous(memory_format=torch.channels_last)

    libraries = []
    for key in ("CPU", "MkldnnCPU"):
        libraries.append(torch.library.Library("mkldnn", "IMPL"))
        libraries[-1].impl("_convolution_pointwise", zeros, key, allow_override=True)
    yield
    libraries.clear()


@needs(Precision.ONEDNN_FP32)  # tried here, before the convolutions are wrong
def test_form_that_this_box_computes_wrongly_is_noted_once_and_not_used(tmp_path, wrong_convolutions):
    config = read_line(generate_line(tmp_path / "line", RECIPE).line, {"COSERVE__DEVICE": "cpu"})
    with closing(SegmentStore(config.packed_folder)) as store:
        packing = LinePacking(config, store, LineSamples(), lambda *_: None)
        tried = {name: {Precision.ONEDNN_FP32} for name in config.catalog.experts}
        copies = [packing.pack(tried) for _ in range(2)][-1]
    assert {form: len(listed) for form, listed in copies.items()} == {Precision.FP32: 2}
    (note,) = packing.notes
    assert note.startswith(
        "squeezenet1_1 does not run in onednn-fp32: on this box oneDNN is off in features.0 (convolu"
    )
    assert note.endswith(" by 1 of the largest value, and 25 more of its 26 calls; choose fp32")
    assert packing.failed == {}
