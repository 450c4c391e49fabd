"""Tokenizers that are trained here, and the metadata that a converter writes of them."""

import json

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

LINES = (
    "the quick brown fox jumps over the lazy dog, and 12345 dogs don't care: I'LL see",
    "été à la plage, ça va? 你好 世界 🙂🙃 naïve CamelCase XMLHttpRequest",
    "  two  spaces\n\n\tand {code} -> (x == y) // 3.14159\r\n",
)
CORPUS = LINES * 20
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DIGITS = pre_tokenizers.Digits(individual_digits=True)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def by(pattern):
    within = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), within])


SPLITS = {
    "gpt-2": GPT2, "olmo": GPT2, "smollm": pre_tokenizers.Sequence([DIGITS, GPT2]), "qwen2": by(QWEN2),
    "llama-bpe": by(QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")),
}  # fmt: skip
COMPOSED = ("olmo", "qwen2")


def byte_level(split="qwen2", size=500):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = SPLITS[split], decoders.ByteLevel()
    tokenizer.normalizer = normalizers.NFC() if split in COMPOSED else None
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=list(SPECIAL), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_level_words(split="qwen2", size=500, **keys):
    """Metadata of a byte-level tokenizer, as ``_set_vocab_gpt2`` of llama.cpp's converter writes it."""
    tokenizer = byte_level(split, size)
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": split, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.eos_token_id": vocabulary["<|im_end|>"], "tokenizer.chat_template": CHAT, **keys,
    }  # fmt: skip


def pieces(extra=()):
    """Metadata of a vocabulary as SentencePiece's, with scores by which pieces are joined."""
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False)
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    learner.train_from_iterator([text.replace("\n", " ").replace("\t", " ") for text in CORPUS], trainer)
    vocabulary = learner.get_vocab()
    learned = sorted(vocabulary, key=lambda piece: (len(piece) == 1, vocabulary[piece]))
    learned = [piece for piece in learned if len(piece) > 1] + [piece for piece in learned if len(piece) == 1]
    rows = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    rows += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    rows += [(piece, -float(rank), 1) for rank, piece in enumerate(learned)] + list(extra)
    tokens, scores, kinds = (list(column) for column in zip(*rows, strict=True))
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores, "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip
