"""Heading of an ONNX file: inputs, outputs and metadata, read without a runtime.

Guarantees: weights and nodes are skipped, so a file of gigabytes costs kilobytes and milliseconds; any file ends in a
Heading or in WeightsCorrupt. The format is protobuf's wire format; the numbers of fields are those of onnx.proto3
(ONNX, IR version 3 and later).
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from io import BytesIO
from types import MappingProxyType
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from experts.errors import LoadError, WeightsCorrupt, WeightsMissing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

T = TypeVar("T")
FLOAT, UINT8, INT64, FLOAT16 = 1, 2, 7, 10  # of onnx.TensorProto.DataType
FLOATS = frozenset({FLOAT, FLOAT16, 11})  # in 32, 16 and 64 bits
INTEGERS = frozenset({6, INT64})
_GRAPH, _METADATA = 7, 14  # of ModelProto
_NODE, _INITIALIZER, _INPUT, _OUTPUT = 1, 5, 11, 12  # of GraphProto
_INITIALIZER_NAME = 8
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types
_VARINT_BYTES_MAXIMUM = 10
_NEGATIVE = 1 << 63  # a number below zero is written as from here on
_TEXT_BYTES_MAXIMUM = 1 << 20  # of one name, or one entry of metadata


@dataclass(frozen=True, slots=True)
class Value:
    """An input or output. ``shape``: None where the file has none; an open dimension is None."""

    name: str
    element: int | None
    shape: tuple[int | None, ...] | None


@dataclass(frozen=True, slots=True)
class Heading:
    """``inputs``: without weights."""

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    metadata: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def names(self) -> tuple[str, ...] | None:
        """Labels in the metadata, in order, as ultralytics and YOLOv5 write them; None where there are none."""
        try:
            found = ast.literal_eval(self.metadata.get("names", ""))
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return None
        if isinstance(found, dict) and found and set(found) == set(range(len(found))):
            return tuple(str(found[index]) for index in range(len(found)))
        return tuple(str(each) for each in found) if isinstance(found, list) and found else None


def read_heading(expert: str, path: Path) -> Heading:
    """Raises WeightsMissing, LoadError, or WeightsCorrupt where the file is no ONNX file."""
    return _read(expert, path, _heading)


def read_nodes(expert: str, path: Path) -> tuple[tuple[bytes, ...], frozenset[str]]:
    """Nodes of the graph as the file has them, without large ones, and names of its weights. Raises as above."""
    return _read(expert, path, _nodes)


def _read(expert: str, path: Path, read: Callable[[BinaryIO, int], T]) -> T:
    try:
        with path.open("rb") as file:
            return read(file, path.stat().st_size)
    except FileNotFoundError as error:
        raise WeightsMissing(expert, f"{path} is not there: copy it there, or correct `weights`") from error
    except OSError as error:
        raise LoadError(expert, f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise WeightsCorrupt(expert, f"{path} is not an ONNX model: {error}") from error


@dataclass(frozen=True, slots=True)
class _Field:
    """One field of a message: the value of a varint, or where bytes begin and end in the file."""

    number: int
    value: int = 0
    start: int = 0
    end: int = 0


def _heading(file: BinaryIO, size: int) -> Heading:
    metadata: dict[str, str] = {}
    graph: _Field | None = None
    for each in _fields(file, 0, size):
        if each.number == _GRAPH:
            graph = each
        elif each.number == _METADATA:
            entry = {part.number: _text(file, part) for part in _fields(file, each.start, each.end)}
            metadata[entry.get(1, "")] = entry.get(2, "")
    if graph is None:
        raise ValueError("it holds no graph")
    inputs, outputs, weights = [], [], set()
    for each in _fields(file, graph.start, graph.end):
        if each.number == _INPUT:
            inputs.append(_value(_message(file, each)))
        elif each.number == _OUTPUT:
            outputs.append(_value(_message(file, each)))
        elif each.number == _INITIALIZER:
            weights |= {_text(file, part) for part in _within(file, each, _INITIALIZER_NAME)}
    taken = tuple(value for value in inputs if value.name not in weights)
    return Heading(taken, tuple(outputs), MappingProxyType(metadata))


def _nodes(file: BinaryIO, size: int) -> tuple[tuple[bytes, ...], frozenset[str]]:
    nodes, weights = [], set()
    for graph in (each for each in _fields(file, 0, size) if each.number == _GRAPH):
        for each in _fields(file, graph.start, graph.end):
            if each.number == _NODE and each.end - each.start <= _TEXT_BYTES_MAXIMUM:
                nodes.append(_message(file, each))
            elif each.number == _INITIALIZER:
                weights |= {_text(file, part) for part in _within(file, each, _INITIALIZER_NAME)}
    return tuple(nodes), frozenset(weights)


def _within(file: BinaryIO, message: _Field, *numbers: int) -> Iterator[_Field]:
    """Fields below a message, by the numbers on the way to them."""
    for part in _fields(file, message.start, message.end):
        if part.number == numbers[0]:
            yield from _within(file, part, *numbers[1:]) if len(numbers) > 1 else (part,)


def _fields(file: BinaryIO, start: int, end: int) -> Iterator[_Field]:
    """Fields of the message between two places. The file may be read elsewhere between two fields."""
    place = start
    while place < end:
        file.seek(place)
        tag = _varint(file)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value = _varint(file)
            place = file.tell()
            yield _Field(number, value)
        elif kind in {_FIXED32, _FIXED64}:
            place = file.tell() + (4 if kind == _FIXED32 else 8)
        elif kind == _BYTES:
            length = _varint(file)
            begin = file.tell()
            place = begin + length
            if place <= end:
                yield _Field(number, start=begin, end=place)
        else:
            raise ValueError(f"at byte {place} there is no field")
    if place != end:
        raise ValueError(f"it ends within a field: {place - end} bytes are absent")


def _varint(file: BinaryIO) -> int:
    value = 0
    for index in range(_VARINT_BYTES_MAXIMUM):
        byte = file.read(1)
        if not byte:
            raise ValueError("it ends within a number")
        value |= (byte[0] & 0x7F) << (7 * index)
        if byte[0] < 0x80:
            return value
    raise ValueError("a number in it has no end")


def _message(file: BinaryIO, field_: _Field) -> bytes:
    if field_.end - field_.start > _TEXT_BYTES_MAXIMUM:
        raise ValueError(f"{field_.end - field_.start} bytes of one name, shape or note")
    file.seek(field_.start)
    return file.read(field_.end - field_.start)


def _text(file: BinaryIO, field_: _Field) -> str:
    return _message(file, field_).decode("utf-8", errors="replace")


def _value(message: bytes) -> Value:
    """Read a ValueInfoProto: its name, and the element type and shape of a tensor."""
    file, whole = BytesIO(message), _Field(0, end=len(message))
    name, element, shape = "", None, None
    for part in _within(file, whole, 1):
        name = _text(file, part)
    for part in _within(file, whole, 2, 1, 1):
        element = part.value
    for part in _within(file, whole, 2, 1, 2):
        extents = [[found.value for found in _within(file, dim, 1)] for dim in _within(file, part, 1)]
        shape = tuple(found[-1] if found and 0 < found[-1] < _NEGATIVE else None for found in extents)
    return Value(name, element, shape)
