"""The compute table on a tiny classifier and a tiny detector: who takes part, who says the same, what is told."""

import functools
import json
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec

import onnx
import pytest
import torch

from agent.runtime.machine.box import Box, MemorySize
from experts.backends import backend_for
from experts.errors import ConfigError, OutputInvalid, WeightsMismatch
from experts.expert import Precision
from experts.packed.weights import SegmentStore
from profiler.workload.generated_line import write_experts
from proof.compute import arithmetic, contestants, measure
from proof.compute.contestants import (
    EAGER,
    INT8_SESSION,
    NO_OPENVINO,
    OPENVINO,
    OPENVINO_BF16,
    SESSION,
    eager,
    int8_session,
    openvino,
    our_form,
    plain_model,
    prepared_images,
    quantised,
    session,
)
from proof.compute.measure import ComputeOptions, ComputeRow, executor_threads, measure_compute_forms, targets_of
from tests.commands import coserve

CONFIGURATION = 78
FP32, BF16 = Precision.FP32, Precision.BF16
TINY = ComputeOptions(("squeezenet1_1",), (64, 64), (2, 1), (FP32, BF16), rounds=2)
PEERS = {EAGER, SESSION, INT8_SESSION, *(OPENVINO if find_spec("openvino") else ())}


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """By architecture: what takes longest to make; experts of a seed have the same weights."""

    @functools.cache
    def made(architecture):
        (expert,) = write_experts(tmp_path_factory.mktemp(architecture), architecture, 1, size=TINY.size)
        return plain_model(expert)

    return made


def having(model, expert):
    """The same weights of another expert, whose folder is its own."""
    return replace(model, plain=replace(model.plain, expert=expert))


@pytest.fixture(scope="module")
def model(model_of):
    return model_of("squeezenet1_1")


@pytest.fixture(scope="module", autouse=True)
def _tiny(model):
    """Small multiplications, one model, and no contestant is left out as too slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arithmetic, "SHAPES", ((16, 16, 16),))
        patch.setattr(measure, "HOPELESS", 1e9)
        patch.setattr(measure, "plain_model", lambda expert: having(model, expert))
        yield


@pytest.fixture
def measured(tmp_path):
    return lambda **more: measure_compute_forms(tmp_path, replace(TINY, **more), lambda *_: None)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compute")
    found = measure_compute_forms(folder, TINY, lambda *_: None)
    assert list(folder.iterdir()) == []
    return found


@pytest.mark.parametrize("architecture", ["squeezenet1_1", pytest.param("yolov5n", marks=pytest.mark.slow)])
def test_all_contestants_give_the_same_scores_on_the_same_images(architecture, model_of, tmp_path):
    """The peer in eight bits nearly; its weights are."""
    model = model_of(architecture)
    expert, images = model.expert, prepared_images(model.expert, 2)
    with closing(SegmentStore(tmp_path / "packed")) as store, our_form(expert, FP32, store, images) as ours:
        listed = [eager(model, images), ours, session(model, images, 1), int8_session(model, images, 1)]
        if find_spec("openvino"):
            listed.append(openvino("openvino-fp32", model, images, 1))
        answers = {each.form: each.run() for each in listed}
    for form, answer in answers.items():
        near = 0.05 if form == INT8_SESSION else 1e-3
        assert [each.score for each in answer] == pytest.approx([each.score for each in answers[EAGER]], abs=near)
        assert near > 1e-3 or [each.label for each in answer] == [each.label for each in answers[EAGER]]
    graph = onnx.load_from_string(quantised(model))
    weights = {each.data_type for each in graph.graph.initializer if len(each.dims) == 4}
    assert weights == {onnx.TensorProto.INT8}


def test_table_has_a_row_for_each_batch_and_contestant(table):
    ours, floors = {"fp32", "bf16"}, {"floor-fp32"}
    without = {OPENVINO_BF16} if any(OPENVINO_BF16 in note for note in table.notes) else set()  # with AVX2 alone
    for batch in (1, 2):
        rows = [row for row in table.rows if row.batch == batch]
        forms = {row.form for row in rows}
        assert forms - {"floor-bf16", "floor-int8"} == ours | floors | (PEERS - without)
        assert {row.form for row in rows if row.is_ours} == ours
        assert {row.size for row in rows} == {"64x64"}
        assert {row.rounds for row in rows} == {TINY.rounds}
    assert [row.batch for row in table.rows] == sorted(row.batch for row in table.rows)


def test_ratios_are_those_of_the_rows(table):
    rows = {(row.batch, row.form): row for row in table.rows}
    for row in table.rows:
        plain = rows[row.batch, EAGER]
        assert row.times_fp32_eager == pytest.approx(plain.ms_per_image / row.ms_per_image)
        assert 0 < row.least_ms_per_image <= row.ms_per_image
        if row.form.startswith("floor"):
            assert row.of_floor == 1.0
        elif row.numbers == "fp32":
            floor = rows[row.batch, "floor-fp32"]
            assert row.of_floor == pytest.approx(floor.ms_per_image / row.ms_per_image)
    assert rows[1, EAGER].times_fp32_eager == 1.0
    for batch in (1, 2):
        ours = [row for row in table.rows if row.is_ours and row.batch == batch]
        assert [row.is_fastest_of_ours for row in ours] == [
            row.ms_per_image == min(each.ms_per_image for each in ours) for row in ours
        ]
    assert (NO_OPENVINO in table.notes) == (find_spec("openvino") is None)


def test_table_is_written_as_text_and_json(table):
    for part in ("machine  ", "torch ", "GFLOP an image", "fastest of ours"):
        assert part in table.text()
    told = json.loads(json.dumps(table.as_json()))
    assert {"architecture", "batch", "form", "ms_per_image", "times_fp32_eager", "of_floor"} <= told["rows"][0].keys()
    assert told["operations"]["squeezenet1_1"] > 0


def test_targets_are_reported_for_each_measured_batch():
    def row(form, ms, batch=1, numbers="fp32", is_ours=True):
        return ComputeRow("resnet18", "224x224", batch, form, numbers, is_ours, 3, ms, ms, 1.0, 1.0)

    peers = (row("openvino-bf16", 1.8, 1, "bf16", False), row("openvino-fp32", 9.0, 8, "fp32", False))
    floor = row("floor-bf16", 0.5, 1, "bf16", False)
    ours = (row("fp32", 6.0), row("onnxruntime", 4.0), row("bf16", 3.2, 1, "bf16"), row("onednn-bf16", 2.0, 1, "bf16"))
    larger = (row("fp32", 12.0, 8), row("onednn-fp32", 10.0, 8))
    eight = (row("onednn-int8", 1.0, 1, "int8"), row(INT8_SESSION, 1.2, 1, "int8", False))
    alone = (row("onednn-int8", 0.5, 8, "int8"),)
    rows = sorted((*ours, *peers, floor, *larger, *eight, *alone), key=lambda each: each.batch)
    assert [(each.what, each.wanted, each.found, each.reached) for each in targets_of(rows)] == [
        ("resnet18, batch 1: the fastest form over the earlier ones", "at least 1.5", "1.6", True),
        ("resnet18, batch 1: in fp32 over the earlier ones", "at least 1.1", "1", False),
        ("resnet18, batch 1: in bf16 over OpenVINO", "at least 0.9", "0.9", True),
        ("resnet18, batch 1: in int8 over ONNX Runtime", "at least 1", "1.2", True),
        ("resnet18, batch 8: in fp32 over the earlier ones", "at least 1.1", "1.2", True),
        ("resnet18, batch 8: in fp32 over OpenVINO", "at least 0.9", "0.9", True),
    ]


def failing(*_):
    raise OutputInvalid("one/000", "NaN or infinity")


def unpackable(monkeypatch, model):
    backend = type(backend_for("squeezenet1_1"))
    pack = backend.pack

    def packed(backend, expert, precision):
        if precision is BF16:
            raise WeightsMismatch(expert.id, "no such form")
        return pack(backend, expert, precision)

    monkeypatch.setattr(backend, "precisions", frozenset({FP32, BF16}))
    monkeypatch.setattr(backend, "pack", packed)
    return "squeezenet1_1 in bf16 is not measured: expert one/000: no such form"


def uncompilable(monkeypatch, model):
    monkeypatch.setitem(contestants.OPENVINO, "openvino-fp32", ("no such numbers", torch.float32))
    return "squeezenet1_1 in openvino-fp32 is not measured: openvino-fp32: "


def failing_at_run(monkeypatch, model):
    monkeypatch.setitem(measure.PEERS, SESSION, lambda *given: replace(session(*given), run=failing))
    return f"{SESSION} is not measured: "


def unquantisable(monkeypatch, model):
    graph = onnx.load_from_string(model.graph)
    graph.graph.node[0].op_type = "NoSuchOperator"
    broken = replace(model, graph=graph.SerializeToString())
    monkeypatch.setattr(measure, "plain_model", lambda expert: having(broken, expert))
    return f"squeezenet1_1 in {INT8_SESSION} is not measured: onnxruntime in eight bits: its tools do not quantise this"


@pytest.mark.parametrize(
    ("breaks", "form", "peers"),
    [
        (unpackable, "bf16", ()),
        (uncompilable, "openvino-fp32", ("openvino-fp32",)),
        (failing_at_run, SESSION, (SESSION,)),
        (unquantisable, INT8_SESSION, (INT8_SESSION,)),
    ],
)
def test_contestant_that_cannot_run_has_a_note_and_no_row(breaks, form, peers, measured, model, monkeypatch):
    if form in OPENVINO and find_spec("openvino") is None:
        pytest.skip("openvino is not installed")
    note = breaks(monkeypatch, model)
    found = measured(batches=(1,), forms=(FP32, BF16) if form == "bf16" else (FP32,), peers=peers)
    assert form not in {row.form for row in found.rows}
    assert {EAGER, "fp32"} <= {row.form for row in found.rows}
    assert any(each.startswith(note) for each in found.notes)


@pytest.mark.slow
def test_failure_of_torch_itself_ends_the_comparison(measured, monkeypatch):
    monkeypatch.setattr(measure, "eager", lambda *given: replace(eager(*given), run=failing))
    with pytest.raises(OutputInvalid, match="NaN or infinity"):
        measured()


@pytest.mark.slow
def test_far_slower_contestant_is_tried_once_and_not_in_larger_batches(measured, monkeypatch):
    monkeypatch.setattr(measure, "HOPELESS", 6.0)
    monkeypatch.setattr(measure._ComputeBench, "_tried_s", lambda self, each: 7.0 if each.form == "bf16" else 1.0)
    found = measured()
    assert [(row.batch, row.rounds, row.ms_per_image) for row in found.rows if row.form == "bf16"] == [(1, 1, 7000.0)]
    assert [row.batch for row in found.rows if row.form == "fp32"] == [1, 2]
    assert any(note.startswith("squeezenet1_1 in bf16 took more than 6 times what fp32-eager") for note in found.notes)


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (6, 6), (8, 4), (16, 4), (18, 4)])
def test_threads_are_an_executors(cores, threads):
    box = Box("cpu", "test", ("cpu",), cores, MemorySize(2**30, 2**30), None, ())
    assert executor_threads(box) == threads


def test_form_that_the_backend_lacks_is_refused_and_threads_are_restored(measured, tmp_path):
    before = torch.get_num_threads()
    with pytest.raises(ConfigError, match=r"squeezenet1_1 does not run in int8 here - choose of .*fp32"):
        measured(forms=(Precision.INT8,))
    assert list(tmp_path.iterdir()) == []
    assert torch.get_num_threads() == before


def test_unasked_peers_are_left_out_and_omitted_rounds_noted(measured):
    found = measured(batches=(1,), peers=(SESSION,), rounds=5, limit_s=0.0)
    assert {row.form for row in found.rows if not row.form.startswith("floor-")} == {EAGER, SESSION, FP32, BF16}
    assert {row.rounds for row in found.rows} == {3}
    assert "squeezenet1_1 in batches of 1: 3 rounds of 5, as these took 0 s or more (--limit)" in found.notes


def compute(*words):
    return coserve("bench", "compute", *words)


def test_compute_command_passes_its_options_and_prints_the_table(table, monkeypatch):
    asked = []
    monkeypatch.setattr(measure, "measure_compute_forms", lambda *given: asked.append(given[1]) or table)
    words = ("--architecture", "resnet18", "--architecture", "yolov5n", "--size", "64x32", "--batches", "1,4")
    more = ("--against", "openvino-bf16", "--limit", "7")
    done = compute(*words, "--precision", "fp32,bf16", "--repeat", "3", *more, "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(json.dumps(table.as_json()))
    assert compute("--precision", "auto").stdout == table.text() + "\n"
    wanted = ComputeOptions(("resnet18", "yolov5n"), (64, 32), (1, 4), (FP32, BF16), 3, 7.0, ("openvino-bf16",))
    assert asked == [wanted, ComputeOptions(forms=())]


def test_mistyped_peer_is_refused():
    done = compute("--against", "openvino")
    assert done.exit_code == CONFIGURATION
    assert "--against: no peer 'openvino' - did you mean" in done.stderr


def test_forms_that_the_cpu_emulates_are_left_out_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr("experts.backends.forms.plain.is_multiplied", lambda name: False)
    options = replace(TINY, forms=(), batches=(1,), peers=(OPENVINO_BF16,))
    found = measure_compute_forms(tmp_path, options, lambda *_: None)
    assert not {row.form for row in found.rows} & {"bf16", "fp16", OPENVINO_BF16}
    for form in ("bf16", "fp16", OPENVINO_BF16):
        assert any(note.startswith(f"left out: {form}, which this CPU emulates") for note in found.notes)
