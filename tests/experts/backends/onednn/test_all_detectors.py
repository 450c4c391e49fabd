"""The YOLO families in oneDNN's form against eager fp32, on random weights and tiny images."""

import pytest
import torch

from experts.backends import detector
from experts.backends.onednn import form as onednn_form
from experts.backends.onednn.form import FusedModule, OnednnForm, Placement, fused_module
from experts.backends.onednn.layouts import reference

FAMILIES = ["yolov3-tiny", "yolov5n", "yolov6n", "yolov8n", "yolov9t", "yolov10n", "yolo11n", "yolo12n", "yolo26n"]
SIZE = (64, 64)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_it_answers_as_eager_fp32_does(architecture):
    module = detector._template(architecture, 3).folded
    sample = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in module.state_dict().items()}
    fused = fused_module(module, SIZE, detector.OUTPUTS, torch.float32)
    assert isinstance(fused, FusedModule)
    assert not any(node.target is torch.conv2d for node in fused.graph.graph.nodes)
    form = OnednnForm(fused, {name: Placement.of(name, reference(shape)) for name, shape in fused.shapes.items()})
    found = onednn_form._deviations(module, form, detector.OUTPUTS, sample)
    assert found.keys() == {"boxes", "scores"}
    assert max(found.values()) < 1e-4
