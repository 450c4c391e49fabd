"""Attention whose layers differ in scope: a prompt's scores are made in blocks, and every query sees its own."""

import pytest
import torch

from experts.llm import scoped_attention
from experts.llm.model import LanguageModel
from tests.experts.llm.conftest import logits_of


@pytest.mark.parametrize("at_once", [1, 200, 700])
@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_scores_that_are_made_in_blocks_give_the_logits_of_one_block(family, at_once, model_files, monkeypatch):
    model, prompts = LanguageModel(*model_files.read(family)), ([7, 3, 9] * 12, [5] * 20)
    whole = logits_of(model, *prompts)
    monkeypatch.setattr(scoped_attention, "SCORES_AT_ONCE", at_once)
    torch.testing.assert_close(logits_of(model, *prompts), whole, rtol=1e-5, atol=1e-5)
