"""Files of torch.save, read as data: what comes out is what torch itself reads, and nothing else comes out."""

from __future__ import annotations

import collections
import io
import pickle
import struct
import zipfile
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from experts.checkpoints.archive import opened
from experts.checkpoints.tensors import ITEM_BYTES, TYPES, CheckpointTensor
from experts.checkpoints.unpickler import PickledObject, Unpickler
from experts.errors import WeightsCorrupt, WeightsRefused
from tests.experts.checkpoints.hostile import Calling

FORMS = (True, False)  # the zip archive, and the form before it
DTYPES = {safe: getattr(torch, name) for name, safe in TYPES.items()}


@dataclass
class Settings:
    rate: float
    names: list[str]


def built(checkpoint, value):
    """What was read, as torch would have it: tensors built, records as pairs of their class's name and their state."""
    if isinstance(value, CheckpointTensor):
        size_bytes = ITEM_BYTES[value.storage.dtype] * value.storage.elements
        raw = torch.frombuffer(bytearray(checkpoint.numbers(value.storage)) or bytearray(1), dtype=torch.uint8)
        flat = raw[:size_bytes].view(DTYPES[value.dtype])
        return torch.as_strided(flat, value.shape, value.strides, value.offset)
    if isinstance(value, dict):
        return {key: built(checkpoint, one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(built(checkpoint, one) for one in value)
    return value


def read(path):
    with opened(path) as checkpoint:
        return built(checkpoint, checkpoint.document)


def saved(path, document, zipped=True):
    torch.save(document, path, _use_new_zipfile_serialization=zipped)
    return path


def same(left, right):
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return left == right


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
    | st.tuples(inner, inner) | st.tuples(inner),
    max_leaves=12,
)  # fmt: skip
TENSORS = st.sampled_from(list(DTYPES.values())).flatmap(
    lambda dtype: st.lists(st.integers(0, 4), max_size=3).map(lambda shape: torch.ones(shape).to(dtype))
)


@pytest.mark.parametrize("zipped", FORMS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plain=PLAIN, tensor=TENSORS)
def test_saved_document_is_read_back(tmp_path, zipped, plain, tensor):
    document = {"plain": plain, "tensor": tensor, "again": [tensor, plain]}
    assert same(read(saved(tmp_path / "x.pt", document, zipped)), document)


@pytest.mark.parametrize("protocol", range(6))
@settings(max_examples=40)
@given(plain=PLAIN)
def test_every_pickle_protocol_is_read(protocol, plain):
    assert Unpickler("x", io.BytesIO(pickle.dumps(plain, protocol))).load() == plain


@pytest.mark.parametrize("zipped", FORMS)
def test_views_parameters_and_shared_storages_are_read(tmp_path, zipped):
    base = torch.arange(24.0).reshape(4, 6)
    document = collections.OrderedDict(
        base=base, turned=base.t(), part=base[1:, ::2], last=base[3], parameter=torch.nn.Parameter(base[:2]),
        spread=torch.ones(1).expand(5), none=torch.empty(0), point=torch.tensor(3),
    )  # fmt: skip
    assert same(read(saved(tmp_path / "x.pt", document, zipped)), dict(document))


def test_foreign_objects_become_records(tmp_path):
    document = {"settings": Settings(0.5, ["a"]), "path": tmp_path, "scalar": np.float64(3.0), "array": np.ones(3)}
    found = read(saved(tmp_path / "x.pt", document))
    assert all(isinstance(value, PickledObject) for value in found.values())
    assert (found["settings"].kind.name, found["settings"].state) == ("Settings", {"rate": 0.5, "names": ["a"]})
    assert (found["settings"].attribute("names"), found["settings"].attribute("colour")) == (["a"], None)


def test_whole_module_is_a_record_with_its_weights(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    with opened(saved(tmp_path / "x.pt", module)) as checkpoint:
        record = checkpoint.document
        assert str(record.kind) == "torch.nn.modules.container.Sequential"
        inner = record.attribute("_modules")["0"]
        assert str(inner.kind) == "torch.nn.modules.linear.Linear"
        assert same(built(checkpoint, inner.attribute("_parameters")["weight"]), module[0].weight)


def test_repacked_archive_is_read(tmp_path):
    document = {"a": torch.randn(64)}
    source, packed = saved(tmp_path / "x.pt", document), tmp_path / "packed.pt"
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    assert same(read(packed), document)


def rewritten(source, target, **changes):
    """A copy of an archive with some entries replaced, by the last part of their names."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            new.writestr(name, changes.get(name.rpartition("/")[2].replace(".", "_"), old.read(name)))
    return target


def pickled_tensor(elements, offset, shape, strides, state=None):
    """A data.pkl of one tensor, described so."""
    file = io.BytesIO()

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            return ("storage", torch.FloatStorage, "0", "cpu", elements) if value == "here" else None

    arguments = ("here", offset, shape, strides, False, collections.OrderedDict())
    calling = Calling(torch._utils._rebuild_tensor_v2, *arguments)
    calling.call = (*calling.call, state) if state else calling.call
    Pickler(file, 2).dump({"a": calling})
    return file.getvalue()


@pytest.mark.parametrize(
    ("elements", "offset", "shape", "strides"),
    [
        (8, 1, (8,), (1,)), (8, 0, (9,), (1,)), (8, 0, (2, 2), (1, 7)), (8, -1, (1,), (1,)), (8, 0, (2,), (-1,)),
        (8, 0, (-3,), (1,)), (1 << 40, 0, (1 << 40,), (1,)), (8, 0, (1 << 40, 1 << 40), (0, 0)),
        (8, 0, (1,) * 65, (1,) * 65), (8, 0, (1, 1), (1,)), (-8, 0, (1,), (1,)),
    ],
)  # fmt: skip
def test_tensor_outside_its_storage_is_corrupt(tmp_path, elements, offset, shape, strides):
    source = saved(tmp_path / "x.pt", {"a": torch.ones(8)})
    broken = rewritten(source, tmp_path / "y.pt", data_pkl=pickled_tensor(elements, offset, shape, strides))
    with pytest.raises(WeightsCorrupt):
        read(broken)
    fine = rewritten(source, tmp_path / "z.pt", data_pkl=pickled_tensor(8, 2, (3, 2), (2, 1)))
    assert same(read(fine), {"a": torch.ones(3, 2)})


def test_pickled_state_changes_no_tensor(tmp_path):
    source = saved(tmp_path / "x.pt", {"a": torch.ones(8)})
    stream = pickled_tensor(8, 2, (3, 2), (2, 1), [None, "F64", 0, (1 << 40,), (1,)])
    assert same(read(rewritten(source, tmp_path / "y.pt", data_pkl=stream)), {"a": torch.ones(3, 2)})


def test_compressed_bomb_is_refused_before_it_is_unpacked(tmp_path):
    bomb = tmp_path / "x.pt"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", pickle.dumps({}, 2))
        archive.writestr("x/data/0", bytes(50_000_000))
    with pytest.raises(WeightsRefused, match="unpacks to 5000"):
        read(bomb)


def test_entry_larger_than_it_claims_is_corrupt(tmp_path):
    source = tmp_path / "x.pt"
    with zipfile.ZipFile(source, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", pickle.dumps(["a"] * 1000, 2))
    content, size = source.read_bytes(), len(pickle.dumps(["a"] * 1000, 2))
    source.write_bytes(content.replace(struct.pack("<L", size), struct.pack("<L", size - 7)))
    with pytest.raises(WeightsCorrupt, match="another size"):
        read(source)


@pytest.mark.parametrize("counted", [True, False])
def test_damage_is_found_by_the_checksums(tmp_path, counted):
    torch.serialization.set_crc32_options(counted)
    try:
        source = saved(tmp_path / "x.pt", {"a": torch.full((100,), 3.0)})
    finally:
        torch.serialization.set_crc32_options(True)
    assert same(read(source), {"a": torch.full((100,), 3.0)})
    number = struct.pack("<f", 3.0)
    source.write_bytes(source.read_bytes().replace(number * 50, number * 49 + struct.pack("<f", 4.0), 1))
    if counted:
        with pytest.raises(WeightsCorrupt, match="damaged"):
            read(source)
    else:
        assert read(source)["a"].sum() == 301


def test_overlapping_entries_are_corrupt(tmp_path):
    source = saved(tmp_path / "x.pt", {"a": torch.ones(100), "b": torch.zeros(100)})
    content = source.read_bytes()
    with zipfile.ZipFile(source) as archive:
        first, second = (archive.getinfo(f"x/data/{key}").header_offset for key in "01")
    central = content.index(b"PK\x01\x02")
    moved = content[central:].replace(struct.pack("<L", second), struct.pack("<L", first))
    source.write_bytes(content[:central] + moved)
    with pytest.raises(WeightsCorrupt, match="overlap"):
        read(source)


@pytest.mark.parametrize("zipped", FORMS)
def test_file_cut_anywhere_is_corrupt(tmp_path, zipped):
    content = saved(tmp_path / "x.pt", {"a": torch.ones(100)}, zipped).read_bytes()
    for length in range(0, len(content), 7):
        (tmp_path / "cut.pt").write_bytes(content[:length])
        with pytest.raises((WeightsCorrupt, WeightsRefused)):
            read(tmp_path / "cut.pt")


def test_files_of_other_formats_are_named(tmp_path):
    scripted = tmp_path / "script.pt"
    with zipfile.ZipFile(scripted, "w") as archive:
        archive.writestr("m/data.pkl", b"")
        archive.writestr("m/constants.pkl", b"")
    with pytest.raises(WeightsRefused, match="TorchScript"):
        read(scripted)
    (tmp_path / "bare.pt").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(WeightsRefused, match=r"torch\.save did not write"):
        read(tmp_path / "bare.pt")
    (tmp_path / "text.pt").write_bytes(b"hello")
    with pytest.raises(WeightsCorrupt, match=r"no file of torch\.save"):
        read(tmp_path / "text.pt")


@pytest.mark.parametrize(
    "stream",
    [
        b"\x80\x02" + b"(" * 10_001 + b".",  # marks only
        b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"x.",  # a string as long as no file
        b"\x80\x02\x8b" + struct.pack("<L", 1 << 31) + b".",  # a number likewise
        b"\x80\x02I" + b"9" * 5000 + b"\n.",
        b"\x80\x02\x82\x01.",  # an object of the extension registry
        b"\x80\x05\x97.",  # a buffer from elsewhere
        b"\x80\x02ctorch\nload\n}b.",  # a state for a class
        b"\x80\x02ctorch\nload\n(N}U\x01xK\x01stb.",  # and one for its attributes
        b"\x80\x02(U\x07storagectorch\nFloatStorage\nU\x010U\x03cpuK\x08tQ](U\x019U\x02F64K\x63eb.",
        b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._tensor\n_rebuild_from_type_v2\nN)tR.",
        b"\x80\x02ccopyreg\n_reconstructor\n(ccopyreg\n_reconstructor\nN)tR.",
        b"\x80\x02.", b"\x80\x02R.", b"\x80\x02h\x05.", b"\x80\x09N.", b"\x80\x02}](]]u.", b"\x80\x02K\x01K\x01b.",
        b"\x80\x02K\x01)R.", b"\x80\x02NQ.", b"\x80\x02Vno end",
    ],
)  # fmt: skip
def test_hostile_streams_end_in_one_line(tmp_path, stream):
    with pytest.raises((WeightsCorrupt, WeightsRefused)) as raised, opened(described(tmp_path, stream)):
        pass
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "stream",
    [
        b"\x80\x02]" + b"\x85" * 200_000 + b".",  # tuples in tuples
        b"\x80\x02]" + b"2\x86" * 100 + b".",  # twice itself, often
        b"\x80\x02ctorch\nload\n)R)R)R.",  # calls of calls
        b"\x80\x02]q\x00h\x00a.",  # a list in itself
    ],
)
def test_strange_streams_are_data(tmp_path, stream):
    with opened(described(tmp_path, stream)) as checkpoint:
        assert checkpoint.document is not None


def described(folder, stream):
    archive = folder / "x.pt"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("x/data.pkl", stream)
    return archive
