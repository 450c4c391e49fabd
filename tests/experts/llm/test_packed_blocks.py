"""moe_experts in blocks: each can be read alone, is checked by itself, and together they are the layer's tensors."""

import pytest
import torch

from experts.backends.forms import form_of
from experts.errors import WeightsCorrupt, WeightsMissing
from experts.expert import Expert, Precision
from experts.llm.files.checkpoint import open_checkpoint
from experts.llm.files.config import read_spec
from experts.llm.model import LanguageModel
from experts.llm.quant import SCALE, Int8Tensors
from experts.packed.packing import pack_line
from experts.packed.weights import ALIGNMENT_BYTES, AlignedBuffer
from tests.experts.llm.conftest import MOE_FAMILIES, logits_of


@pytest.fixture
def expert(model_files):
    return Expert("llm/a", "llm", model_files.write(model_files.config("mixtral")), (), None)


def packed_in(store, experts, precision=Precision.FP32):
    report = pack_line(experts, lambda _: {precision}, store)
    assert report.failed == {}
    return [report.packed[expert.id][precision] for expert in experts]


def layers_of(packed):
    return [segment for segment in packed.shared if segment.blocks is not None]


def tensors_of(expert):
    spec = read_spec(expert.weights, expert.id)
    return spec, open_checkpoint(expert.weights, expert.id, spec).read_all()


def read(store, segment, number):
    buffer = AlignedBuffer(segment.blocks.size_bytes)
    store.read_block(segment, number, buffer.view, "llm/a")
    return buffer.tensor


@pytest.mark.parametrize("family", MOE_FAMILIES)
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.INT8])
def test_each_block_holds_one_of_a_layers_experts(model_files, store, family, precision):
    expert = Expert("llm/a", "llm", model_files.write(model_files.config(family)), (), None)
    spec, tensors = tensors_of(expert)
    if precision is Precision.INT8:
        tensors = dict(Int8Tensors(tensors, form_of(Precision.INT8).dtype))
    (packed,) = packed_in(store, [expert], precision)
    assert len(layers_of(packed)) == sum(layer.moe is not None for layer in spec.layers)
    assert len({segment.blocks.size_bytes for segment in layers_of(packed)}) == 1
    for segment in layers_of(packed):
        assert segment.size_bytes == segment.blocks.size_bytes * len(segment.blocks.sha256)
        assert segment.blocks.size_bytes % ALIGNMENT_BYTES == 0
        for number in range(len(segment.blocks.sha256)):
            block = read(store, segment, number)
            for one in segment.tensors:
                part = torch.as_strided(
                    block.view(getattr(torch, one.dtype)), one.shape[1:], one.stride[1:],
                    one.offset_bytes // getattr(torch, one.dtype).itemsize,
                )  # fmt: skip
                assert torch.equal(part, tensors[one.name][number])
    in_blocks = {one.name for segment in layers_of(packed) for one in segment.tensors}
    assert in_blocks == {name for name in tensors if ".experts." in name}


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_int8_blocks_are_bound_to_what_was_packed(model_files, store, make_slot, family):
    expert = Expert("llm/a", "llm", model_files.write(model_files.config(family)), (), None)
    spec, tensors = tensors_of(expert)
    (packed,) = packed_in(store, [expert], Precision.INT8)
    assert any(one.name.endswith(SCALE) for one in packed.own.tensors)
    slot = make_slot(expert, packed, store)
    exact = LanguageModel(spec, dict(Int8Tensors(tensors, form_of(Precision.INT8).dtype)))
    assert torch.equal(logits_of(slot.skeleton.model, range(1, 40)), logits_of(exact, range(1, 40)))


def test_equal_layers_of_several_experts_are_one_file(model_files, store):
    values = model_files.config("mixtral")
    backbone, others = (model_files.tensors(values, seed=seed) for seed in (0, 1))
    mixed = {name: others[name] if "layers.1." in name else tensor for name, tensor in backbone.items()}
    folders = [model_files.write(values, tensors) for tensors in (backbone, mixed)]
    experts = [Expert(f"llm/{number}", "llm", folder, (), None) for number, folder in enumerate(folders)]
    first, second = packed_in(store, experts)
    assert first.layout == second.layout
    same = [one == other for one, other in zip(layers_of(first), layers_of(second), strict=True)]
    assert same == [True, False, True]
    assert packed_in(store, experts) == [first, second]  # nothing is packed again
    files = {path.name for path in (store.directory / "segments").iterdir()}
    assert files == {f"{segment.sha256}.bin" for packed in (first, second) for segment in packed.segments}


class TestCorruptBlocks:
    def test_corrupt_block_is_detected_when_it_is_read_and_not_before(self, store, expert):
        (packed,) = packed_in(store, [expert])
        segment = layers_of(packed)[1]
        with store.segment_path(segment.sha256).open("r+b") as file:
            file.seek(2 * segment.blocks.size_bytes)
            file.write(b"\x55")
        read(store, segment, 1)
        for _ in range(2):
            with pytest.raises(WeightsCorrupt, match="block 2 of"):
                read(store, segment, 2)
        read(store, segment, 1)
        assert store.segment_path(segment.sha256) in store.discard_corrupt(packed)
        with pytest.raises(WeightsMissing):
            read(store, segment, 1)

    def test_block_changed_after_its_check_is_detected(self, store, expert):
        (packed,) = packed_in(store, [expert])
        segment = layers_of(packed)[0]
        read(store, segment, 0)
        store.read(segment, AlignedBuffer(segment.size_bytes), expert.id)
        with store.segment_path(segment.sha256).open("r+b") as file:
            file.write(b"\x55")
        with pytest.raises(WeightsCorrupt, match="block 0 of"):
            read(store, segment, 0)
        with store.segment_path(segment.sha256).open("r+b") as file:
            file.truncate(segment.size_bytes - ALIGNMENT_BYTES)
        with pytest.raises(WeightsCorrupt, match="expected"):
            read(store, segment, 0)


def test_page_cache_serves_blocks_if_direct_reads_are_refused(store, expert):
    (packed,) = packed_in(store, [expert])
    segment = layers_of(packed)[0]
    unaligned = AlignedBuffer(segment.blocks.size_bytes + ALIGNMENT_BYTES)
    store.read_block(segment, 1, unaligned.view[1:], expert.id)
    expected = read(store, segment, 1)
    assert bytes(unaligned.view[1 : 1 + len(expected)]) == expected.numpy().tobytes()
