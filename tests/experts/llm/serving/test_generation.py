"""What a text may be asked to be, and what is refused, naming the field."""

import subprocess
import sys

import pytest

from experts.errors import GenerationInvalid, PromptInvalid, SamplingInvalid
from experts.llm.serving.generation import Sampling, TextRequest, check_against
from tests.experts.llm.serving.conftest import VOCABULARY, CountingModel


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("temperature", -0.1, "from 0 to 100"), ("temperature", float("nan"), "from 0 to 100"),
        ("temperature", "hot", "from 0 to 100"), ("top_p", 0, "above 0 and up to 1"), ("top_p", 1.1, "up to 1"),
        ("top_k", -1, "a whole number from 0"), ("top_k", 2.5, "a whole number"), ("top_k", None, "a whole number"),
        ("min_p", 1.5, "from 0 to 1"), ("repetition_penalty", 0, "above 0"),
        ("repetition_penalty", float("inf"), "up to 100"), ("presence_penalty", 2.1, "from -2 to 2"),
        ("frequency_penalty", -3, "from -2 to 2"), ("seed", 2**63, "a whole number"), ("seed", 1.0, "a whole number"),
        ("logprobs", 21, "from 0 to 20"), ("logprobs", True, "from 0 to 20"),
    ],
)  # fmt: skip
def test_field_out_of_its_range_is_named(field, value, allowed):
    with pytest.raises(SamplingInvalid, match=allowed) as refused:
        Sampling(**{field: value})
    assert refused.value.field == field
    assert str(refused.value).startswith(f"{field}: is {value!r}: give a")
    assert isinstance(refused.value, GenerationInvalid)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"prompt": ()}, "prompt: is empty"), ({"most_new_tokens": 0}, "most_new_tokens: is 0"),
        ({"choices": {}}, "choices: are none"), ({"choices": {"a": ()}}, "choices.a: has no tokens"),
        ({"choices": {"a": (1, 2), "b": (1, 2, 3)}}, "choices.a: begins choices.b"),
        ({"choices": {"a": (4,), "b": (4,)}}, "begins choices"),
    ],
)  # fmt: skip
def test_impossible_text_is_refused(values, told):
    with pytest.raises(PromptInvalid, match=told):
        TextRequest(**{"prompt": (1,), "most_new_tokens": 3, **values})


@pytest.mark.parametrize(
    ("generation", "told"),
    [
        (TextRequest((1,) * 256, 1), "has 256 tokens, over the model's context of 256"),
        (TextRequest((1,) * 200, 57), "shorten it, or ask for at most 56"),
        (TextRequest((1, VOCABULARY), 1), f"has token {VOCABULARY} at 1, the model knows 0 to {VOCABULARY - 1}"),
        (TextRequest((1, 2, -1), 1), "has token -1 at 2"),
        (TextRequest((1,), 0, choices={"a": (999,)}), "choices.a: has token 999"),
    ],
)
def test_prompt_that_a_model_cannot_take_is_refused(generation, told):
    check_against(TextRequest((0, VOCABULARY - 1), 254), CountingModel.spec)
    with pytest.raises(PromptInvalid, match=told):
        check_against(generation, CountingModel.spec)


def test_generation_is_imported_without_torch():
    code = "import sys, experts.llm.serving.generation as g; g.Sampling(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
