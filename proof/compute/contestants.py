"""Contestants: our forms as an executor runs them, torch as users run it, and the peers of PEERS.

Guarantees: all have the same weights and prepared images, make one batch of them, run it, and share the function that
reads predictions: only the running differs. Our forms are packed, read into a slot and bound as in an agent. Peers own
their weights, know the batch's shape beforehand where that is faster, and may use every thread of our executor.
"""

from __future__ import annotations

from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import numpy_helper
from safetensors.torch import load_file

from experts.backends import backend_for, family, observed_ranges
from experts.backends.forms import form_of
from experts.backends.ort.export import IMAGES, exported
from experts.backends.ort.session import REFUSALS
from experts.calibrations import CalibrationFolder
from experts.errors import BackendUnavailable
from experts.packed.calibrated import calibration_of
from experts.packed.weights import AlignedBuffer, SegmentStore, tensor_views
from profiler.bench.naive import PlainExpert, plain_expert
from profiler.workload.generated_line import packed_or_raised, synthetic_pixels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor
    from torch.nn import Module

    from experts.backends.base import Prepared
    from experts.expert import Expert, Precision, Prediction

    Batch = Sequence[Prepared]
    Run = Callable[[], Sequence[Prediction]]

CALIBRATED_ON = 8  # images
EAGER = "fp32-eager"
SESSION = "onnxruntime-session"
INT8_SESSION = "onnxruntime-int8-session"
OPENVINO_BF16 = "openvino-bf16"
OPENVINO = {"openvino-fp32": ("f32", torch.float32), OPENVINO_BF16: ("bf16", torch.bfloat16)}
NO_OPENVINO = "openvino is not installed: `pip install openvino`, one of the extras for developers"
# ONNX Runtime's tools document none of these.
QUANTISING_FAILURES = (*REFUSALS, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to run a batch. ``numbers``: its dtype. ``is_ours``: an agent can run it."""

    form: str
    numbers: torch.dtype
    is_ours: bool
    run: Run


@dataclass(frozen=True, slots=True)
class PlainModel:
    """One expert as users of torch have it. ``graph``: the same as ONNX, weights included."""

    plain: PlainExpert
    graph: bytes

    @property
    def expert(self) -> Expert:
        return self.plain.expert

    def answered(self, outputs: Sequence[Tensor], batch: Batch) -> Sequence[Prediction]:
        return self.plain.answered(self.expert, outputs, batch)


def prepared_images(expert: Expert, count: int) -> list[Prepared]:
    chance, backend = np.random.default_rng(count), backend_for(expert.architecture)
    size = (expert.pixels.height, expert.pixels.width)
    return [backend.prepare(expert, synthetic_pixels(chance, *size)) for _ in range(count)]


def plain_model(expert: Expert) -> PlainModel:
    """Raises WeightsMismatch, or ValueError where the expert cannot be exported."""
    plain = plain_expert(expert, load_file(expert.weights), strict=False)
    plain.module.requires_grad_(False)
    names = ("boxes", "scores") if family(expert.architecture) == "detector" else ("logits",)
    size = (expert.pixels.height, expert.pixels.width)
    return PlainModel(plain, _constant_graph(plain.module, size, names))


@contextmanager
def our_form(expert: Expert, precision: Precision, store: SegmentStore, batch: Batch) -> Iterator[Contestant]:
    """Our form in a slot of its own. Raises CoServeError where it cannot be packed or run here."""
    if form_of(precision).needs_calibration:
        images = _stacked(prepared_images(expert, CALIBRATED_ON))
        observe = partial(observed_ranges, expert, precision, [images])
        found = calibration_of(expert, "", CALIBRATED_ON, (), observe)
        CalibrationFolder.beside(store.directory).write(expert.id, found)
    packed = packed_or_raised(expert, precision, store)
    skeleton = backend_for(expert.architecture).skeleton(expert, precision, store.program(packed), "cpu")
    slots = [AlignedBuffer(segment.slot_bytes) for segment in packed.segments]
    numbers: torch.dtype = getattr(torch, form_of(precision).numbers)
    try:
        tensors: dict[str, Tensor] = {}
        for segment, slot in zip(packed.segments, slots, strict=True):
            store.read(segment, slot, expert.id)
            tensors |= tensor_views(slot.tensor, segment)
        skeleton.bind(tensors)
        del tensors
        yield Contestant(str(precision), numbers, True, lambda: skeleton.infer(expert, batch))
    finally:
        for slot in slots:
            slot.close()


def eager(model: PlainModel, batch: Batch) -> Contestant:
    return Contestant(EAGER, torch.float32, False, lambda: model.plain.infer(batch))


def session(model: PlainModel, batch: Batch, threads: int) -> Contestant:
    return Contestant(SESSION, torch.float32, False, _session_run(model, model.graph, batch, threads))


def int8_session(model: PlainModel, batch: Batch, threads: int) -> Contestant:
    """Raises BackendUnavailable where ONNX Runtime cannot quantise the model, OSError."""
    graph = quantised(model)
    return Contestant(INT8_SESSION, torch.int8, False, _session_run(model, graph, batch, threads))


def _session_run(model: PlainModel, graph: bytes, batch: Batch, threads: int) -> Run:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # errors only
    runtime = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])

    def run() -> Sequence[Prediction]:
        outputs = runtime.run(None, {IMAGES: _stacked(batch).numpy()})
        return model.answered([torch.from_numpy(output) for output in outputs], batch)

    return run


def quantised(model: PlainModel) -> bytes:
    """The graph in eight bits by ONNX Runtime's own tools, as it advises for x86; kept beside the expert's weights.

    Static QDQ: values in uint8 by the extremes seen on CALIBRATED_ON images like those it is timed on, weights in int8
    with a scale for each output channel. Raises BackendUnavailable where the tools fail.
    """
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Images(CalibrationDataReader):  # type: ignore[misc]  # onnxruntime has no types
        left = iter(prepared_images(model.expert, CALIBRATED_ON))

        def get_next(self) -> dict[str, np.ndarray] | None:
            image = next(self.left, None)
            return None if image is None else {IMAGES: image.tensor[None].numpy()}

    kept = model.expert.weights.with_suffix(".int8.onnx")
    if kept.exists():
        return kept.read_bytes()
    with TemporaryDirectory(dir=kept.parent) as name:
        given, ready, made = (Path(name) / f"{each}.onnx" for each in ("given", "ready", "made"))
        given.write_bytes(model.graph)
        try:
            quant_pre_process(str(given), str(ready), skip_symbolic_shape=True)  # only the batch's size is unknown
            quantize_static(
                ready,
                made,
                Images(),
                quant_format=QuantFormat.QDQ,
                per_channel=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
            )
        except QUANTISING_FAILURES as error:
            raise BackendUnavailable("onnxruntime in eight bits", f"its tools do not quantise this: {error}") from error
        made.replace(kept)
    return kept.read_bytes()


def has_openvino() -> bool:
    return find_spec("openvino") is not None


def openvino(form: str, model: PlainModel, batch: Batch, threads: int) -> Contestant:
    """OpenVINO compiled for exactly this batch and for latency. ``form``: one of OPENVINO.

    Raises BackendUnavailable where OpenVINO does not compile the graph for this CPU.
    """
    from openvino import Core

    hint, numbers = OPENVINO[form]
    core = Core()
    graph = core.read_model(model.graph)
    graph.reshape([len(batch), 3, model.expert.pixels.height, model.expert.pixels.width])
    wanted = {"INFERENCE_PRECISION_HINT": hint, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads}
    try:
        compiled = core.compile_model(graph, "CPU", wanted)
    except RuntimeError as error:
        raise BackendUnavailable(form, str(error).strip().rpartition("\n")[2]) from error
    request = compiled.create_infer_request()

    def run() -> Sequence[Prediction]:
        request.infer([_stacked(batch).numpy()])
        outputs = [torch.from_numpy(request.get_output_tensor(place).data) for place in range(len(compiled.outputs))]
        return model.answered(outputs, batch)

    return Contestant(form, numbers, False, run)


PEERS: dict[str, Callable[[PlainModel, Batch, int], Contestant]] = {
    SESSION: session,
    INT8_SESSION: int8_session,
    **{form: partial(openvino, form) for form in OPENVINO},
}


def _stacked(batch: Batch) -> Tensor:
    return torch.stack([prepared.tensor for prepared in batch])


def _constant_graph(module: Module, size: tuple[int, int], outputs: Sequence[str]) -> bytes:
    graph: onnx.ModelProto = exported(deepcopy(module).to("meta"), size, outputs)
    weights = module.state_dict()
    inputs = list(graph.graph.input)
    constants = list(graph.graph.initializer)
    constants += [numpy_helper.from_array(weights[each.name].numpy(), each.name) for each in inputs
                  if each.name != IMAGES]  # fmt: skip
    read = {name for node in graph.graph.node for name in node.input}
    graph.graph.ClearField("initializer")
    graph.graph.initializer.extend(each for each in constants if each.name in read)
    graph.graph.ClearField("input")
    graph.graph.input.extend(each for each in inputs if each.name == IMAGES)
    serialised: bytes = graph.SerializeToString()
    return serialised
