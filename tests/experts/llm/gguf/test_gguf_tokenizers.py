"""Tokenizers of GGUF files: the tokens of the tokenizer that the file was written of, and of transformers' reader."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from experts.errors import ModelUnsupported, WeightsCorrupt
from experts.llm.files.program import read_program
from experts.llm.text.tokenizer import TextModel
from tests.experts.llm.gguf.words import LINES, SPLITS, byte_level, byte_level_words, pieces
from tests.experts.llm.gguf.writing import tiny_model, write_model

ODD = (
    *LINES, "", " ", "   leading", "trailing   ", "a\n\n\nb", "don't WE'VE we'll", "1234567 12 1,000.5", "XMLHttp",
    "e\u0301te\u0301", "\u00a0nbsp\u200bzero", "🙂🙃👨\u200d👩", "日本語テスト", "\x00\x7f",
    "<|im_start|>x<|im_end|>", "<s>", "\u2581",
)  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Writes a model with these words; gives its tokenizer, and the file."""
    folder = tmp_path_factory.mktemp("words")

    def write(words):
        model = tiny_model("llama", vocab_size=len(words["tokenizer.ggml.tokens"]), num_hidden_layers=1)
        path = write_model(folder / f"{len(list(folder.iterdir()))}.gguf", model, tokenizer=words)
        return TextModel.of(read_program(path, "llm/a"), "llm/a"), path

    return write


@pytest.mark.parametrize("split", SPLITS)
def test_byte_level_tokens_are_those_of_the_tokenizer_that_the_file_was_written_of(written, split):
    ours, _ = written(byte_level_words(split))
    theirs = byte_level(split)
    for text in ODD:
        tokens = theirs.encode(text, add_special_tokens=False).ids
        assert list(ours.encode(text, adds_special=False)) == tokens
        assert ours.decode(tokens) == theirs.decode(tokens)


@pytest.mark.parametrize("words", [byte_level_words("qwen2"), byte_level_words("llama-bpe"), pieces()])
def test_tokens_and_chats_are_those_of_transformers_for_the_same_file(written, words):
    ours, path = written(words)
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in ODD:
        if "\u0301" not in text and not (text[:1] in (" ", "\u2581") and words["tokenizer.ggml.model"] == "llama"):
            # its reader leaves out that Qwen's texts are composed, and SentencePiece's space before a space
            assert list(ours.encode(text, adds_special=False)) == theirs(text, add_special_tokens=False)["input_ids"]
    if "tokenizer.chat_template" in words:
        messages = [{"role": "user", "content": "the fox"}]
        text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert ours.chat.render(messages) == text


def by_scores(text, words):
    """SentencePiece's BPE as its authors describe it: of all neighbours the pair of the best score, the leftmost."""
    ids = {token: number for number, token in enumerate(words["tokenizer.ggml.tokens"])}
    scores, kinds = words["tokenizer.ggml.scores"], words["tokenizer.ggml.token_type"]
    parts = list("\u2581" + text.replace(" ", "\u2581")) if text else []
    while True:
        joined = [(scores[ids[a + b]], -n) for n, (a, b) in enumerate(pairwise(parts))
                  if a + b in ids and kinds[ids[a + b]] == 1]  # fmt: skip
        if not joined:
            break
        n = -max(joined)[1]
        parts[n : n + 2] = [parts[n] + parts[n + 1]]
    return [
        token
        for part in parts
        for token in ([ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()])
    ]


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.sampled_from("thequickbrown foxjums ovrlazydg,éà你🙂\n1"), max_size=24))
def test_pieces_are_joined_by_their_scores(sentencepieces, text):
    ours, words = sentencepieces
    assert list(ours.encode(text, adds_special=False)) == by_scores(text, words)


@pytest.fixture(scope="module")
def sentencepieces(written):
    words = pieces()
    return written(words)[0], words


def test_special_tokens_around_a_prompt_are_those_that_the_file_asks_for(written):
    ours, _ = written(pieces())
    assert ours.encode("fox")[0] == 1  # as llama.cpp, where the file does not say
    ours, _ = written(pieces() | {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True})
    tokens = ours.encode("fox")
    assert (tokens[0] != 1, tokens[-1]) == (True, 2)


def test_no_space_is_added_where_the_file_says_so(written):
    ours, _ = written(pieces() | {"tokenizer.ggml.add_space_prefix": False})
    assert ours.decode(ours.encode(" fox", adds_special=False)) == " fox"
    assert ours.encode("fox", adds_special=False) != ours.encode(" fox", adds_special=False)


def test_answers_end_at_the_files_end_tokens_and_at_known_ones(written):
    words = byte_level_words()
    ours, _ = written(words)
    ids = words["tokenizer.ggml.tokens"].index
    assert ours.stop_tokens == {ids("<|im_end|>"), ids("<|endoftext|>")}
    assert ours.chat.render([{"role": "user", "content": "x"}]).endswith("<|im_start|>assistant\n")


def test_recommended_sampling_is_the_files(written):
    ours, _ = written(byte_level_words(**{"general.sampling.temp": 0.5, "general.sampling.top_k": 20}))
    assert dict(ours.sampling) == {"temperature": 0.5, "top_k": 20}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (byte_level_words(**{"tokenizer.ggml.pre": "a-new-split"}), "tokenizer.ggml.pre: 'a-new-split'"),
        (byte_level_words(**{"tokenizer.ggml.pre": None}), "tokenizer.ggml.pre: None is not served: convert"),
        (byte_level_words(**{"tokenizer.ggml.model": "bert"}), "tokenizer.ggml.model: 'bert'"),
        (byte_level_words(**{"tokenizer.ggml.a_new_idea": 1}), "tokenizer.ggml.a_new_idea"),
        (pieces() | {"tokenizer.ggml.remove_extra_whitespaces": True}, "remove_extra_whitespaces"),
    ],
)
def test_tokenizer_that_is_not_served_is_refused_by_name(written, words, named):
    with pytest.raises(ModelUnsupported, match=named):
        written(words)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokenizer.ggml.token_type", [1, 2]),
        ("tokenizer.ggml.eos_token_id", 70_000),
        ("tokenizer.ggml.merges", ["no pair"]),
        ("tokenizer.ggml.tokens", ["twice"] * len(byte_level_words()["tokenizer.ggml.tokens"])),
    ],
)
def test_vocabulary_that_contradicts_itself_is_corrupt(written, key, value):
    with pytest.raises(WeightsCorrupt, match=key):
        written(byte_level_words(**{key: value}))


def test_scores_without_an_order_are_refused(written):
    words = pieces()
    with pytest.raises(WeightsCorrupt, match="scores"):
        written(words | {"tokenizer.ggml.scores": [-1000.0] * len(words["tokenizer.ggml.tokens"])})
