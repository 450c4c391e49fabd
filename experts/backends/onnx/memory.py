"""Memory that an ONNX graph needs beside its weights, from inferred shapes."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import onnx
from onnx.helper import tensor_dtype_to_np_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping


def peak_bytes(model: onnx.ModelProto, images: str, shape: tuple[int, ...]) -> int:
    """The most that values take at once, in the graph's order; an unknown shape counts as the largest."""
    sizes = _value_bytes(model, images, shape)
    guess = max(sizes.values(), default=0)
    weights = {tensor.name for tensor in model.graph.initializer}
    last_use = {name: place for place, node in enumerate(model.graph.node) for name in node.input}
    outputs = {value.name for value in model.graph.output}
    live = {images: sizes[images]}
    peak = sizes[images]
    for place, node in enumerate(model.graph.node):
        live.update({name: sizes.get(name, guess) for name in node.output if name and name not in weights})
        peak = max(peak, sum(live.values()))
        live = {name: size for name, size in live.items() if name in outputs or last_use.get(name, place) > place}
    return peak


def _value_bytes(model: onnx.ModelProto, images: str, shape: tuple[int, ...]) -> Mapping[str, int]:
    sized = onnx.ModelProto()
    sized.CopyFrom(model)
    for value in sized.graph.input:
        if value.name == images:
            for dimension, extent in zip(value.type.tensor_type.shape.dim, shape, strict=True):
                dimension.dim_value = extent
    inferred = onnx.shape_inference.infer_shapes(sized)
    values = [*inferred.graph.input, *inferred.graph.value_info, *inferred.graph.output]
    known = {value.name: _bytes_of(value.type.tensor_type) for value in values}
    return {name: size for name, size in known.items() if size is not None}


def _bytes_of(kind: onnx.TypeProto.Tensor) -> int | None:
    if not kind.elem_type or not kind.HasField("shape"):
        return None
    extents = [dimension.dim_value for dimension in kind.shape.dim]
    if any(not dimension.HasField("dim_value") for dimension in kind.shape.dim):
        return None
    return int(prod(extents) * tensor_dtype_to_np_dtype(kind.elem_type).itemsize)
