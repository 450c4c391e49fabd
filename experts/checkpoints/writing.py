"""Writes a checkpoint's tensors as a .safetensors file, with one tensor in memory at a time."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, BinaryIO

from experts.checkpoints.tensors import ITEM_BYTES
from experts.errors import WeightsRefused

if TYPE_CHECKING:
    from collections.abc import Mapping

    from experts.checkpoints.archive import TorchFile
    from experts.checkpoints.tensors import CheckpointTensor

WRITTEN_MAXIMUM = 4  # times the file's size: tensors may share a storage, within limits
WRITTEN_ALWAYS_BYTES = 64_000_000
HEADER_BYTES_MAXIMUM = 100_000_000  # limit of safetensors' reader


def write_weights(
    file: BinaryIO, weights: Mapping[str, CheckpointTensor], checkpoint: TorchFile, metadata: Mapping[str, str]
) -> None:
    """Write each tensor separately. Raises WeightsRefused for a total far beyond the size of the storages."""
    written_bytes = sum(tensor.size_bytes for tensor in weights.values())
    if written_bytes > WRITTEN_MAXIMUM * checkpoint.size_bytes + WRITTEN_ALWAYS_BYTES:
        told = f"has tensors of {written_bytes} bytes in a file of {checkpoint.size_bytes}: no expert has"
        raise WeightsRefused(checkpoint.source, told)
    ordered = sorted(weights, key=lambda name: (-ITEM_BYTES[weights[name].dtype], name))  # aligns each tensor
    file.write(_header(checkpoint.source, {name: weights[name] for name in ordered}, metadata))
    for name in ordered:
        _write(file, weights[name], checkpoint)


def _header(source: str, weights: Mapping[str, CheckpointTensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for name, tensor in weights.items():
        end = offset + tensor.size_bytes
        entries[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(entries, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_BYTES_MAXIMUM or "__metadata__" in weights:
        raise WeightsRefused(source, "has names that a .safetensors file cannot hold")
    return len(text).to_bytes(8, "little") + text


def _write(file: BinaryIO, tensor: CheckpointTensor, checkpoint: TorchFile) -> None:
    if not tensor.elements:
        return
    item_bytes = ITEM_BYTES[tensor.dtype]
    with checkpoint.numbers(tensor.storage) as numbers:
        start = tensor.offset * item_bytes
        if tensor.is_contiguous:
            file.write(numbers[start : start + tensor.size_bytes])
            return
        import numpy as np  # import takes longer than a small file, and few files need it

        strides = [stride * item_bytes for stride in tensor.strides]
        view = np.ndarray(tensor.shape, f"V{item_bytes}", numbers, start, strides)
        file.write(np.ascontiguousarray(view).data.cast("B"))
        del view
