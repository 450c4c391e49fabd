"""Tensors of the Open Inference Protocol: images and their boards in, verdicts out.

Guarantees: a tensor with contradictory name, type, shape or bytes is refused with a message, before it is converted. So
is a tensor with more elements than a line takes images at once, of any size.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import struct
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING

from agent.doors import parameters
from agent.doors.orders import pixels
from agent.doors.parameters import BASE64, CONTENT_TYPE, invalid
from agent.doors.proto import inference_pb2 as pb
from agent.doors.refusals import text
from agent.faults.errors import OrderRefused, Reason
from agent.subject import CALLER_PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from agent.doors.desk import VerdictView

    Image = bytes | NDArray[np.uint8]

IMAGE, BOARD, REF = "IMAGE", "BOARD", "REF"
BYTES, UINT8, FP32 = "BYTES", "UINT8", "FP32"
OUTPUTS = {"VERDICT": BYTES, "LABEL": BYTES, "SCORE": FP32, "DETAIL": BYTES}
ANOMALY_SCORE, ANOMALY_MAP = "ANOMALY_SCORE", "ANOMALY_MAP"
ANOMALY_OUTPUTS = {ANOMALY_SCORE: FP32, ANOMALY_MAP: BYTES}  # of models that measure anomalies, if requested
MOST_OUTPUTS = 100  # in one call, repetitions included
# How base64 of an image file begins: PNG, JPEG, BMP, TIFF, WebP, and a browser's canvas. No image file begins so.
BASE64_STARTS = (b"iVBORw0KGgo", b"/9j/", b"Qk0", b"Qk1", b"Qk2", b"Qk3", b"SUkq", b"TU0A", b"UklGR", b"data:image/")
MANY_NUMBERS = 50_000
SHARED_MEMORY = "shared_memory_region"

Tensor = pb.ModelInferRequest.InferInputTensor


@dataclass(frozen=True, slots=True, eq=False)
class InferInputs:
    """Images of one call, each with its board and reference, if given; then ``named``, the parameters, too."""

    images: tuple[Image, ...]
    boards: tuple[str | None, ...]
    refs: tuple[str | None, ...]
    outputs: tuple[str, ...]
    is_raw: bool  # raw tensors in, so raw tensors out
    named: Mapping[str, str]


def takes_long(request: pb.ModelInferRequest) -> bool:
    """True if ``inputs_of`` takes more than milliseconds: each typed number becomes an object on its way."""
    return any(len(each.contents.uint_contents) > MANY_NUMBERS for each in request.inputs)


def inputs_of(request: pb.ModelInferRequest, most_images: int) -> InferInputs:
    """Inputs and outputs of a call. Raises OrderRefused."""
    tensors = dict(_tensors(request))
    if IMAGE not in tensors:
        raise invalid(f"no tensor {IMAGE} - send an encoded image file as BYTES [1], or pixels as UINT8 [H, W, 3]")
    for tensor, _ in tensors.values():
        _check_count(tensor, most_images)
    images = _images(*tensors[IMAGE], request.parameters)
    named = parameters.of_inspection(request)
    boards, refs = (
        _names(name, tensors, named.get(parameter), len(images))
        for name, parameter in ((BOARD, parameters.BOARD), (REF, parameters.REF))
    )
    parameters.check_named(boards, [*named, *({REF} & tensors.keys())])
    return InferInputs(images, boards, refs, _outputs(request), bool(request.raw_input_contents), named)


def _tensors(request: pb.ModelInferRequest) -> Iterator[tuple[str, tuple[Tensor, bytes | None]]]:
    """Tensors and their bytes by name; None for bytes if the tensor contains its values."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise invalid(f"{len(raw)} raw_input_contents for {len(request.inputs)} inputs - send one each, or none")
    seen = set()
    for number, tensor in enumerate(request.inputs):
        if tensor.name not in (IMAGE, BOARD, REF):
            raise invalid(f"no input is called {tensor.name[:100]!r} - they are {IMAGE}, {BOARD} and {REF}")
        if tensor.name in seen:
            raise invalid(f"input {tensor.name} is there twice")
        if SHARED_MEMORY in tensor.parameters:
            raise invalid("shared memory is not served - send the tensor in the message")
        if raw and tensor.HasField("contents"):
            raise invalid(f"input {tensor.name} has contents, and raw_input_contents besides - send it once")
        seen.add(tensor.name)
        yield tensor.name, (tensor, raw[number] if raw else None)


def _check_count(tensor: Tensor, most: int) -> None:
    """Refuse too many elements: millions of tiny ones fit into one message, and each would become an object."""
    count = max(tensor.shape[:1], default=0)
    if tensor.datatype == BYTES and count > most:
        raise OrderRefused(
            Reason.TOO_LARGE,
            f"{tensor.name} holds {count} at once, where the line takes {most} (limits.requests)",
        )


def _images(tensor: Tensor, raw: bytes | None, of_call: Mapping[str, pb.InferParameter]) -> tuple[Image, ...]:
    if tensor.datatype == BYTES:
        images = _texts(tensor, raw, of_call)
        if not all(images):
            raise invalid(f"{IMAGE} holds an empty image")
        if any(image.startswith(BASE64_STARTS) for image in images):
            raise invalid(f"{IMAGE} is base64 - say so by its parameter {CONTENT_TYPE}: {BASE64}, or send the file")
        return images
    if tensor.datatype != UINT8 or len(tensor.shape) != 3 or tensor.shape[2] != 3:
        raise invalid(
            f"{IMAGE} is {tensor.datatype[:20]} {tensor.shape[:8]}, where BYTES [n] and UINT8 [H, W, 3] are read"
        )
    return (pixels(tensor.shape[0], tensor.shape[1], _uint8(tensor) if raw is None else raw),)


def _uint8(tensor: Tensor) -> bytes:
    count = len(tensor.contents.uint_contents)
    if count != math.prod(tensor.shape):
        raise invalid(f"{tensor.name} has the shape {[*tensor.shape]}, and holds {count}")
    try:
        return bytes(tensor.contents.uint_contents)
    except ValueError:
        raise invalid(f"{tensor.name} is {UINT8}, and holds numbers above 255") from None


def _texts(
    tensor: Tensor, raw: bytes | None, of_call: Mapping[str, pb.InferParameter] = MappingProxyType({})
) -> tuple[bytes, ...]:
    """Elements of a one-dimensional tensor of bytes. ``of_call``: parameters that count where it has none."""
    if tensor.datatype != BYTES or len(tensor.shape) != 1 or tensor.shape[0] < 1:
        raise invalid(f"{tensor.name} is {tensor.datatype[:20]} {tensor.shape[:8]}, where BYTES [n] is read")
    count = tensor.shape[0]
    found = tensor.contents.bytes_contents if raw is None else elements(tensor.name, raw)
    texts = tuple(islice(found, count + 1))
    if len(texts) != count:
        holds = "more" if len(texts) > count else str(len(texts))
        raise invalid(f"{tensor.name} has the shape [{count}], and holds {holds}")
    is_coded = parameters.content_type(tensor.parameters, of_call) == BASE64
    return tuple(_decoded(tensor.name, each) for each in texts) if is_coded else texts


def _decoded(name: str, coded: bytes) -> bytes:
    """Bytes of base64, in lines or not, with the head of a data: URL or without."""
    if coded.startswith(b"data:"):
        head, _, coded = coded.partition(b",")
        if not head.endswith(b";base64"):
            raise invalid(f"{name} is a data: URL that is no base64")
    try:
        return base64.b64decode(coded.translate(None, b"\r\n"), validate=True)
    except binascii.Error as error:
        raise invalid(f"{name} is no base64: {error}") from None


def elements(name: str, raw: bytes) -> Iterator[bytes]:
    """Split elements, each preceded by its length in four bytes, little-endian."""
    at = 0
    while at < len(raw):
        size = int.from_bytes(raw[at : at + 4], "little")
        if at + 4 + size > len(raw):
            raise invalid(f"{name} ends within an element - each begins with its length in four bytes")
        yield raw[at + 4 : at + 4 + size]
        at += 4 + size


def _names(
    name: str, tensors: Mapping[str, tuple[Tensor, bytes | None]], parameter: str | None, count: int
) -> tuple[str | None, ...]:
    """Names of the images: from the tensor, or from the parameter, which applies to all images."""
    if name not in tensors:
        return (parameter,) * count
    texts = _texts(*tensors[name])
    if len(texts) not in (1, count):
        raise invalid(f"{name} holds {len(texts)} for {count} images - send one for all, or one each")
    try:
        names = tuple(parameters.checked(name, each.decode("utf-8")) for each in texts)
    except UnicodeDecodeError:
        raise invalid(f"{name} is not text in UTF-8") from None
    if parameter is not None and set(names) != {parameter}:
        raise invalid(f"the tensor {name} and the parameter {name.lower()} differ - send one of them")
    return names if len(names) == count else names * count


def _outputs(request: pb.ModelInferRequest) -> tuple[str, ...]:
    if len(request.outputs) > MOST_OUTPUTS:
        raise invalid(f"{len(request.outputs)} outputs are requested - there are {', '.join(OUTPUTS)}")
    known = OUTPUTS | ANOMALY_OUTPUTS
    for output in request.outputs:
        if output.name not in known:
            raise invalid(f"no output is called {output.name[:100]!r} - they are {', '.join(known)}")
        if SHARED_MEMORY in output.parameters:
            raise invalid("shared memory is not served - the outputs come in the message")
        if "classification" in output.parameters:
            raise invalid("the classification extension is not served - the output LABEL has the label")
        parameters.check_known(output.parameters, parameters.OF_OUTPUT, f"of the output {output.name}")
    return tuple(dict.fromkeys(output.name for output in request.outputs)) or tuple(OUTPUTS)


def joined(texts: Iterable[bytes]) -> bytes:
    """Bytes of a raw tensor, which ``elements`` splits again."""
    return b"".join(struct.pack("<I", len(each)) + each for each in texts)


def answer(parts: Sequence[VerdictView], outputs: Sequence[str], *, is_raw: bool) -> pb.ModelInferResponse:
    """Verdicts as tensors, one element for each image."""
    response = pb.ModelInferResponse()
    for name in outputs:
        datatype = (OUTPUTS | ANOMALY_OUTPUTS)[name]
        tensor = response.outputs.add(name=name, datatype=datatype, shape=[len(parts)])
        if datatype == FP32:
            scores = [_score(name, part) for part in parts]
            if is_raw:
                response.raw_output_contents.append(struct.pack(f"<{len(scores)}f", *scores))
            else:
                tensor.contents.fp32_contents.extend(scores)
            continue
        words = [_map(part) if name == ANOMALY_MAP else _words(name, part).encode() for part in parts]
        if is_raw:
            response.raw_output_contents.append(joined(words))
        else:
            tensor.contents.bytes_contents.extend(words)
    return response


def _score(name: str, part: VerdictView) -> float:
    """Score of the label, or of the route's last anomaly expert; NaN without either."""
    if name == ANOMALY_SCORE:
        return part.anomalies[-1].score if part.anomalies else math.nan
    return math.nan if part.score is None else part.score


def _map(part: VerdictView) -> bytes:
    return (part.anomalies[-1].map_png or b"") if part.anomalies else b""


def _words(name: str, part: VerdictView) -> str:
    if name == "VERDICT":
        return str(part.verdict)
    return text(part.label or "") if name == "LABEL" else json.dumps(detail(part))


def detail(part: VerdictView) -> dict[str, object]:
    return {
        "key": part.subject.key.removeprefix(CALLER_PREFIX),
        "component": part.subject.component or "",
        "seq": part.seq,
        "is_repeat": part.is_repeat,
        "board": part.subject.board,
        "ref": part.subject.ref,
        "experts": list(part.experts),
        "scores": {} if part.score is None or not part.experts else {part.experts[-1]: part.score},
        **part.findings(),
        "reason": part.reason,
        "seconds": round(part.seconds, 6),
        "queue_s": round(part.queue_s, 6),
        "compute_s": round(part.compute_s, 6),
    }
