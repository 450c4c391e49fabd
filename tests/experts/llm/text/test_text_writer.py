"""Text as it grows: the pieces joined are the text, no half a character, nothing of a stop string."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experts.errors import PromptInvalid
from experts.llm.serving.generation import Token
from experts.llm.text.text_writer import (
    HALF,
    MOST_STOP_CHARACTERS,
    MOST_STOPS,
    PATIENCE,
    StopStrings,
    TextWriter,
    Words,
)  # fmt: skip
from experts.llm.text.tokenizer import TextModel
from tests.experts.llm.text.conftest import byte_level, like_sentencepiece, text_files

MODELS = {
    "byte level": TextModel.of(text_files(byte_level()), "llm/a"),
    "like SentencePiece": TextModel.of(text_files(like_sentencepiece()), "llm/b"),
}
KINDS = pytest.mark.parametrize("kind", MODELS)
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=HALF), max_size=30)
FEW = st.text("ab ", max_size=20)


def written(model, tokens, *, prompt=(), stops=()):
    pieces = []
    writer = TextWriter(model, prompt, stops, pieces.append)
    for token in tokens:
        if writer.write(Token(token, -0.5)):
            break
    writer.finish()
    return pieces, writer


@KINDS
@given(text=TEXTS)
def test_pieces_join_to_the_text_and_none_ends_mid_character(kind, text):
    model = MODELS[kind]
    pieces, _ = written(model, model.encode(text))
    assert "".join(piece.text for piece in pieces) == text
    assert not any(HALF in piece.text for piece in pieces)


@KINDS
@given(before=TEXTS.filter(bool), text=TEXTS)
def test_text_after_a_prompt_keeps_its_leading_space(kind, before, text):
    model = MODELS[kind]
    prompt, both = model.encode(before), model.encode(before + text)
    if both[: len(prompt)] != prompt:  # the prompt's end and the text's beginning are one token
        return
    pieces, _ = written(model, both[len(prompt) :], prompt=prompt)
    assert "".join(piece.text for piece in pieces) == text


@KINDS
@given(data=st.data())
def test_any_tokens_show_text_soon(kind, data):
    model = MODELS[kind]
    tokens = data.draw(st.lists(st.integers(0, model.tokens - 1), max_size=60))
    words = Words(model.decode)
    waited = 0
    for token in tokens:
        waited = 0 if words.add(token) or not model.decode([token]) else waited + 1
        assert waited < PATIENCE


@given(text=FEW, stops=st.lists(st.text("ab ", min_size=1, max_size=4), max_size=3), data=st.data())
def test_no_part_of_a_stop_string_is_shown_in_any_chunks(text, stops, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    matcher = StopStrings(stops)
    shown = []
    for part in parts:
        shown.append(matcher.add(part))
        assert not matcher.is_complete or matcher.add("more") == ""
        if matcher.is_complete:
            break
    shown.append(matcher.rest())
    assert ("".join(shown), matcher.is_complete) == (expected(text, stops), any(stop in text for stop in stops))


def expected(text, stops):
    """Letter by letter: the text ends before the longest stop string that the first complete end is of."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


def test_each_token_is_sent_once_with_the_text_it_completes():
    model = MODELS["byte level"]
    tokens = model.encode("fox 𐍈 dog𐍈")[:-1]
    pieces, writer = written(model, tokens)
    assert "".join(piece.text for piece in pieces) == "fox 𐍈 dog"  # without the half
    assert pieces[-1].tokens[-1].text.startswith("bytes:\\x")
    assert [sampled.id for piece in pieces for sampled in piece.tokens] == list(tokens)
    assert writer.written == len(tokens)


@pytest.mark.parametrize("stops", [[""], ["x" * (MOST_STOP_CHARACTERS + 1)], ["x"] * (MOST_STOPS + 1)])
def test_invalid_stop_strings_are_refused(stops):
    with pytest.raises(PromptInvalid, match="stop: has"):
        TextWriter(MODELS["byte level"], (), stops, lambda _: None)


@KINDS
@pytest.mark.parametrize("stop", ["ck fo", "fox", "ox j"])
def test_sent_tokens_are_those_of_the_shown_text(kind, stop):
    model = MODELS[kind]
    pieces, writer = written(model, model.encode("the quick fox jumps"), stops=(stop,))
    assert writer.is_stopped
    assert writer.write(Token(0, 0.0)) is True
    shown = "".join(piece.text for piece in pieces)
    told = [sampled.id for piece in pieces for sampled in piece.tokens]
    assert shown == "the quick fox jumps".partition(stop)[0]
    assert model.decode(told).startswith(shown.rstrip())
    assert len(model.decode(told[:-1])) < len(shown), "the last that is told begins in what is shown"
