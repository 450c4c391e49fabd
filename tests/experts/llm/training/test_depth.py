"""Depth cut: which layers are kept, and that each is kept whole in every family."""

from itertools import pairwise

import pytest
import torch

from experts.errors import WeightsRefused
from experts.llm.config import parse_spec
from experts.llm.model import LanguageModel
from experts.llm.training.depth import kept_layers, student_config, student_tensors
from tests.experts.llm.conftest import FAMILIES, logits_of, tiny_config


@pytest.mark.parametrize("layers", range(3, 30))
def test_the_first_and_the_last_layer_are_kept_and_others_at_equal_distances(layers):
    for depth in range(2, layers):
        kept = kept_layers(layers, depth, "t")
        assert (len(kept), kept[0], kept[-1]) == (depth, 0, layers - 1)
        gaps = [after - before for before, after in pairwise(kept)]
        assert 1 <= min(gaps) <= max(gaps) <= min(gaps) + 1


def test_a_pyramid_stays_one():
    values = tiny_config("pr_moe", num_hidden_layers=8, num_experts=[0, 2, 0, 2, 0, 4, 0, 4])
    kept = kept_layers(8, 7, "t")
    assert kept == (0, 1, 2, 3, 4, 5, 7)
    assert student_config(values, kept, "t")["num_experts"] == [0, 2, 0, 2, 0, 4, 4]


@pytest.mark.parametrize("family", FAMILIES)
def test_kept_layers_are_whole(family, model_files):
    counts = {"num_experts": [0, 2, 4, 4, 6]} if family == "pr_moe" else {}
    values = tiny_config(family, num_hidden_layers=5, **counts, layer_types=["full_attention"] * 5)
    kept = kept_layers(5, 3, "t")
    spec, tensors = model_files.read(family, **values)
    cut = parse_spec(student_config(values, kept, "t"), "t")
    assert cut.layers == tuple(spec.layers[layer] for layer in kept)
    student = student_tensors(tensors, kept)
    for number, layer in enumerate(kept):
        own = [name for name in tensors if name.startswith(f"layers.{layer}.")]
        assert own
        for name in own:
            assert torch.equal(student[name.replace(f"layers.{layer}.", f"layers.{number}.")], tensors[name])
    detached = {name: tensor.detach() for name, tensor in student.items()}
    assert logits_of(LanguageModel(cut, detached), [3, 5, 8]).isfinite().all()


@pytest.mark.parametrize("depth", [-1, 1, 8, 9])
def test_a_depth_out_of_range_says_which_are_in_it(depth):
    with pytest.raises(WeightsRefused, match="give --depth from 2 to 7"):
        kept_layers(8, depth, "t")
    with pytest.raises(WeightsRefused, match="cannot be made shallower"):
        kept_layers(2, depth, "t")
