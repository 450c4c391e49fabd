"""Contestants: our forms as an executor runs them, torch as users run it, ONNX Runtime (also int8), OpenVINO.

Guarantees: all have the same weights and prepared images, make one batch of them, run it, and share the function that
reads predictions: only the running differs. Our forms are packed, read into a slot and bound as in an agent. Others own
their weights, know the batch's shape beforehand where that is faster, and may use every thread of our executor.
"""

from __future__ import annotations

from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import numpy_helper
from safetensors.torch import load_file

from experts.backends import backend_for, family, observed_ranges
from experts.backends.onednn.backend_forms import ONEDNN_NUMBERS
from experts.backends.onnx.export import IMAGES, exported
from experts.backends.state_dict import DTYPES
from experts.calibrations import CalibrationFolder
from experts.errors import BackendUnavailable
from experts.expert import Precision
from experts.packed.calibrated import calibration_of
from experts.packed.packing import pack_line
from experts.packed.weights import AlignedBuffer, SegmentStore, tensor_views
from profiler.bench.plain_models import build
from profiler.workload.generated_line import synthetic_pixels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor
    from torch.nn import Module

    from experts.backends.base import Prepared
    from experts.backends.onnx.runtime_form import Answered
    from experts.expert import Expert, Prediction

    Batch = Sequence[Prepared]
    Run = Callable[[], Sequence[Prediction]]

CALIBRATED_ON = 8  # images
EAGER = "fp32-eager"
SESSION = "onnxruntime-session"
INT8_SESSION = "onnxruntime-int8-session"
OPENVINO = {"openvino-fp32": ("f32", torch.float32), "openvino-bf16": ("bf16", torch.bfloat16)}
PEERS = (SESSION, INT8_SESSION, *OPENVINO)  # that are set beside our forms, as they are asked for
NO_OPENVINO = "openvino is not installed: `pip install openvino`, one of the extras for developers"


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to run a batch. ``numbers``: its dtype. ``is_ours``: an agent can run it."""

    form: str
    numbers: torch.dtype
    is_ours: bool
    run: Run


@dataclass(frozen=True, slots=True)
class Model:
    """One expert, and the same weights in the module as its users have it. ``graph``: as ONNX, weights included.

    ``quantised``: the same graph in eight bits; None: it is not wanted, or cannot be had.
    """

    expert: Expert
    module: Module
    graph: bytes
    answered: Answered
    quantised: bytes | None = None

    @property
    def size(self) -> tuple[int, int]:
        return self.expert.pixels.height, self.expert.pixels.width


def prepared_images(expert: Expert, count: int) -> list[Prepared]:
    chance, backend = np.random.default_rng(count), backend_for(expert.architecture)
    size = (expert.pixels.height, expert.pixels.width)
    return [backend.prepare(expert, synthetic_pixels(chance, *size)) for _ in range(count)]


def plain_model(expert: Expert) -> Model:
    """Raises WeightsMismatch, or ValueError where the expert cannot be exported."""
    is_detector = family(expert.architecture) == "detector"
    module = build(expert).eval().requires_grad_(False)
    module.load_state_dict(load_file(expert.weights), strict=False)
    if is_detector:
        from experts.backends.detector import reader_of

        module.model[-1].training = True  # of the head alone: it answers with its raw outputs, as ours do
    else:
        from experts.backends.classifier import reader_of
    names = ("boxes", "scores") if is_detector else ("logits",)
    size = (expert.pixels.height, expert.pixels.width)
    return Model(expert, module, _constant_graph(module, size, names), reader_of(expert))


@contextmanager
def our_form(expert: Expert, precision: Precision, store: SegmentStore, batch: Batch) -> Iterator[Contestant]:
    """Our form in a slot of its own. Raises CoServeError where it cannot be packed or run here."""
    if precision is Precision.ONEDNN_INT8:
        calibrate(expert, store)
    report = pack_line([expert], lambda _: {precision}, store)
    for error in report.failed.values():
        raise error
    packed = report.packed[expert.id][precision]
    backend = backend_for(expert.architecture)
    skeleton = backend.skeleton(expert, precision, store.program(packed), "cpu")
    slots = [AlignedBuffer(segment.slot_bytes) for segment in packed.segments]
    try:
        tensors: dict[str, Tensor] = {}
        for segment, slot in zip(packed.segments, slots, strict=True):
            store.read(segment, slot, expert.id)
            tensors |= tensor_views(slot.tensor, segment)
        skeleton.bind(tensors)
        del tensors
        yield Contestant(str(precision), _numbers(precision), True, lambda: skeleton.infer(expert, batch))
    finally:
        for slot in slots:
            slot.close()


def calibrate(expert: Expert, store: SegmentStore) -> None:
    """For eight bits, on images like those it is timed on."""
    images = _stacked(prepared_images(expert, CALIBRATED_ON))
    ranges = observed_ranges(expert, [images])
    found = calibration_of(expert, "", CALIBRATED_ON, (), ranges)
    CalibrationFolder.beside(store.directory).write(expert.id, found)


def _numbers(precision: Precision) -> torch.dtype:
    return torch.int8 if precision is Precision.INT8 else ONEDNN_NUMBERS.get(precision) or DTYPES[precision]


def eager(model: Model, batch: Batch) -> Contestant:
    """The plain module in fp32, batches as they come: channels first."""

    def run() -> Sequence[Prediction]:
        with torch.inference_mode():
            output = model.module(_stacked(batch))
            outputs = (output,) if isinstance(output, torch.Tensor) else (output["boxes"], output["scores"])
            return model.answered(model.expert, outputs, batch)

    return Contestant(EAGER, torch.float32, False, run)


def session(model: Model, batch: Batch, threads: int) -> Contestant:
    return Contestant(SESSION, torch.float32, False, _session_run(model, model.graph, batch, threads))


def int8_session(model: Model, graph: bytes, batch: Batch, threads: int) -> Contestant:
    return Contestant(INT8_SESSION, torch.int8, False, _session_run(model, graph, batch, threads))


def _session_run(model: Model, graph: bytes, batch: Batch, threads: int) -> Run:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # errors only
    runtime = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])

    def run() -> Sequence[Prediction]:
        outputs = runtime.run(None, {IMAGES: _stacked(batch).numpy()})
        return model.answered(model.expert, [torch.from_numpy(output) for output in outputs], batch)

    return run


def has_openvino() -> bool:
    return find_spec("openvino") is not None


def openvino(model: Model, batch: Batch, threads: int, form: str) -> Contestant:
    """OpenVINO compiled for exactly this batch and for latency. ``form``: one of OPENVINO.

    Raises BackendUnavailable where OpenVINO does not compile the graph for this CPU.
    """
    from openvino import Core

    hint, numbers = OPENVINO[form]
    core = Core()
    graph = core.read_model(model.graph)
    graph.reshape([len(batch), 3, *model.size])
    wanted = {"INFERENCE_PRECISION_HINT": hint, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads}
    try:
        compiled = core.compile_model(graph, "CPU", wanted)
    except RuntimeError as error:
        raise BackendUnavailable(form, str(error).strip().rpartition("\n")[2]) from error
    request = compiled.create_infer_request()

    def run() -> Sequence[Prediction]:
        request.infer([_stacked(batch).numpy()])
        outputs = [torch.from_numpy(request.get_output_tensor(place).data) for place in range(len(compiled.outputs))]
        return model.answered(model.expert, outputs, batch)

    return Contestant(form, numbers, False, run)


def _stacked(batch: Batch) -> Tensor:
    return torch.stack([prepared.tensor for prepared in batch])


def _constant_graph(module: Module, size: tuple[int, int], outputs: Sequence[str]) -> bytes:
    """The module as an ONNX graph that holds its weights."""
    graph: onnx.ModelProto = exported(deepcopy(module).to("meta"), size, outputs)
    weights = module.state_dict()
    named = [value.name for value in graph.graph.input if value.name != IMAGES]
    for name in named:
        graph.graph.initializer.append(numpy_helper.from_array(weights[name].numpy(), name))
    _drop_unread_constants(graph)
    images = [value for value in graph.graph.input if value.name == IMAGES]
    graph.graph.ClearField("input")
    graph.graph.input.extend(images)
    serialised: bytes = graph.SerializeToString()
    return serialised


def _drop_unread_constants(graph: onnx.ModelProto) -> None:
    """ONNX Runtime would complain about each on the terminal. In place."""
    read = {name for node in graph.graph.node for name in node.input}
    constants = [tensor for tensor in graph.graph.initializer if tensor.name in read]
    graph.graph.ClearField("initializer")
    graph.graph.initializer.extend(constants)
