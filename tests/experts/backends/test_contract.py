"""What every backend promises, asked of each: pack, lie on disk, load into memory, switch by bytes, answer."""

import functools
import itertools
import pickle
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace

import numpy as np
import onnx
import pytest
import torch

from experts.backends import backend_for
from experts.backends.forms import FORMS as REGISTRY
from experts.backends.onednn import execution
from experts.backends.vision import classifier
from experts.errors import BackendUnavailable, WeightsCorrupt, WeightsMismatch, WeightsMissing, WeightsRefused
from experts.expert import NOTHING_FOUND, Precision
from experts.packed.packing import pack_line
from experts.packed.weights import SLOT_QUANTUM_BYTES, SegmentStore
from tests.experts.conftest import ExpertFiles, calibrated, picture
from tests.forms import needs

FAMILIES = {
    "resnet18": lambda files, name, seed: files.classifier(name, "resnet18", seed, size=32),
    "resnet18-3x3": lambda files, name, seed: files.classifier(name, "resnet18", seed, size=32, stem="3x3"),
    "mobilenet_v3_small": lambda files, name, seed: files.classifier(name, "mobilenet_v3_small", seed),
    "yolov5n": lambda files, name, seed: files.detector(name, "yolov5n", seed),
    "onnx": lambda files, name, seed: files.onnx(name, seed),
    "fake": lambda files, name, seed: files.fake(name),
}
MOMENTS = 80  # of one making, at each of which a batch of another form runs
PATIENCE_S = 60.0
label_counts = itertools.count(10)  # of layouts that nothing else here has
FORMS = [
    *((family, Precision.FP32) for family in FAMILIES),
    *(("resnet18-3x3", name) for name, form in REGISTRY.items() if form.packs_modules and name != Precision.FP32),
    *((family, Precision.ONNXRUNTIME) for family in ("mobilenet_v3_small", "yolov5n", "fake")),
    ("yolov5n", Precision.ONEDNN_FP32),
]


@dataclass(frozen=True)
class Packed:
    """Two experts of one form with different weights, packed."""

    experts: tuple
    store: SegmentStore
    forms: tuple
    precision: Precision


@pytest.fixture(scope="module")
def packed_once(made_once):
    """By family and precision: two experts, packed when any process first asks for them; nobody writes there then."""
    with ExitStack() as stores:

        @functools.cache
        def pack(family, precision):
            written = functools.partial(write_packed, family, precision)
            folder = made_once(f"contract-{family}-{precision}", written)
            store, experts, forms = stores.enter_context(opened(folder, precision))
            return Packed(experts, store, forms, precision)

        yield pack


def write_packed(family, precision, folder):
    files = ExpertFiles(folder)
    experts = tuple(FAMILIES[family](files, f"cls/expert-{seed}", seed) for seed in (1, 2))
    (folder / "experts.pickle").write_bytes(pickle.dumps(experts))
    if REGISTRY[precision].needs_calibration:
        for expert in experts:
            calibrated(expert, precision, folder / "packed" / "calibrations", picture(90, 140), picture(64, 64))
    with opened(folder, precision):
        pass


@contextmanager
def opened(folder, precision):
    """The store of a folder, its experts, and what they are packed as, which they are if they are not yet."""
    experts = pickle.loads((folder / "experts.pickle").read_bytes())
    with closing(SegmentStore(folder / "packed")) as store:
        report = pack_line(experts, lambda expert: {precision}, store)
        assert report.failed == {}
        yield store, experts, tuple(report.packed[each.id][precision] for each in experts)


@pytest.fixture(scope="module", params=[pytest.param(each, marks=needs(each[1]), id="-".join(each)) for each in FORMS])
def packed(request, packed_once):
    return packed_once(*request.param)


@pytest.fixture
def slot(packed, make_slot):
    return make_slot(packed.experts[0], packed.forms[0], packed.store)


@pytest.fixture
def precision(packed):
    return packed.precision


@pytest.fixture
def broken(packed, tmp_path):
    expert = packed.experts[0]
    copy = tmp_path / expert.weights.name
    shutil.copyfile(expert.weights, copy)
    return replace(expert, weights=copy)


def test_overwriting_the_bytes_is_a_complete_switch(packed, slot, make_slot, image):
    (first, second), forms = packed.experts, packed.forms
    fresh = make_slot(second, forms[1], packed.store).infer(second, image)
    before = slot.infer(first, image)
    assert (forms[0].layout, forms[0].program_sha256) == (forms[1].layout, forms[1].program_sha256)
    slot.load(second, forms[1])
    assert slot.infer(second, image) == fresh
    assert before != fresh or first.architecture == "fake"  # a fake's answer comes from the image alone


def test_every_image_of_a_batch_is_answered_in_order(packed, slot, image):
    expert = packed.experts[0]
    images = [image, image[::-1].copy(), 255 - image]
    alone = [slot.infer(expert, each)[0] for each in images]
    together = slot.infer(expert, *images)
    assert [each.label for each in together] == [each.label for each in alone]
    assert [each.score for each in together] == pytest.approx([each.score for each in alone], abs=1e-4)
    assert all(each.label in {*expert.labels, NOTHING_FOUND} and 0 <= each.score <= 1 for each in together)


def test_weight_bytes_are_known_before_packing(packed, precision):
    expert, form = packed.experts[0], packed.forms[0]
    expected = sum(segment.size_bytes for segment in form.segments)
    found = backend_for(expert.architecture).weight_bytes(expert, precision)
    if REGISTRY[precision].needs_calibration:
        assert found.total_bytes > expected
    else:
        assert found.total_bytes == pytest.approx(expected, rel=0.05, abs=SLOT_QUANTUM_BYTES)


def test_malformed_batch_is_the_callers_error(packed, slot, image):
    expert = packed.experts[0]
    with pytest.raises(ValueError, match="empty batch"):
        slot.infer(expert)
    for wrong in (image.astype(np.float32), image[:, :, 0], image[:0]):
        with pytest.raises(ValueError, match="uint8"):
            backend_for(expert.architecture).prepare(expert, wrong)
    with pytest.raises(ValueError, match="do not fit"):
        slot.skeleton.bind({"elsewhere": torch.zeros(3)})


def test_several_threads_may_share_a_bound_skeleton(packed, slot, image):
    expert = packed.experts[0]
    batches = [[image] * count for count in (1, 2, 3, 1, 2, 3)]
    expected = [slot.infer(expert, *batch) for batch in batches]
    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(lambda batch: slot.infer(expert, *batch), batches))
    for found, wanted in zip(answers, expected, strict=True):
        assert [each.label for each in found] == [each.label for each in wanted]
        assert [each.score for each in found] == pytest.approx([each.score for each in wanted], abs=1e-5)


def test_form_of_the_cpu_runs_nowhere_else(packed, precision):
    if not REGISTRY[precision].is_cpu_only or packed.experts[0].architecture == "fake":
        pytest.skip("it runs on every device")
    expert, program = packed.experts[0], packed.store.program(packed.forms[0])
    with pytest.raises(BackendUnavailable, match="on the CPU, not on cuda:0"):
        backend_for(expert.architecture).skeleton(expert, precision, program, "cuda:0")


def test_workspace_grows_linearly_with_the_batch(packed, precision):
    expert = packed.experts[0]
    backend = backend_for(expert.architecture)
    one, two, four = (backend.workspace_bytes(expert, precision, count) for count in (1, 2, 4))
    assert four - two == 2 * (two - one)
    assert one >= 4 * 3 * expert.input.height * expert.input.width or expert.architecture == "fake"


def test_truncated_weights_are_corrupt_and_absent_ones_missing_and_no_pickle_is_read(broken, precision):
    backend, content = backend_for(broken.architecture), broken.weights.read_bytes()
    backend.check(broken)
    broken.weights.write_bytes(content[: len(content) // 2])
    for opened in (backend.check, lambda expert: backend.pack(expert, precision)):
        with pytest.raises(WeightsCorrupt, match=broken.id):
            opened(broken)
    broken.weights.unlink()
    for opened in (backend.check, lambda expert: backend.pack(expert, precision)):
        with pytest.raises(WeightsMissing, match=str(broken.weights)):
            opened(broken)
    if broken.architecture != "fake":  # which has no weights file but its declaration
        torch.save({"weight": torch.zeros(2)}, broken.weights.with_suffix(".pt"))
        with pytest.raises(WeightsRefused):
            backend.pack(replace(broken, weights=broken.weights.with_suffix(".pt")), precision)


def test_different_number_of_labels_is_reported_as_a_mismatch(packed, precision):
    expert = replace(packed.experts[0], labels=("a", "b", "c", "d"))
    if expert.architecture == "fake":
        pytest.skip("a fake answers with whatever labels the line names")
    backend = backend_for(expert.architecture)
    for opened in (backend.check, lambda expert: backend.pack(expert, precision)):
        with pytest.raises(WeightsMismatch, match=r"\b3\b.*\b4\b"):
            opened(expert)


@pytest.fixture(scope="module")
def new_template(tmp_path_factory):
    """By the kind of backend: something that makes a template of a layout which this process has not seen yet."""
    files = ExpertFiles(tmp_path_factory.mktemp("new"))
    exported = files.classifier("cls/exported", "squeezenet1_1")
    program = backend_for("squeezenet1_1").pack(exported, Precision.ONNXRUNTIME).program

    def made(expert, precision=Precision.FP32, program=b""):
        return lambda: backend_for(expert.architecture).template(expert, precision, program, "cpu")

    def of(kind):
        number = next(label_counts)
        labels = [str(label) for label in range(number)]
        if kind == "classifier":
            return made(files.classifier("cls/new", "resnet18", labels=labels, size=32))
        if kind == "onednn":
            form = classifier._structure_of("squeezenet1_1", number, None, (32, 32))
            return lambda: execution._fused(backend_for("squeezenet1_1"), form, (32, 32), torch.float32)
        if kind == "detector":
            return made(files.detector("det/new", "yolov5n", labels=labels))
        if kind == "onnxruntime":
            model = onnx.load_from_string(program)
            model.metadata_props.add(key="number", value=str(number))
            return made(exported, Precision.ONNXRUNTIME, model.SerializeToString())
        expert = files.onnx("cls/new", labels=labels) if kind == "onnx" else files.fake("cls/new", labels=labels)
        return made(expert, program=backend_for(kind).pack(expert, Precision.FP32).program)

    return of


def counting_calls(make, at_call):
    """Make it while ``at_call`` is told the number of each function call on the way."""
    count = 0

    def called(frame, event, argument):
        nonlocal count
        if event == "call":
            count += 1
            at_call(count)

    sys.setprofile(called)
    try:
        make()
    finally:
        sys.setprofile(None)
    return count


@pytest.fixture(scope="module")
def call_counts(new_template):
    """How many functions are called while a template of a kind is made, asked once."""
    return functools.cache(lambda kind: counting_calls(new_template(kind), lambda number: None))


SLOW_KINDS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("detector", "onnxruntime", "onednn", "fake")]


@pytest.mark.parametrize("kind", ["classifier", "onnx", *SLOW_KINDS])
def test_batches_run_while_other_experts_are_built(packed_once, make_slot, image, new_template, call_counts, kind):
    """The making stops at many of its calls until a batch has run on another thread: what it patches would show.

    Batches of all forms take turns.
    """
    runs = {}
    for form in (each for each in FORMS if REGISTRY[each[1]].why_absent() is None):
        packed = packed_once(*form)
        slot = make_slot(packed.experts[0], packed.forms[0], packed.store)
        runs[form] = functools.partial(slot.infer, packed.experts[0], image)
    expected = {form: run() for form, run in runs.items()}
    answers, turns = [], itertools.cycle(runs)
    calls = call_counts(kind)
    interval = max(calls // MOMENTS, 1)
    at_once = max(MOMENTS // calls, 1)
    with ThreadPoolExecutor(1) as making, ThreadPoolExecutor(1) as running:

        def at_call(number):
            if number % interval == 0:
                batches = [(form, running.submit(runs[form])) for form in itertools.islice(turns, at_once)]
                answers.extend((form, batch.result(PATIENCE_S)) for form, batch in batches)

        made = making.submit(counting_calls, new_template(kind), at_call)
        assert made.result(PATIENCE_S) >= calls // 2
    assert len(answers) >= MOMENTS // 4
    assert {form for form, _ in answers} == set(runs)
    assert [(form, answer) for form, answer in answers if answer != expected[form]] == []
