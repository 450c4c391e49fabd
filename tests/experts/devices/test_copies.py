"""Tensors packed into one buffer and back: each is what it was, whatever is packed beside it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experts.devices import copies as device_copies
from experts.devices.copies import Download, Upload, copied_down, copied_up

DTYPES = (torch.int64, torch.float64, torch.int32, torch.float32, torch.bfloat16, torch.bool, torch.uint8)
PARTS = st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)), min_size=1, max_size=6)


@given(PARTS)
@pytest.mark.parametrize("copied", [copied_up, copied_down])
def test_parts_of_any_formats_and_shapes_survive_a_copy(copied, parts):
    tensors = [torch.arange(torch.Size(shape).numel()).view(shape).to(dtype) for dtype, shape in parts]
    for found, tensor in zip(copied(tensors, torch.device("cpu")), tensors, strict=True):
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found, tensor)


def test_parts_go_up_when_one_is_read_and_later_ones_in_a_further_copy(monkeypatch):
    copies = []
    monkeypatch.setattr(device_copies, "copied_up", lambda parts, device: copies.append(len(parts)) or parts)
    numbers = Upload("meta")
    first, second = numbers.add(torch.tensor([1])), numbers.add(torch.tensor([2]))
    assert not copies
    assert (int(numbers[second]), int(numbers[first])) == (2, 1)
    assert int(numbers[numbers.add(torch.tensor([3]))]) == 3
    assert copies == [2, 1]


def test_iteration_without_results_waits_for_its_device(monkeypatch):
    waited = []
    monkeypatch.setattr(device_copies, "copied_down", lambda parts, device: waited.append(device.type) or parts)
    Download(torch.device("meta")).fetch()
    Download(torch.device("cpu")).fetch()
    assert waited == ["meta"]
