"""The table of what processors have, and the precision that it gives a language model. CUDA's answers are made up."""

import json
from types import SimpleNamespace

import pytest
import torch

from agent.runtime.machine.detection import detect
from experts.backends import capabilities, own_precision
from experts.backends.capabilities import capabilities_of, cuda_capabilities, supposed
from experts.expert import Precision

TURING, ORIN = SimpleNamespace(major=7, minor=5, is_integrated=0), SimpleNamespace(major=8, minor=7, is_integrated=1)


@pytest.fixture
def gpu(monkeypatch):
    def there(properties):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    return there


def test_capabilities_of_a_gpu_are_asked_of_torch(gpu, monkeypatch):
    gpu(TURING)
    assert capabilities_of("cuda") == cuda_capabilities((7, 5))
    assert capabilities_of("w1/cuda").multiplied == ("fp16",)
    gpu(ORIN)
    monkeypatch.setattr(capabilities, "find_spec", lambda name: None)
    found = capabilities_of("cuda")
    assert (found.has_own_memory, found.has_triton, found.has_pinned_memory) == (False, False, True)


def test_integrated_gpu_makes_a_unified_box(gpu, monkeypatch):
    gpu(ORIN)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Orin")
    monkeypatch.setattr("agent.runtime.machine.detection._check_answers", lambda device: None)
    box = detect("cuda")
    assert (box.name, box.model, box.processors, box.is_split) == ("jetson", "Orin", ("cuda", "cpu"), False)


@pytest.mark.parametrize(
    ("stored", "compute", "own"),
    [("bfloat16", (7, 5), "fp32"), ("float16", (7, 5), "fp16"), ("bfloat16", (8, 6), "bf16")],
)
def test_model_in_numbers_that_its_gpu_emulates_runs_in_fp32(tmp_path, stored, compute, own):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"dtype": stored}))
    model = SimpleNamespace(architecture="llm", weights=folder)
    with supposed({"cuda": cuda_capabilities(compute)}):
        assert own_precision(model, "cuda") == Precision(own)


def test_row_names_what_a_processor_has_and_lacks():
    assert capabilities.METAL.text == (
        "multiplies fp32, bf16, fp16; lacks own memory, triton, pinned memory, streams, graphs, float64"
    )
    found = capabilities_of("emulated").text
    assert found.endswith("has own memory, float64; lacks triton, pinned memory, streams, graphs")
