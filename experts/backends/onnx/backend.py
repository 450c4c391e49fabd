"""ONNX graphs on ONNX Runtime: classifiers, detectors and anomaly experts of any exporter.

Inputs are the agent's images, see ``inputs``; behind them a graph may compute in eight bits. Building a session takes
most of a second, too long for a switch. So packing folds constants and BatchNorm with ONNX Runtime, then lifts the
weights out: they become inputs. The rest is the program: experts of one program share a session. Outputs: see
``answers`` (classifiers), ``detections`` and ``anomaly``.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import lru_cache, partial
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import onnx
import torch
from onnx import TensorProto, numpy_helper
from onnx.helper import tensor_dtype_to_np_dtype
from onnxruntime import GraphOptimizationLevel

from experts.backends.base import Packable, WeightBytes, require_images
from experts.backends.batches import await_writes, stacked
from experts.backends.onnx import anomaly, answers, detections
from experts.backends.onnx.answers import probe_images, probed
from experts.backends.onnx.evidence import least_score
from experts.backends.onnx.heading import read_heading
from experts.backends.onnx.inputs import required_form, take_agents_form
from experts.backends.onnx.layouts import mismatch, read_detections, require_names, require_served
from experts.backends.onnx.neighbours import why_alone
from experts.backends.onnx.pruning import keep_outputs, propagate_nan
from experts.backends.onnx.sandbox import packed_apart
from experts.backends.ort.session import REFUSALS, number_of, optimised, session_once, shared_session
from experts.backends.outputs import is_finite
from experts.backends.vision.pixels import fitted
from experts.backends.weight_files import read_graph, read_onnx
from experts.errors import OutputInvalid, WeightsCorrupt, WeightsMismatch, WeightsRefused
from experts.expert import Fit, Precision, Task

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from onnxruntime import InferenceSession, IOBinding
    from torch import Tensor

    from experts.backends.base import Prepared
    from experts.expert import Expert, Prediction

LIFTED_BYTES = 1024  # a float constant of this size is a weight, for any reader
WEIGHT_READERS = frozenset(
    {"Add", "BatchNormalization", "Conv", "ConvTranspose", "Div", "Gemm", "GroupNormalization", "InstanceNormalization"}
    | {"LayerNormalization", "MatMul", "Mul", "PRelu", "Sub"}
)  # a smaller constant is a weight if only these read it; elsewhere it may steer shapes, and has to stay constant
FEW_BITS = "weights of few bits lie beside the program"  # in manifests
QUANTISED = frozenset({TensorProto.INT8, TensorProto.UINT8, TensorProto.INT16, TensorProto.INT32})
QUANTISED_READERS = frozenset(  # operators and the place of their weights of few bits, whose scales stay constant
    {("DequantizeLinear", 0), ("QLinearConv", 3), ("QLinearConv", 8), ("QLinearMatMul", 3)}
    | {("ConvInteger", 1), ("MatMulInteger", 1)}
)
SCALED = frozenset({"DequantizeLinear", "QuantizeLinear", "QLinearConv", "QLinearMatMul"})
_OF_DETECTORS = frozenset({Fit.LETTERBOXED, Fit.FILLED, Fit.PADDED})
NOISY = slice(2, 4)  # of the synthetic images: those with the most varied boxes
SHOWN = slice(1, 4)  # those that detectors are asked for alone and together, a white one among them
NUMPY_TYPES = {
    torch.float32: np.float32, torch.float64: np.float64, torch.float16: np.float16,
    torch.int8: np.int8, torch.uint8: np.uint8, torch.int16: np.int16, torch.int32: np.int32,
}  # fmt: skip


class OnnxSkeleton:
    """One session, shared by all skeletons of its program; weights are passed by address with every batch."""

    def __init__(self, session: InferenceSession, device: str) -> None:
        self._session = session
        notes, names = session.get_modelmeta().custom_metadata_map, [output.name for output in session.get_outputs()]
        self._read: partial[tuple[Prediction, ...]]
        self._limit: float | None = None
        if (layout := detections.noted(notes)) is not None:
            self._outputs, self._read = names, partial(detections.predictions, layout)
            self._limit = detections.noted_limit(notes)
        elif (outputs := anomaly.noted(notes)) is not None:
            self._outputs, self._read = list(outputs.names), partial(anomaly.predictions, outputs)
        else:
            self._outputs, self._read = names[:1], partial(answers.predictions, answers.noted(notes))
        self._device = torch.device(device)
        self._tensors: Mapping[str, Tensor] = {}
        self._images = ""
        self._batch_size: int | None = None

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        inputs = {node.name: node for node in self._session.get_inputs()}
        images = inputs.keys() - tensors.keys()
        if len(images) != 1 or tensors.keys() - inputs.keys():
            raise ValueError(f"tensors do not fit the skeleton: {sorted(tensors.keys() ^ inputs.keys())[:5]}")
        if not all(tensor.is_contiguous() for tensor in tensors.values()):
            raise ValueError("ONNX Runtime reads contiguous tensors only")
        self._images = images.pop()
        count = inputs[self._images].shape[0]
        self._batch_size = count if isinstance(count, int) else None
        self._tensors = dict(tensors)

    def infer(self, expert: Expert, batch: Sequence[Prepared]) -> tuple[Prediction, ...]:
        require_images(batch)
        if (fault := detections.below_limit(expert, self._limit)) is not None:
            raise OutputInvalid(expert.id, f"its graph {fault}")
        images = stacked([prepared.tensor for prepared in batch], self._device)
        size = self._batch_size or len(batch)
        runs = [self._run(_filled(images[start : start + size], size)) for start in range(0, len(batch), size)]
        return self._read(expert, runs, batch)

    def fed(self, images: Tensor) -> IOBinding:
        """Inputs and outputs of a run, by address. Made per batch: the session keeps no expert's data."""
        feeds, number = self._session.io_binding(), number_of(self._device)
        for name, tensor in (*self._tensors.items(), (self._images, images)):
            element = NUMPY_TYPES[tensor.dtype]
            feeds.bind_input(name, self._device.type, number, element, list(tensor.shape), tensor.data_ptr())
        for name in self._outputs:
            feeds.bind_output(name, "cpu")
        return feeds

    def _run(self, images: Tensor) -> list[np.ndarray]:
        feeds = self.fed(images)
        await_writes(self._device)  # the session uses another CUDA stream
        self._session.run_with_iobinding(feeds)
        feeds.synchronize_outputs()
        outputs: list[np.ndarray] = feeds.copy_outputs_to_cpu()
        return outputs


class OnnxBackend:
    """Implements ``experts.backends.base.Backend`` for users' ONNX graphs."""

    precisions = frozenset({Precision.FP32})

    def pack(self, expert: Expert, precision: Precision) -> Packable:
        if precision not in self.precisions:
            raise WeightsMismatch(expert.id, f"ONNX graphs run in fp32 only, not in {precision}")
        _require_onnx(expert)
        heading = read_heading(expert.id, expert.weights)
        required_form(expert, heading.inputs)
        if expert.task is not Task.ANOMALY:  # labels of anomaly experts are chosen in the line file
            require_names(expert, heading.names)
        found = packed_apart(expert, packed)
        return replace(found, remark=why_alone(found.program))

    def check(self, expert: Expert) -> None:
        _require_onnx(expert)
        required_form(expert, read_heading(expert.id, expert.weights).inputs)
        require_served(expert)
        found = None if expert.task is not None else read_detections(expert)
        if found is not None and found.kind.chooses:
            limit = least_score(read_graph(expert.id, expert.weights).graph, found.outputs)
            if (fault := detections.below_limit(expert, limit)) is not None:
                raise mismatch(expert, fault)

    def template(self, expert: Expert, precision: Precision, program: bytes, device: str) -> object:
        return self.skeleton(expert, precision, program, device)  # it holds the session

    def skeleton(self, expert: Expert, precision: Precision, program: bytes, device: str) -> OnnxSkeleton:
        return OnnxSkeleton(shared_session(program, torch.get_num_threads(), device), device)

    def prepare(self, expert: Expert, image: np.ndarray) -> Prepared:
        return fitted(image, expert.pixels)

    def recipe(self, expert: Expert, precision: Precision) -> str:
        if expert.task is Task.ANOMALY:
            own = anomaly.RECIPE
        elif expert.task is Task.MULTILABEL:
            own = f"{answers.RECIPE}, label by label"
        else:
            is_detector = expert.pixels.fit in _OF_DETECTORS or expert.detector is not None
            own = f"{detections.RECIPE}: {', '.join(expert.labels)}" if is_detector else answers.RECIPE
            own += "" if expert.detector is None else f" ({expert.detector})"
        return f"{own}; {FEW_BITS}"

    def token_bytes(self, expert: Expert, precision: Precision) -> int:
        return 0

    def weight_bytes(self, expert: Expert, precision: Precision) -> WeightBytes:
        return WeightBytes(expert.weights.stat().st_size)

    def workspace_bytes(self, expert: Expert, precision: Precision, batch_size: int) -> int:
        status = expert.weights.stat()
        stamp = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        return _workspace_bytes(expert, stamp) * batch_size


def _require_onnx(expert: Expert) -> None:
    if expert.weights.suffix != ".onnx":
        raise WeightsRefused(expert.id, f"{expert.weights}: architecture onnx takes an .onnx file")


def packed(expert: Expert) -> Packable:
    """Read the expert's graph, try it on synthetic images and lift its weights out. Raises as ``Backend.pack``.

    Runs in the process of ``sandbox``.
    """
    model = read_onnx(expert.id, expert.weights)
    images = _images_of(expert, model)
    try:
        folded = _understood(expert, model, images)
    except REFUSALS as error:
        raise mismatch(expert, f"does not run on ONNX Runtime: {error}") from error
    propagate_nan(folded)
    tensors = _lift(folded)
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            raise WeightsCorrupt(expert.id, f"{expert.weights}: {name} holds NaN or infinity")
    return Packable(tensors, program=folded.SerializeToString(deterministic=True))


def _understood(expert: Expert, model: onnx.ModelProto, images: onnx.ValueInfoProto) -> onnx.ModelProto:
    """Graph to run, still in standard operators, with its outputs' meaning."""
    if expert.task is Task.ANOMALY:
        outputs = anomaly.settle_outputs(expert, model)
        folded = optimised(model, GraphOptimizationLevel.ORT_ENABLE_BASIC)
        anomaly.note(folded, outputs)
        return folded
    found = None if expert.task is Task.MULTILABEL else read_detections(expert)
    if found is not None:
        keep_outputs(model, found.outputs)
        if found.at_once is not None:
            images.type.tensor_type.shape.dim[0].dim_value = found.at_once
    folded = optimised(model, GraphOptimizationLevel.ORT_ENABLE_BASIC)
    synthetic = probe_images(expert.pixels)
    if found is None:
        answers.settle_alone(expert, folded, synthetic)
        session = session_once(folded.SerializeToString())
        answers.note(folded, answers.decided(expert, folded, session, synthetic))
    else:
        session = session_once(folded.SerializeToString())
        first, *_ = probed(session, synthetic[NOISY], 1)
        layout = detections.decided(expert, found, first)
        if found.at_once is None:
            detections.settle_alone(expert, folded, layout, synthetic[SHOWN])
        limit = least_score(model.graph, found.outputs)
        if (fault := detections.below_limit(expert, limit)) is not None:
            raise mismatch(expert, fault)
        detections.note(folded, layout, limit)
    return folded


def _filled(images: Tensor, size: int) -> Tensor:
    """Fill up to ``size`` images by repeating the last: an empty image might give NaN."""
    if len(images) == size:
        return images.contiguous()
    return torch.cat((images, images[-1:].expand(size - len(images), *images.shape[1:])))


def _images_of(expert: Expert, model: onnx.ModelProto) -> onnx.ValueInfoProto:
    """The one input that is not a weight, in the agent's form. In place."""
    form = required_form(expert, read_heading(expert.id, expert.weights).inputs)
    return take_agents_form(model, form, expert.pixels.size)


def _lift(model: onnx.ModelProto) -> dict[str, Tensor]:
    """Turn the weights of a graph into inputs; returns them by name, sorted. In place."""
    graph = model.graph
    readers: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)
    for node in graph.node:
        for place, name in enumerate(node.input):
            readers[name].add((node.op_type, place))
    weights = [tensor for tensor in graph.initializer if _is_weight(tensor, readers[tensor.name])]
    names = {tensor.name for tensor in weights}
    kept = [tensor for tensor in graph.initializer if tensor.name not in names]
    inputs = [value for value in graph.input if value.name not in names]
    lifted = sorted(weights, key=lambda tensor: tensor.name)
    graph.ClearField("initializer")
    graph.initializer.extend(kept)
    graph.ClearField("input")
    graph.input.extend(inputs)
    graph.input.extend(onnx.helper.make_tensor_value_info(w.name, w.data_type, list(w.dims)) for w in lifted)
    return {tensor.name: torch.from_numpy(numpy_helper.to_array(tensor).copy()) for tensor in lifted}


def _is_weight(tensor: onnx.TensorProto, readers: set[tuple[str, int]]) -> bool:
    if tensor.data_type in QUANTISED:
        return bool(readers) and readers <= QUANTISED_READERS and numpy_helper.to_array(tensor).nbytes >= LIFTED_BYTES
    operators = {operator for operator, _ in readers}
    if tensor.data_type not in {TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16} or operators & SCALED:
        return False
    values = numpy_helper.to_array(tensor)
    return values.nbytes >= LIFTED_BYTES or (values.size > 1 and bool(operators) and operators <= WEIGHT_READERS)


@lru_cache(maxsize=1024)
def _workspace_bytes(expert: Expert, stamp: tuple[int, ...]) -> int:
    """Workspace of one image: the most that values take at once, in the graph's order. ``stamp``: changes with the
    file.

    A value of unknown shape counts as the largest.
    """
    model = read_onnx(expert.id, expert.weights)
    images = _images_of(expert, model)
    for dimension, extent in zip(images.type.tensor_type.shape.dim, (1, 3, *expert.pixels.size), strict=True):
        dimension.dim_value = extent
    sizes = _value_bytes(model)
    guess = max(sizes.values(), default=0)
    weights = {tensor.name for tensor in model.graph.initializer}
    last_use = {name: place for place, node in enumerate(model.graph.node) for name in node.input}
    outputs = {value.name for value in model.graph.output}
    live = {images.name: sizes[images.name]}
    peak = sizes[images.name]
    for place, node in enumerate(model.graph.node):
        live.update({name: sizes.get(name, guess) for name in node.output if name and name not in weights})
        peak = max(peak, sum(live.values()))
        live = {name: size for name, size in live.items() if name in outputs or last_use.get(name, place) > place}
    return peak


def _value_bytes(model: onnx.ModelProto) -> dict[str, int]:
    """Sizes of the values whose shapes can be inferred."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    found = {}
    for value in (*graph.input, *graph.value_info, *graph.output):
        kind = value.type.tensor_type
        if kind.elem_type and kind.HasField("shape") and all(extent.HasField("dim_value") for extent in kind.shape.dim):
            extents = [extent.dim_value for extent in kind.shape.dim]
            found[value.name] = int(prod(extents) * tensor_dtype_to_np_dtype(kind.elem_type).itemsize)
    return found
