"""Inputs of ONNX graphs: which forms of images are served, and the nodes that make them of the agent's form.

The agent's images are float32 (n, 3, height, width). A graph may take one channel, channels last, uint8 or float16, or
one image without a batch: packing puts a reshape, a transpose, a choice of one channel or a cast before it. Detectors
that scale their boxes to a second input, the size of the image, get the size of their input there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from experts.backends.onnx.heading import FLOAT, FLOAT16, INT64, UINT8
from experts.backends.onnx.layouts import TARGET_SIZES, mismatch, shown_shape
from experts.expert import Normalization

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx

    from experts.backends.onnx.heading import Value
    from experts.expert import Expert

AS_PIXELS = "normalize: {mean: [0, 0, 0], std: [1, 1, 1], scale: 255}"
TYPES = {FLOAT: "float32", FLOAT16: "float16", UINT8: "uint8"}


@dataclass(frozen=True, slots=True)
class InputForm:
    """Form of a graph's images. ``height``, ``width``: None for any."""

    name: str
    element: int
    channels: int
    height: int | None
    width: int | None
    is_last: bool = False  # channels last
    is_single: bool = False  # one image, without a batch

    @property
    def is_agents(self) -> bool:
        return (self.element, self.channels, self.is_last, self.is_single) == (FLOAT, 3, False, False)


def form_of(values: Sequence[Value]) -> InputForm | None:
    """Form of the one input of images. None: nothing that is served."""
    images = [value for value in values if value.name != TARGET_SIZES]
    if len(images) != 1 or images[0].element not in TYPES or images[0].shape is None:
        return None
    name, shape = images[0].name, images[0].shape
    is_single, extents = len(shape) == 3, shape[-3:]
    if len(shape) not in {3, 4} or (is_single and None in shape):
        return None
    is_last = extents[0] not in {1, 3} and extents[2] in {1, 3}
    channels, height, width = (extents[2], *extents[:2]) if is_last else extents
    if channels not in {1, 3, None}:
        return None
    return InputForm(name, int(images[0].element or 0), channels or 3, height, width, is_last, is_single)


def required_form(expert: Expert, values: Sequence[Value]) -> InputForm:
    """WeightsMismatch unless the one input takes images of the expert's size and pixels."""
    images = [value for value in values if value.name != TARGET_SIZES]
    if len(images) != 1:
        names = ", ".join(value.name for value in images) or "none"
        raise mismatch(expert, f"must have one input, the images; it has {names}")
    form, (height, width) = form_of(values), expert.pixels.size
    if form is None or form.height not in {None, height} or form.width not in {None, width}:
        wanted = f"(n, 3, {height}, {width})"
        raise mismatch(
            expert, f"does not take float32 {wanted} but {shown_shape(images[0].shape or ())}: correct `input`"
        )
    _require_pixels(expert, form)
    return form


def _require_pixels(expert: Expert, form: InputForm) -> None:
    given = expert.pixels.normalize
    is_grey = isinstance(given, Normalization) and given.channels == "grey"
    if form.channels == 1 and not is_grey:
        takes = "one channel: write `normalize` with `channels: grey`, and the same number three times"
        raise mismatch(expert, f"takes {takes}")
    if form.channels == 1 and isinstance(given, Normalization) and len({*given.mean}) + len({*given.std}) > 2:
        raise mismatch(expert, "takes one channel: `normalize` has different numbers for it, write one three times")
    is_whole = isinstance(given, Normalization) and (given.scale, {*given.mean}, {*given.std}) == (255, {0.0}, {1.0})
    if form.element == UINT8 and not is_whole:
        raise mismatch(expert, f"takes uint8, pixels as they are: write `{AS_PIXELS}`")


def take_agents_form(model: onnx.ModelProto, form: InputForm, size: tuple[int, int]) -> onnx.ValueInfoProto:
    """Make a graph take the agent's form; returns its input. In place."""
    from onnx import helper, numpy_helper

    _settle_targets(model, size)
    images = next(value for value in model.graph.input if value.name == form.name)
    for extent in images.type.tensor_type.shape.dim:
        if extent.dim_value < 0:  # open, as Paddle's exporter writes it
            extent.Clear()
    if form.is_agents:
        return images
    shape = images.type.tensor_type.shape
    batch = (1, "") if form.is_single else (shape.dim[0].dim_value, shape.dim[0].dim_param)
    images.name = f"{form.name}.batch"
    images.type.tensor_type.elem_type = FLOAT
    shape.ClearField("dim")
    for extent in (batch[0] or batch[1] or None, 3, form.height or "height", form.width or "width"):
        shape.dim.add(**{"dim_param" if isinstance(extent, str) else "dim_value": extent} if extent else {})
    steps: list[tuple[str, list[str], dict[str, object]]] = []
    if form.channels == 1:
        model.graph.initializer.append(numpy_helper.from_array(np.array([0]), f"{form.name}.first"))
        steps.append(("Gather", [f"{form.name}.first"], {"axis": 1}))
    if form.element != FLOAT:
        steps.append(("Cast", [], {"to": form.element}))
    if form.is_last:
        steps.append(("Transpose", [], {"perm": [0, 2, 3, 1]}))
    if form.is_single:
        extents = (form.height, form.width, form.channels) if form.is_last else (form.channels, form.height, form.width)
        model.graph.initializer.append(numpy_helper.from_array(np.array(extents, np.int64), f"{form.name}.shape"))
        steps.append(("Reshape", [f"{form.name}.shape"], {}))
    names = [images.name, *(f"{form.name}.{number}" for number in range(1, len(steps))), form.name]
    for number, (operator, constants, attributes) in enumerate(steps):
        node = helper.make_node(operator, [names[number], *constants], [names[number + 1]], **attributes)
        model.graph.node.insert(number, node)
    return images


def _settle_targets(model: onnx.ModelProto, size: tuple[int, int]) -> None:
    """Put the input's width and height in the place of the size that a detector scales its boxes to. In place."""
    from onnx import numpy_helper

    for value in model.graph.input:
        if value.name == TARGET_SIZES:
            kind = np.int64 if value.type.tensor_type.elem_type == INT64 else np.float32
            model.graph.initializer.append(numpy_helper.from_array(np.array([[size[1], size[0]]], kind), TARGET_SIZES))
            model.graph.input.remove(value)
            return
