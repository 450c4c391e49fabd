"""Bodies of the Open Inference Protocol over HTTP, read to and written from its protobuf messages.

Guarantees: an inflated body is as bounded as a plain one. JSON has a bounded number of values, as each becomes an
object. A body that contradicts itself is refused with its field, before a tensor is converted. 64-bit numbers are JSON
numbers, and NaN is null.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from google.protobuf.message import Message
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.responses import JSONResponse, Response

from agent.doors import tensors
from agent.doors.http.routes import media_type
from agent.doors.parameters import BASE64, CONTENT_TYPE, OF_CALL, UNREAD
from agent.doors.proto import inference_pb2 as pb
from agent.doors.refusals import invalid
from agent.faults.errors import OrderRefused, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from starlette.datastructures import Headers

JSON_BYTES = "inference-header-content-length"
# In JSON, which other threads wait for: pixels of 295 x 295, and fields of a hundred outputs. A tenth of a second.
MOST_VALUES, MOST_FIELDS = 2**18, 1000
ENCODINGS = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
BINARY_SIZE, BINARY, ALL_BINARY = "binary_data_size", "binary_data", "binary_data_output"
HEADERS = "headers"  # a parameter that MLServer's clients fill with objects
FILE_STARTS = (b"\x89PNG", b"\xff\xd8\xff", b"BM", b"II", b"MM", b"RIFF")  # of files that never lack a byte 0
BOM = b"\xef\xbb\xbf"  # which PowerShell and .NET write before a text in UTF-8
WANTED = "send JSON with `inputs`, or the image file alone, as by: curl --data-binary @image.png -H '{}: 0' '{}'"

Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Parameters = dict[str, Any]  # read one by one, each refused by its name
PARAMETERS = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Output(_Body):
    name: str
    parameters: Parameters | None = None


class _Input(_Output):
    datatype: str
    shape: list[Int64] = Field(max_length=8)
    data: list[Any] | None = None


class _Infer(_Body):
    id: str | None = None
    model_name: str | None = None  # of KServe's client: the path has it
    parameters: Parameters | None = None
    inputs: list[_Input] = Field(max_length=8)
    outputs: list[_Output] | None = Field(None, max_length=tensors.MOST_OUTPUTS)


SECTIONS: dict[str | int, type[_Body]] = {"inputs": _Input, "outputs": _Output}


class _Index(_Body):
    ready: bool = False


class _Change(_Body):
    parameters: dict[str, Any] | None = None


Body = TypeVar("Body", bound=_Body)


def infer_request(
    body: bytes, headers: Headers, most_bytes: int, address: str = ""
) -> tuple[pb.ModelInferRequest, Callable[[str], bool]]:
    """Request without a model, its tensors raw, and which outputs are answered as binary data. Raises OrderRefused.
    ``address``: where the body was sent to."""
    body = inflated(body, headers, most_bytes)
    size, wanted = _json_bytes(body, headers), WANTED.format(JSON_BYTES.title(), address[:300])
    kind = media_type(headers)
    if kind.startswith("multipart/"):
        raise invalid("body", f"is {kind[:40]}, which is not read - {wanted}")
    if size == 0 and body:  # Triton's raw binary request
        if body.startswith(FILE_STARTS) and b"\0" not in body:
            raise invalid("body", f"has lost its bytes 0, 10 and 13, as by curl's -d - {wanted}")
        return _file_alone(body), lambda _: False
    text = body[:size].removeprefix(BOM)
    if not text.lstrip().startswith(b"{"):
        raise invalid("body", f"is no JSON object - {wanted}")
    return _request_of(_read(text, _Infer), memoryview(body)[size:])


def _json_bytes(body: bytes, headers: Headers) -> int:
    size = headers.get(JSON_BYTES)
    if size is None:
        return len(body)
    if not (size.isascii() and size.isdigit() and len(size) < 20 and int(size) <= len(body)):
        raise invalid(JSON_BYTES, f"is {size[:20]!r} in a body of {len(body)} bytes - it is the length of the JSON")
    return int(size)


def _request_of(sent: _Infer, behind: memoryview) -> tuple[pb.ModelInferRequest, Callable[[str], bool]]:
    request = pb.ModelInferRequest(id=sent.id or "")
    _set_parameters(request.parameters, sent.parameters)
    request.raw_input_contents.extend(_raw_inputs(sent, behind))
    for given in sent.inputs:
        tensor = request.inputs.add(name=given.name, datatype=given.datatype, shape=given.shape)
        _set_parameters(tensor.parameters, given.parameters)
    for wanted in sent.outputs or ():
        _set_parameters(request.outputs.add(name=wanted.name).parameters, wanted.parameters)
    usual = _flag("parameters", sent.parameters, ALL_BINARY, default=False)
    binary = {each.name: _flag(each.name, each.parameters, BINARY, default=usual) for each in sent.outputs or ()}
    return request, lambda name: binary.get(name, usual)


def index_request(body: bytes) -> pb.RepositoryIndexRequest:
    return pb.RepositoryIndexRequest(ready=_read(body or b"{}", _Index).ready)


def load_request(model: str, body: bytes) -> pb.RepositoryModelLoadRequest:
    """Parameters keep their names alone: a load that has any is refused."""
    request = pb.RepositoryModelLoadRequest(model_name=model)
    for name in _read(body or b"{}", _Change).parameters or ():
        request.parameters[name].bool_param = True
    return request


def inflated(body: bytes, headers: Headers, most_bytes: int) -> bytes:
    """Raises OrderRefused for another encoding, a broken one, and more bytes than ``most_bytes``."""
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding == "identity":
        return body
    if encoding not in ENCODINGS:
        raise invalid("content-encoding", f"is {encoding[:40]!r}, where gzip and deflate are read")
    inflating = zlib.decompressobj(ENCODINGS[encoding])
    try:
        whole = inflating.decompress(body, most_bytes + 1)
    except zlib.error as error:
        raise invalid("body", f"is not {encoding}: {error}") from None
    if len(whole) > most_bytes:
        raise OrderRefused(
            Reason.MESSAGE_TOO_LARGE, f"a body of more than {most_bytes} bytes once inflated (limits.message)"
        )
    if not inflating.eof or inflating.unused_data:
        raise invalid("body", f"is {encoding} that ends too early, or bytes follow it")
    return whole


def _file_alone(body: bytes) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(raw_input_contents=[tensors.joined([body])])
    request.inputs.add(name=tensors.IMAGE, datatype=tensors.BYTES, shape=[1])
    return request


def _read(text: bytes, kind: type[Body]) -> Body:
    fields = max(text.count(b":"), text.count(b"{"))
    if text.count(b",") >= MOST_VALUES or fields > MOST_FIELDS:
        most = f"JSON of more than {MOST_VALUES} values or {MOST_FIELDS} fields"
        raise OrderRefused(Reason.TOO_LARGE, f"{most} - send tensors as binary data")
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        section = SECTIONS.get(first["loc"][0], kind) if len(first["loc"]) > 1 else kind
        known = f" - they are {', '.join(section.model_fields)}" if first["type"] == "extra_forbidden" else ""
        raise invalid(".".join(map(str, first["loc"]))[:200] or "body", f"{first['msg']}{known}") from None


def _raw_inputs(sent: _Infer, behind: memoryview) -> Iterator[bytes]:
    """Bytes of each tensor, from the JSON or from ``behind`` it. Raises OrderRefused."""
    at = 0
    for given in sent.inputs:
        parameters = given.parameters or {}
        size = parameters.get(BINARY_SIZE)
        if size is None:
            yield b"" if tensors.SHARED_MEMORY in parameters else _raw(given)
            continue
        if type(size) is not int or size < 0 or given.data is not None:
            raise invalid(given.name[:100], f"has a {BINARY_SIZE} that is no size, or data besides")
        if at + size > len(behind):
            raise invalid(given.name[:100], f"wants {size} bytes behind the JSON, which has {len(behind) - at} left")
        yield bytes(behind[at : at + size])
        at += size
    if at < len(behind):
        raise invalid("body", f"{len(behind) - at} bytes follow the tensors")


def _raw(given: _Input) -> bytes:
    """Bytes of a tensor in JSON. Another type than those of our inputs is refused later, by its name."""
    if given.data is None:
        raise invalid(given.name[:100], f"has no data - send it in the JSON, or behind it with {BINARY_SIZE}")
    try:
        values = _flat(given.data)
        if given.datatype == tensors.BYTES:
            return tensors.joined(each.encode() for each in values)
        return bytes(values) if given.datatype == tensors.UINT8 else b""
    except (TypeError, ValueError, AttributeError):
        raise invalid(given.name[:100], f"holds values that are not {given.datatype[:20]}") from None


def _flat(data: list[Any]) -> list[Any]:
    """Values of a tensor, which may be nested by its shape. Raises TypeError for a mixture."""
    while data and isinstance(data[0], list):
        if not all(isinstance(row, list) for row in data):
            raise TypeError
        data = list(chain.from_iterable(data))
    return data


def _flag(place: str, parameters: Parameters | None, name: str, *, default: bool) -> bool:
    found = (parameters or {}).get(name, default)
    if not isinstance(found, bool):
        raise invalid(place[:100], f"has a {name} that is neither true nor false")
    return found


def _set_parameters(into: Any, values: Parameters | None) -> None:  # noqa: ANN401  # protobuf's maps have no type
    for name, value in (values or {}).items():
        if name == HEADERS or (value is None and name in OF_CALL):
            continue
        if type(value) not in PARAMETERS or (isinstance(value, int) and not -(2**63) <= value < 2**63):
            kind = "null" if value is None else "no text, number of 64 bits, true or false"
            raise invalid(name[:100], f"is {kind} - {UNREAD}")
        setattr(into[name], PARAMETERS[type(value)], value)


def infer_answer(response: pb.ModelInferResponse, is_binary: Callable[[str], bool]) -> Response:
    outputs, behind = [], []
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        output = {"name": tensor.name, "datatype": tensor.datatype, "shape": [*tensor.shape]}
        if is_binary(tensor.name):
            outputs.append(output | {"parameters": {BINARY_SIZE: len(raw)}})
            behind.append(raw)
        else:
            outputs.append(output | _data(tensor.name, tensor.datatype, raw))
    values = {"model_name": response.model_name, "model_version": response.model_version, "outputs": outputs}
    answer = JSONResponse(values | ({"id": response.id} if response.id else {}))
    if not behind:
        return answer
    head = bytes(answer.body)
    headers = {JSON_BYTES: str(len(head))}
    return Response(b"".join((head, *behind)), headers=headers, media_type="application/octet-stream")


def _data(name: str, datatype: str, raw: bytes) -> dict[str, Any]:
    if datatype == tensors.FP32:
        return {"data": [None if math.isnan(each) else each for (each,) in struct.iter_unpack("<f", raw)]}
    elements = tensors.elements(name, raw)
    if name == tensors.ANOMALY_MAP:
        return {"data": [base64.b64encode(each).decode() for each in elements], "parameters": {CONTENT_TYPE: BASE64}}
    return {"data": [each.decode() for each in elements]}


def plain(message: Message) -> dict[str, Any]:
    """Fields of a message as JSON has them, unset ones too. ``MessageToDict`` would write 64-bit numbers as strings,
    which clients of HTTP do not read."""
    return {field.name: _plain(getattr(message, field.name), field) for field in message.DESCRIPTOR.fields}


def _plain(value: Any, field: Any) -> Any:  # noqa: ANN401  # a field of any message; upb's have types of their own
    if isinstance(value, Mapping):
        return {key: _plain(each, field) for key, each in value.items()}
    if isinstance(value, Message):
        return plain(value)
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name
    if isinstance(value, str | int | float):
        return value
    return [_plain(each, field) for each in value]
