"""Opens a file of torch.save: reads the saved object as data, and locates the bytes of its storages.

Two formats: the zip archive (since torch 1.6), and the older sequence of pickles followed by the storages. Guarantees:
the archive's directory is checked against the file before use. Entries lie within the file and do not overlap. Unpacked
bytes are at most a few times the file's size. Each storage has the bytes that its tensors expect. Its tensors are
written as a .safetensors file, one in memory at a time.
"""

from __future__ import annotations

import io
import json
import mmap
import struct
import zipfile
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, BinaryIO, NoReturn

from experts.checkpoints.tensors import ITEM_BYTES
from experts.checkpoints.unpickler import SAVE_ADVICE, Unpickler
from experts.errors import WeightsCorrupt, WeightsRefused

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from experts.checkpoints.tensors import CheckpointTensor, Storage

WRITTEN_MAXIMUM = 4  # times the file's size: tensors may share a storage, within limits
WRITTEN_ALWAYS_BYTES = 64_000_000
HEADER_BYTES_MAXIMUM = 100_000_000  # limit of safetensors' reader
LEGACY_MAGIC, LEGACY_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
PICKLE_BYTES_MAXIMUM = 256_000_000  # of the pickle that describes the object; weights are stored in other entries
UNPACKED_MAXIMUM = 4  # times the file's size: torch does not compress, and weights hardly compress
UNPACKED_ALWAYS_BYTES = 16_000_000
ENTRIES_MAXIMUM = 1_000_000
LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, and the lengths of name and extra field
TAR_MAGIC = slice(257, 262)


@dataclass(frozen=True, slots=True)
class ArchiveEntry:
    """Place of an entry's bytes in the file. ``size_bytes``: unpacked; ``packed_bytes``: None where stored as they are.

    ``checksum``: CRC-32 of the bytes; 0 where torch was configured to compute none.
    """

    offset: int
    size_bytes: int
    packed_bytes: int | None = None
    checksum: int = 0


@dataclass(frozen=True, slots=True)
class TorchFile:
    """An opened file. ``document``: the saved object, made of plain values, PickledObjects and CheckpointTensors."""

    source: str
    size_bytes: int
    document: object
    _data: mmap.mmap
    _extents: Mapping[str, ArchiveEntry]
    _checked: set[str] = field(default_factory=set)  # storages whose checksum has been compared

    def numbers(self, storage: Storage) -> memoryview:
        """Bytes of a storage. Raises WeightsCorrupt if they are missing or their checksum differs."""
        extent = self._extents.get(storage.key)
        if extent is None:
            raise WeightsCorrupt(self.source, f"storage {storage.key} is not in it")
        if storage.size_bytes > extent.size_bytes:
            found_bytes = f"{extent.size_bytes} bytes instead of {storage.size_bytes}"
            raise WeightsCorrupt(self.source, f"storage {storage.key} has {found_bytes}")
        found = _bytes_of(self.source, self._data, extent)
        if storage.key not in self._checked:
            _check(self.source, found, extent)
            self._checked.add(storage.key)
        return found[: storage.size_bytes]


@contextmanager
def opened(path: Path) -> Iterator[TorchFile]:
    """Open a file of torch.save; the context keeps the file mapped.

    Raises WeightsCorrupt and WeightsRefused, and OSError for what the disk refuses.
    """
    source = str(path)
    with path.open("rb") as file:
        if not path.stat().st_size:
            raise WeightsCorrupt(source, "is empty")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # unmapped with the last view of its numbers
        yield _open(source, data, path)


def _open(source: str, data: mmap.mmap, path: Path) -> TorchFile:
    if data[:2] == b"PK":
        return _open_archive(source, data, path)
    if data[:1] == b"\x80":
        return _open_legacy(source, data)
    if data[TAR_MAGIC] == b"ustar":
        raise WeightsRefused(source, f"is of torch before 0.2, a tar archive: load it in that torch, and {SAVE_ADVICE}")
    raise WeightsCorrupt(source, "is no file of torch.save: neither a zip archive nor a pickle")


# the zip archive


def _open_archive(source: str, data: mmap.mmap, path: Path) -> TorchFile:
    entries = _entries(source, data, path)
    prefix = _prefix(source, entries)
    if data_order := entries.get(f"{prefix}byteorder"):
        order = bytes(_bytes_of(source, data, data_order)[:16])
        if order.strip() != b"little":
            raise WeightsRefused(source, f"its numbers are in {order!r} byte order: {SAVE_ADVICE} on this machine")
    description = entries[f"{prefix}data.pkl"]
    if description.size_bytes > PICKLE_BYTES_MAXIMUM:
        raise WeightsRefused(source, f"its pickle has over {PICKLE_BYTES_MAXIMUM} bytes: {SAVE_ADVICE}")
    described = bytes(_bytes_of(source, data, description))
    _check(source, described, description)
    document = Unpickler(source, io.BytesIO(described)).load()
    start = f"{prefix}data/"
    storages = {name.removeprefix(start): extent for name, extent in entries.items() if name.startswith(start)}
    return TorchFile(source, len(data), document, data, storages)


def _prefix(source: str, entries: Mapping[str, ArchiveEntry]) -> str:
    """The folder that all entries lie in, with its slash."""
    if any(name.endswith("/constants.pkl") for name in entries):
        advice = "export the model that it was made of to ONNX"
        raise WeightsRefused(source, f"is a TorchScript program, not weights: {advice}")
    found = [name.removesuffix("data.pkl") for name in entries if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(found) != 1:
        raise WeightsCorrupt(source, f"is a zip archive with {len(found)} data.pkl, where torch.save writes one")
    return found[0]


def _entries(source: str, data: mmap.mmap, path: Path) -> dict[str, ArchiveEntry]:
    try:
        with zipfile.ZipFile(path) as archive:
            infos = [info for info in archive.infolist() if not info.filename.endswith("/")]
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, OverflowError) as error:
        raise WeightsCorrupt(source, f"is no whole zip archive: {error}") from error
    if len(infos) > ENTRIES_MAXIMUM:
        raise WeightsRefused(source, f"has over {ENTRIES_MAXIMUM} entries: {SAVE_ADVICE}")
    found = {info.filename: _extent(source, data, info) for info in infos}
    if len(found) != len(infos):
        raise WeightsCorrupt(source, "is a zip archive with two entries of one name")
    _refuse_overlaps(source, found)
    unpacked = sum(extent.size_bytes for extent in found.values())
    if unpacked > UNPACKED_MAXIMUM * len(data) + UNPACKED_ALWAYS_BYTES:
        raise WeightsRefused(source, f"is {len(data)} bytes and unpacks to {unpacked}: {SAVE_ADVICE}, not compressed")
    return found


def _extent(source: str, data: mmap.mmap, info: zipfile.ZipInfo) -> ArchiveEntry:
    def corrupt(reason: str) -> NoReturn:
        raise WeightsCorrupt(source, f"is a zip archive whose entry {info.filename!r} {reason}")

    if info.flag_bits & 0x1:
        corrupt("is encrypted")
    start = info.header_offset
    if not 0 <= start <= len(data) - LOCAL_HEADER.size:
        corrupt("begins outside the file")
    signature, name_bytes, extra_bytes = LOCAL_HEADER.unpack_from(data, start)
    if signature != b"PK\x03\x04":
        corrupt("does not begin where the archive says")
    offset = start + LOCAL_HEADER.size + name_bytes + extra_bytes
    if info.compress_size < 0 or info.file_size < 0 or offset + info.compress_size > len(data):
        corrupt("ends outside the file")
    if info.compress_type == zipfile.ZIP_STORED:
        if info.file_size != info.compress_size:
            corrupt("has two sizes")
        return ArchiveEntry(offset, info.file_size, None, info.CRC)
    if info.compress_type != zipfile.ZIP_DEFLATED:
        corrupt("is compressed in a way that torch does not read")
    return ArchiveEntry(offset, info.file_size, info.compress_size, info.CRC)


def _refuse_overlaps(source: str, entries: Mapping[str, ArchiveEntry]) -> None:
    ordered = sorted((one.offset, one.size_bytes if one.packed_bytes is None else one.packed_bytes)
                     for one in entries.values())  # fmt: skip
    for (offset, size_bytes), (following, _) in pairwise(ordered):
        if offset + size_bytes > following:
            raise WeightsCorrupt(source, "is a zip archive whose entries overlap")


def _bytes_of(source: str, data: mmap.mmap, extent: ArchiveEntry) -> memoryview:
    if extent.packed_bytes is None:
        return memoryview(data)[extent.offset : extent.offset + extent.size_bytes]
    packed = data[extent.offset : extent.offset + extent.packed_bytes]
    try:
        unpacked = zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, extent.size_bytes + 1)
    except zlib.error as error:
        raise WeightsCorrupt(source, f"is a zip archive with an entry that cannot be unpacked: {error}") from error
    if len(unpacked) != extent.size_bytes:
        raise WeightsCorrupt(source, "is a zip archive with an entry that unpacks to another size than it says")
    return memoryview(unpacked)


def _check(source: str, found: bytes | memoryview, extent: ArchiveEntry) -> None:
    if extent.checksum and zlib.crc32(found) != extent.checksum:
        raise WeightsCorrupt(source, f"is damaged: the entry at byte {extent.offset} has another checksum than it says")


# the older format


def _open_legacy(source: str, data: mmap.mmap) -> TorchFile:
    """Four pickles in a row (magic number, protocol, system, object), the list of storages, and their numbers."""
    if Unpickler(source, data).load() != LEGACY_MAGIC:
        raise WeightsRefused(source, f"is a pickle that torch.save did not write: {SAVE_ADVICE}")
    if Unpickler(source, data).load() != LEGACY_PROTOCOL:
        raise WeightsCorrupt(source, "is a file of torch.save in a form that is not known")
    system = Unpickler(source, data).load()
    if isinstance(system, dict) and system.get("little_endian") is False:
        raise WeightsRefused(source, f"its numbers are in big-endian order: {SAVE_ADVICE} on this machine")
    described = Unpickler(source, data)
    document = described.load()
    keys = Unpickler(source, data).load()
    extents = _legacy_extents(source, data, data.tell(), keys, described.storages)
    return TorchFile(source, len(data), document, data, extents)


def _legacy_extents(
    source: str, data: mmap.mmap, position: int, keys: object, storages: Mapping[str, Storage]
) -> dict[str, ArchiveEntry]:
    """Each storage follows the one before it: its count of elements in eight bytes, then its numbers."""
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise WeightsCorrupt(source, "does not list its storages as torch.save does")
    extents: dict[str, ArchiveEntry] = {}
    for key in keys:
        storage = storages.get(key)
        if storage is None or key in extents:
            raise WeightsCorrupt(source, f"lists storage {key!r:.40}, which no tensor or another has")
        if position + 8 > len(data):
            raise WeightsCorrupt(source, f"ends before storage {key!r:.40}")
        elements = int.from_bytes(data[position : position + 8], "little", signed=True)
        size_bytes = elements * ITEM_BYTES[storage.dtype]
        if elements < 0 or position + 8 + size_bytes > len(data):
            raise WeightsCorrupt(source, f"ends within storage {key!r:.40}")
        extents[key] = ArchiveEntry(position + 8, size_bytes)
        position += 8 + size_bytes
    return extents


def write_weights(
    file: BinaryIO, weights: Mapping[str, CheckpointTensor], checkpoint: TorchFile, metadata: Mapping[str, str]
) -> None:
    """Write each tensor separately. Raises WeightsRefused for a total far beyond the size of the storages."""
    written_bytes = sum(tensor.size_bytes for tensor in weights.values())
    if written_bytes > WRITTEN_MAXIMUM * checkpoint.size_bytes + WRITTEN_ALWAYS_BYTES:
        excess = f"has tensors of {written_bytes} bytes in a file of {checkpoint.size_bytes}: no expert has"
        raise WeightsRefused(checkpoint.source, excess)
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
