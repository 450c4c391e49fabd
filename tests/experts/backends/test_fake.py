"""The fake: real bytes, real time, and proof of whose bytes it ran from."""

import pytest

from experts.backends.fake import FakeBackend
from experts.errors import WeightsCorrupt, WeightsMismatch
from experts.expert import Precision
from tests.experts.conftest import packed_in

BACKEND = FakeBackend()


def test_fake_run_over_another_experts_bytes_is_detected(files, store, make_slot, image):
    first, second = files.fake("cls/first"), files.fake("cls/second")
    packed = packed_in(store, [first, second], Precision.FP32)
    slot = make_slot(first, packed["cls/first"][Precision.FP32], store)
    slot.infer(first, image)
    slot.load(second, packed["cls/second"][Precision.FP32])
    with pytest.raises(WeightsCorrupt, match="cls/first"):
        slot.infer(first, image)


@pytest.mark.parametrize("place", [0, -1])
def test_partially_loaded_bytes_of_a_fake_are_detected(files, store, make_slot, image, place):
    expert = files.fake("cls/x", weight_bytes=5)
    slot = make_slot(expert, packed_in(store, [expert], Precision.FP32)[expert.id][Precision.FP32], store)
    slot.buffers[0].tensor[:5][place] ^= 1
    with pytest.raises(WeightsCorrupt, match="cls/x"):
        slot.infer(expert, image)


def test_label_of_a_fake_follows_the_image_unless_it_is_fixed(files, store, make_slot, image):
    expert = files.fake("cls/x", labels=[str(number) for number in range(50)])
    slot = make_slot(expert, packed_in(store, [expert], Precision.FP32)[expert.id][Precision.FP32], store)
    pictures = [image, 255 - image, image // 2, image // 4]
    alone = [slot.infer(expert, picture)[0].label for picture in pictures]
    assert [each.label for each in slot.infer(expert, *pictures)] == alone
    assert len(set(alone)) > 1
    fixed = files.fake("cls/fixed", label="missing")
    slot = make_slot(fixed, packed_in(store, [fixed], Precision.FP32)[fixed.id][Precision.FP32], store)
    assert [each.label for each in slot.infer(fixed, image, 255 - image)] == ["missing", "missing"]
    with pytest.raises(WeightsMismatch, match="not a label of the line"):
        BACKEND.pack(files.fake("cls/y", label="elsewhere"), Precision.FP32)


@pytest.mark.parametrize(
    "content",
    ["[]", "{", "{}", "weight_bytes: 0", "weight_bytes: many", "{weight_bytes: 1, K_s: -1}", "{weight_bytes: 1, k: 2}"],
)
def test_senseless_declaration_of_a_fake_is_corrupt(files, content):
    expert = files.fake("cls/x")
    expert.weights.write_text(content)
    with pytest.raises(WeightsCorrupt, match="does not declare a fake"):
        BACKEND.pack(expert, Precision.FP32)
