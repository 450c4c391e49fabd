"""A line's packed weights in the forms that are tried: what cannot be packed in one is noted, and runs in another."""

from contextlib import closing

import pytest
import torch

from agent.config import read_line
from experts.expert import Precision
from experts.packed.weights import SegmentStore
from profiler.microbench.packed_forms import LinePacking
from profiler.workload.generated_line import LineRecipe, generate_line
from profiler.workload.samples import LineSamples
from tests.forms import needs

RECIPE = LineRecipe(classifiers=2, architecture="squeezenet1_1", requests=1, classifier_px=72)  # a size of its own


@pytest.fixture
def wrong_convolutions():
    """oneDNN's convolutions answer with zeros, until the test ends."""

    def zeros(images, weight, bias, padding, stride, dilation, groups, *_):
        shape = torch.conv2d(images.to("meta"), torch.empty(weight.shape, device="meta", dtype=images.dtype), None,
                             stride, padding, dilation, groups).shape  # fmt: skip
        return torch.zeros(shape, dtype=images.dtype).contiguous(memory_format=torch.channels_last)

    libraries = []
    for key in ("CPU", "MkldnnCPU"):
        libraries.append(torch.library.Library("mkldnn", "IMPL"))
        libraries[-1].impl("_convolution_pointwise", zeros, key, allow_override=True)
    yield
    libraries.clear()


@needs(Precision.ONEDNN_FP32)  # tried here, before the convolutions are wrong
def test_a_form_that_this_box_computes_wrongly_is_noted_once_and_its_experts_are_served(tmp_path, wrong_convolutions):
    config = read_line(generate_line(tmp_path / "line", RECIPE).line, {"COSERVE__DEVICE": "cpu"})
    with closing(SegmentStore(config.packed_folder)) as store:
        packing = LinePacking(config, store, LineSamples(), lambda *_: None)
        tried = {name: {Precision.ONEDNN_FP32} for name in config.catalog.experts}
        copies = [packing.pack(tried) for _ in range(2)][-1]
    assert {form: len(listed) for form, listed in copies.items()} == {Precision.FP32: 2}
    (note,) = packing.notes
    assert note.startswith(
        "squeezenet1_1 does not run in onednn-fp32: on this box oneDNN is off in features.0 (convolu"
    )
    assert note.endswith(" by 1 of the largest value, and 25 more of its 26 calls; choose fp32")
    assert packing.failed == {}
