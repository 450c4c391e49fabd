"""Tokenizers of both usual kinds, made here, as the files of a model's directory."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

LINES = (
    "the quick brown fox jumps over the lazy dog",
    "été à la plage, ça va? 你好 世界 🙂🙃 naïve",
    "  two  spaces\n\n",
)
CORPUS = LINES * 20
CHAT = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' }}{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LETTERS = sorted({letter for text in CORPUS for letter in text if letter.isascii() and letter not in " \n"})


def byte_level():
    """As GPT-2's and Qwen's: text is bytes, and bytes that are often together are a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|end|>", "<|user|>"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def like_sentencepiece():
    """As Llama 2's: words begin with a mark, and what has no letters of its own is spelled in bytes."""
    words = ["\u2581", "\u2581the", "\u2581fox", "qu", "ick", *LETTERS]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("q", "u"), ("i", "c"), ("ic", "k")]
    vocabulary.setdefault("ic", len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return tokenizer


def text_files(tokenizer, *, config=None, settings=None, **files):
    config = {"max_position_embeddings": 64} | (config or {})
    settings = {"eos_token": "<|end|>"} | (settings or {})
    made = {"config.json": json.dumps(config), "tokenizer.json": tokenizer.to_str()}
    made |= {"tokenizer_config.json": json.dumps(settings)} | files
    return {name: content.encode() for name, content in made.items()}


@pytest.fixture(scope="session")
def byte_level_tokenizer():
    return byte_level()


@pytest.fixture(scope="session")
def tokenizers(byte_level_tokenizer):
    return {"byte level": byte_level_tokenizer, "like SentencePiece": like_sentencepiece()}
