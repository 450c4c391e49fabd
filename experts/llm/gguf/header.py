"""Header of a GGUF file: its metadata, and the place of each tensor.

Guarantees: runs nothing of the file, and reads none of its weights. Each length is compared with the rest of the file
before memory is taken for it: a damaged, truncated or lying file is WeightsCorrupt, with the byte where it shows.
Format: docs/gguf.md of github.com/ggml-org/ggml.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from experts.errors import LoadError, ModelUnsupported, WeightsCorrupt, WeightsMissing

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
BIG_ENDIAN_VERSIONS = tuple(int.from_bytes(version.to_bytes(4, "big"), "little") for version in VERSIONS)
BUFFER_BYTES = 1024 * 1024
HEADER_MAXIMUM_BYTES = 512 * 1024 * 1024  # a vocabulary of a million tokens has a tenth of that
DIMENSIONS_MAXIMUM = 4
ALIGNMENT, USUAL_ALIGNMENT_BYTES = "general.alignment", 32
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
LEAST_ENTRY_BYTES = {"key": 13, "tensor": 24}
SHOWN = 64


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """Blocks of ``numbers`` numbers in ``block_bytes`` bytes each."""

    name: str
    numbers: int
    block_bytes: int


FORMATS = {
    0: NumberFormat("F32", 1, 4), 1: NumberFormat("F16", 1, 2), 30: NumberFormat("BF16", 1, 2),
    2: NumberFormat("Q4_0", 32, 18), 3: NumberFormat("Q4_1", 32, 20), 6: NumberFormat("Q5_0", 32, 22),
    7: NumberFormat("Q5_1", 32, 24), 8: NumberFormat("Q8_0", 32, 34), 12: NumberFormat("Q4_K", 256, 144),
    13: NumberFormat("Q5_K", 256, 176), 14: NumberFormat("Q6_K", 256, 210),
}  # fmt: skip
UNSERVED_FORMATS = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """``shape``: as torch has it, the last dimension contiguous. ``start``: in the file."""

    name: str
    shape: tuple[int, ...]
    format: NumberFormat
    start: int

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) // self.format.numbers * self.format.block_bytes


@dataclass(frozen=True, slots=True)
class Header:
    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, PlacedTensor]


def is_gguf(path: Path) -> bool:
    return path.suffix.lower() == SUFFIX


def read_header(path: Path, expert: str) -> Header:
    """Raises WeightsMissing, LoadError, WeightsCorrupt; ModelUnsupported for a number format that is not served."""
    try:
        with path.open("rb", buffering=BUFFER_BYTES) as file:
            return _Reading(path, expert, file, os.fstat(file.fileno()).st_size).header()
    except FileNotFoundError as error:
        raise WeightsMissing(expert, f"{path} is not there: copy it there, or correct `weights`") from error
    except OSError as error:
        raise LoadError(expert, f"{path} cannot be read: {error.strerror}") from error


def stored_bytes(path: Path, expert: str, start: int, size_bytes: int, name: str) -> bytearray:
    """Bytes of a tensor. Raises LoadError, WeightsCorrupt for a file that became shorter."""
    stored, taken = bytearray(size_bytes), 0
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while taken < size_bytes and (now := file.readinto(memoryview(stored)[taken:])):
                taken += now
    except OSError as error:
        raise LoadError(expert, f"{path} cannot be read: {error.strerror}") from error
    if taken < size_bytes:
        raise WeightsCorrupt(expert, f"{path} is truncated: {name} goes on behind byte {start + taken}")
    return stored


class _Reading:
    """One pass over a header. ``_at``: the next byte."""

    def __init__(self, path: Path, expert: str, file: BinaryIO, size_bytes: int) -> None:
        self._path = path
        self._expert = expert
        self._file = file
        self._size_bytes = size_bytes
        self._ends_at = min(size_bytes, HEADER_MAXIMUM_BYTES)
        self._at = 0

    def header(self) -> Header:
        if self._bytes(4) != MAGIC:
            raise self._corrupt("does not begin as a GGUF file")
        version, tensor_count, key_count = self._unpacked("IQQ")
        if version in BIG_ENDIAN_VERSIONS:
            raise ModelUnsupported(self._expert, "byte order", "big endian is not read", str(self._path))
        if version not in VERSIONS:
            raise ModelUnsupported(self._expert, "version", f"{version} is not read: 2 or 3 is", str(self._path))
        self._require(key_count * LEAST_ENTRY_BYTES["key"], f"{key_count} keys of metadata")
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._string()
            if key in metadata:
                raise self._corrupt(f"names the key {key[:SHOWN]} twice")
            metadata[key] = self._value(*self._unpacked("I"))
        self._require(tensor_count * LEAST_ENTRY_BYTES["tensor"], f"{tensor_count} tensors")
        entries = [self._entry() for _ in range(tensor_count)]
        alignment = metadata.get(ALIGNMENT, USUAL_ALIGNMENT_BYTES)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._corrupt(f"has {ALIGNMENT} {alignment!r}")
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, PlacedTensor] = {}
        for name, shape, number_format, offset in entries:
            if name in tensors:
                raise self._corrupt(f"names the tensor {name} twice")
            tensors[name] = tensor = PlacedTensor(name, shape, number_format, start + offset)
            if tensor.start + tensor.size_bytes > self._size_bytes:
                raise self._corrupt(
                    f"is truncated: {name} ends at byte {tensor.start + tensor.size_bytes}, the file at byte "
                    f"{self._size_bytes}: copy it again"
                )
        return Header(self._path, metadata, tensors)

    def _entry(self) -> tuple[str, tuple[int, ...], NumberFormat, int]:
        name = self._string()[:SHOWN]
        (dimensions,) = self._unpacked("I")
        if not 1 <= dimensions <= DIMENSIONS_MAXIMUM:
            raise self._corrupt(f"gives {name} {dimensions} dimensions")
        *sizes, number, offset = self._unpacked(f"{dimensions}QIQ")
        if number not in FORMATS:
            named = UNSERVED_FORMATS.get(number, f"number {number}")
            served = ", ".join(each.name for each in FORMATS.values())
            raise ModelUnsupported(
                self._expert, name, f"the format {named} is not served: {served} are", str(self._path)
            )
        number_format = FORMATS[number]
        if not all(sizes) or sizes[0] % number_format.numbers:
            raise self._corrupt(f"gives {name} the sizes {sizes}, which {number_format.name} cannot have")
        return name, tuple(reversed(sizes)), number_format, offset

    def _value(self, kind: int) -> Any:  # noqa: ANN401  of any type
        if kind == STRING:
            return self._string()
        if kind in SCALARS:
            (value,) = self._unpacked(SCALARS[kind])
            return value
        if kind != ARRAY:
            raise self._corrupt(f"has a value of the unknown type {kind}")
        item, count = self._unpacked("IQ")
        if item == STRING:
            self._require(8 * count, f"{count} strings")
            return tuple(self._string() for _ in range(count))
        if item not in SCALARS:
            raise self._corrupt(f"has a list of the type {item}")
        self._require(count * struct.calcsize(f"<{SCALARS[item]}"), f"{count} numbers")
        return self._unpacked(f"{count}{SCALARS[item]}")

    def _string(self) -> str:
        content = self._bytes(int.from_bytes(self._bytes(8), "little"))
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._corrupt("has a text that is no UTF-8") from error

    def _unpacked(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{form}", self._bytes(struct.calcsize(f"<{form}")))

    def _bytes(self, count: int) -> bytes:
        if count > self._ends_at - self._at:
            self._require(count, f"{count} bytes")
        content = self._file.read(count)
        if len(content) < count:
            raise self._corrupt("became shorter while it was read")
        self._at += count
        return content

    def _require(self, count: int, what: str) -> None:
        """Raises WeightsCorrupt unless so many bytes follow."""
        if count > self._ends_at - self._at:
            raise self._corrupt(f"promises {what}, and the file ends at byte {self._size_bytes}")

    def _corrupt(self, what: str) -> WeightsCorrupt:
        return WeightsCorrupt(self._expert, f"{self._path} {what} (byte {self._at})")
