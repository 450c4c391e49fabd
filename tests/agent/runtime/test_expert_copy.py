"""What an expert's kind is called: one name for all that run alike."""

from dataclasses import replace
from pathlib import Path

from agent.runtime.expert_copy import kind_name
from experts.expert import Expert, InputSpec


def expert(architecture, **changes):
    return replace(Expert("x/y", architecture, Path("w"), ("ok",), InputSpec(64, 96)), **changes)


def test_experts_of_one_kind_run_alike():
    assert kind_name(expert("resnet18"), None) == "resnet18 64x96 imagenet"
    assert kind_name(expert("resnet18", stem="3x3", id="a/b"), None) == "resnet18 64x96 imagenet stem=3x3"
    assert kind_name(expert("resnet18"), "f" * 64) == "resnet18 64x96 imagenet"
    assert kind_name(expert("onnx"), "0123456789abcdef") == "onnx 64x96 imagenet program=0123456789ab"
