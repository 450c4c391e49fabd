"""Packed weights on disk and in memory: direct reads, verification, views."""

import errno
import fcntl
import hashlib
import os
from contextlib import closing

import numpy as np
import psutil
import pytest
import torch

from experts.errors import LoadError, WeightsCorrupt, WeightsMissing
from experts.packed.direct_reads import PART_BYTES
from experts.packed.weights import AlignedBuffer, PackedExpert, Segment, SegmentStore, TensorSpec, tensor_views

PARTS_BYTES = 8 * 1024 * 1024 * 2 + 4096  # more than one part of a parallel read, and not a multiple of it


def written(store, content):
    sha256 = hashlib.sha256(content).hexdigest()
    path = store.segment_path(sha256)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return Segment(sha256, len(content), ())


def random_bytes(size_bytes, seed=0):
    return np.random.default_rng(seed).bytes(size_bytes)


def spoil(path, place=5000):
    """Flip one bit without changing the file's size; its time moves on, however coarse the clock."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    rewrite(path, bytes(content))


def rewrite(path, content):
    later_ns = path.stat().st_mtime_ns + 1_000_000_000
    path.write_bytes(content)
    os.utime(path, ns=(later_ns, later_ns))


def with_program(store, own, program):
    sha256 = hashlib.sha256(program).hexdigest()
    store.program_path(sha256).parent.mkdir(parents=True)
    store.program_path(sha256).write_bytes(program)
    return PackedExpert("cls/x", "onnx", "fp32", "", "", written(store, own), (), sha256)


@pytest.mark.parametrize(
    "spoiled", [set(), {"own"}, {"program"}, {"own", "program"}],
    ids=lambda names: " and ".join(sorted(names)) or "none",
)  # fmt: skip
def test_only_corrupt_files_are_discarded(store, spoiled):
    packed = with_program(store, random_bytes(8192), b"graph")
    paths = {"own": store.segment_path(packed.own.sha256), "program": store.program_path(packed.program_sha256)}
    for name in spoiled:
        spoil(paths[name], place=2)
    with store.locked():  # as packing did: where nobody has packed, a drive may have gone
        assert store.discard_corrupt(packed) is None
    assert store.discard_corrupt(packed) == tuple(path for name, path in paths.items() if name in spoiled)
    assert {name for name, path in paths.items() if not path.exists()} == spoiled
    assert store.discard_corrupt(packed) == tuple(path for name, path in paths.items() if name in spoiled)


@pytest.fixture
def buffer():
    buffer = AlignedBuffer(PARTS_BYTES)
    yield buffer
    buffer.close()


@pytest.mark.parametrize(("size_bytes", "offset"), [(4096, 0), (PARTS_BYTES, 0), (PARTS_BYTES - 4096, 3)])
def test_read_fills_the_head_of_the_buffer_aligned_or_not(store, buffer, size_bytes, offset):
    content = random_bytes(size_bytes)
    buffer.view[-1] = 7
    store.read(written(store, content), buffer.view[offset:], "cls/x")
    assert buffer.view[offset : offset + size_bytes] == content
    assert size_bytes == PARTS_BYTES or buffer.view[-1] == 7


@pytest.mark.parametrize("is_verified", [False, True])
def test_flipped_bit_is_found_by_the_first_read_and_after_each_change(store, buffer, is_verified):
    content = random_bytes(PARTS_BYTES)
    segment = written(store, content)
    path = store.segment_path(segment.sha256)
    if is_verified:
        store.read(segment, buffer, "cls/x")
    spoil(path)
    with pytest.raises(WeightsCorrupt, match=f"cls/x.*{segment.sha256}"):
        store.read(segment, buffer, "cls/x")
    rewrite(path, content)
    store.read(segment, buffer, "cls/x")
    assert buffer.view == content


@pytest.mark.parametrize(
    ("damage", "error", "reason"),
    [
        (lambda path: os.truncate(path, 4096), WeightsCorrupt, "4096 bytes, 8192 expected"),
        (lambda path: path.unlink(), WeightsMissing, "is not there"),
    ],
)
def test_verified_file_that_is_cut_or_gone_is_reported(store, buffer, damage, error, reason):
    segment = written(store, random_bytes(8192))
    store.read(segment, buffer, "cls/x")
    damage(store.segment_path(segment.sha256))
    for check in (lambda: store.read(segment, buffer, "cls/x"), lambda: store.verify(segment, "cls/x")):
        with pytest.raises(error, match=reason):
            check()


def test_read_refused_by_the_system_is_a_retriable_load_failure(tmp_path, buffer):
    (tmp_path / "packed").write_bytes(b"a file where a folder should be")
    with closing(SegmentStore(tmp_path / "packed")) as store, pytest.raises(LoadError, match="Not a directory"):
        store.read(Segment("0" * 64, 4096, ()), buffer, "cls/x")


def test_unchanged_file_is_hashed_once(store, buffer):
    """Shown with a change that leaves inode, size and time as they were: only `verify` sees it."""
    segment = written(store, random_bytes(16384))
    store.read(segment, buffer, "cls/x")
    path = store.segment_path(segment.sha256)
    status = path.stat()
    with path.open("r+b") as file:
        file.write(b"other")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    store.read(segment, buffer, "cls/x")
    with pytest.raises(WeightsCorrupt):
        store.verify(segment, "cls/x")
    with pytest.raises(WeightsCorrupt):
        store.read(segment, buffer, "cls/x")


@pytest.mark.parametrize("is_streamed", [False, True])
def test_read_restarted_without_direct_access_is_hashed_from_its_beginning(store, monkeypatch, is_streamed):
    content = random_bytes(3 * PART_BYTES)
    segment, read, refused = written(store, content), os.preadv, []

    def refuse_late(file, buffers, offset):
        if offset and fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(offset)
            raise OSError(errno.EINVAL, "Invalid argument")
        return read(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", refuse_late)
    with closing(AlignedBuffer(len(content))) as target:
        if is_streamed:
            store.stream(segment, target, "cls/a", lambda _: None)
        else:
            store.read(segment, target, "cls/a")
        assert bytes(target.view) == content
    if not refused:
        pytest.skip("this filesystem takes no direct reads")


def test_program_is_verified_at_every_read(store):
    packed = with_program(store, b"", b"graph")
    assert store.program(packed) == b"graph"
    path = store.program_path(packed.program_sha256)
    path.write_bytes(b"grape")
    with pytest.raises(WeightsCorrupt):
        store.program(packed)
    path.unlink()
    with pytest.raises(WeightsMissing):
        store.program(packed)


def test_views_show_every_dtype_and_memory_format_in_place(buffer):
    torch.manual_seed(0)
    tensors = {
        "a": torch.randn(3, 5), "b": torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
        "c": torch.randn(7).to(torch.bfloat16), "d": torch.tensor(41, dtype=torch.int64),
        "e": torch.tensor([True, False, True]), "f": torch.empty(0),
    }  # fmt: skip
    specs, offset = [], 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        specs.append(TensorSpec(name, dtype, tuple(tensor.shape), tensor.stride(), offset))
        offset += -(-specs[-1].size_bytes // 64) * 64
    views = tensor_views(buffer.tensor, Segment("", 4096, tuple(specs)))
    for name, tensor in tensors.items():
        views[name].copy_(tensor)
    again = tensor_views(buffer.tensor, Segment("", 4096, tuple(specs)))
    for name, tensor in tensors.items():
        assert torch.equal(again[name], tensor)
        assert again[name].stride() == tensor.stride()
    buffer.view[:20] = bytes(20)
    assert not views["a"].flatten()[:5].any()
    for wrong in (buffer.tensor[:4096], buffer.tensor.view(torch.float32), buffer.tensor[:8192].view(2, -1)):
        with pytest.raises(ValueError, match="flat uint8 buffer of 8192 bytes"):
            tensor_views(wrong, Segment("", 8192, ()))


def test_closed_buffer_has_returned_its_memory():
    buffer = AlignedBuffer(64 * 1024 * 1024)
    tensor = buffer.tensor.fill_(1)
    before = psutil.Process().memory_info().rss
    buffer.close()
    buffer.close()
    assert before - psutil.Process().memory_info().rss > 60 * 1024 * 1024  # though a tensor over it still lives
    assert tensor.numel() == 64 * 1024 * 1024
    with pytest.raises(ValueError, match="closed"):
        _ = buffer.view
    with pytest.raises(ValueError, match="0 bytes"):
        AlignedBuffer(0)
