"""Descriptions of a checkpoint's tensors: place in the file, type and shape, checked to lie within their storage.

This module does not import torch. Both classes define ``__setstate__`` and have no slots: for frozen classes with slots
dataclasses generate one that lets a pickle overwrite fields unchecked; Python 3.11.2 even replaces a defined one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

DIMENSIONS_MAXIMUM = 64  # torch's own limit
BYTES_MAXIMUM = 1 << 62  # torch counts sizes in 64 bits

ITEM_BYTES = {  # by the names that safetensors gives to types of elements
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
TYPES = {  # by the names that torch gives to them
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "bool": "BOOL",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
STORAGE_TYPES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL", "UntypedStorage": "U8", "ComplexFloatStorage": "C64",
}  # fmt: skip


@dataclass(frozen=True)
class Storage:
    """Contiguous numbers in the file. ``dtype``: a name of ITEM_BYTES."""

    key: str
    dtype: str
    elements: int

    def __setstate__(self, state: object) -> None:
        raise ValueError("a state given to a storage")

    @property
    def size_bytes(self) -> int:
        return self.elements * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, eq=False)
class CheckpointTensor:
    """Tensor over a storage; offset and strides count elements of ``dtype``."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __setstate__(self, state: object) -> None:
        """Ignore attributes: they are not part of the weights."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.elements * ITEM_BYTES[self.dtype]

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for extent, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if extent != 1 and stride != expected:
                return False
            expected *= extent
        return True

    @property
    def problem(self) -> str | None:
        """Description of the fault; None where the tensor lies within its storage."""
        if len(self.shape) != len(self.strides) or len(self.shape) > DIMENSIONS_MAXIMUM:
            return f"a tensor of {len(self.shape)} sizes and {len(self.strides)} strides"
        if any(number < 0 for number in (self.offset, *self.shape, *self.strides)):
            return "a tensor of a negative size, stride or offset"
        if self.size_bytes > BYTES_MAXIMUM:
            return "a tensor larger than any memory"
        last = self.offset + sum((extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True))
        reach = (last + 1) * ITEM_BYTES[self.dtype] if self.elements else 0
        if reach > self.storage.size_bytes:
            return f"a tensor that reaches to byte {reach} of a storage of {self.storage.size_bytes}"
        return None
