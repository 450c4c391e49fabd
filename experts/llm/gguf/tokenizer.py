"""The tokenizer's and generation's JSON files that a GGUF file's metadata stands for.

Guarantees: texts become the tokens of the model's own tokenizer. ``tokenizer.ggml.pre`` decides how text is split; an
unknown name, or a key with another effect, is refused by name (ModelUnsupported).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from experts.errors import ModelUnsupported, WeightsCorrupt

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from experts.llm.gguf.header import Header

TOKENS, KIND, SPLIT = "tokenizer.ggml.tokens", "tokenizer.ggml.model", "tokenizer.ggml.pre"
BYTE_LEVEL, SENTENCEPIECE, WITHOUT_TOKENIZER = "gpt2", "llama", ("none", "no_vocab")
TEMPLATE = "tokenizer.chat_template"  # and others by name, below it
DESCRIPTION = "tokenizer.huggingface"  # says the same in another form
SHOWN = 40
WORD_START = "\u2581"
IDS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
USUAL_IDS = {SENTENCEPIECE: {"bos_token": 1, "eos_token": 2, "unk_token": 0}}
ENDS = (  # special tokens that end an answer, by name, as in llama.cpp
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<end_of_turn>", "<EOT>",
)  # fmt: skip
SAMPLING = {
    "temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip
WITHOUT_EFFECT: Mapping[str, tuple[object, ...]] = {  # with these values; an empty row: with any
    **dict.fromkeys(("tokens", "scores", "token_type", "merges", "model", "pre", "token_type_count"), ()),
    **dict.fromkeys(("add_bos_token", "add_eos_token", "add_space_prefix"), ()),
    **dict.fromkeys(("eot_token_id", "eom_token_id", "eos_token_ids"), ()),
    **dict.fromkeys((f"{name}_token_id" for name in IDS.values()), ()),
    **dict.fromkeys((f"{name}_token_id" for name in ("seperator", "cls", "mask", "prefix", "suffix", "middle")), ()),
    **dict.fromkeys((f"fim_{name}_token_id" for name in ("pre", "suf", "mid", "pad", "rep", "sep")), ()),
    "add_sep_token": (False,), "remove_extra_whitespaces": (False,), "precompiled_charsmap": ((),),
    "suppress_tokens": ((),), "normalizer.lowercase": (False,), "normalizer.strip_accents": (False,),
}  # fmt: skip
PIECE_MAXIMUM_CHARACTERS = 256  # all divisions of a piece are tried


class TokenKind(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Split:
    """``pattern``: of the pieces that merges stay within; None: GPT-2's. ``is_composed``: texts in Unicode's NFC."""

    pattern: str | None = None
    parts_digits: bool = False
    is_composed: bool = False
    takes_whole_words: bool = False  # that are tokens, whatever the merges
    begins_with_bos: bool = False


CONTRACTED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = Split(CONTRACTED % "{1,3}", takes_whole_words=True, begins_with_bos=True)
QWEN2 = Split(CONTRACTED % "", is_composed=True)
SPLITS = {
    "gpt-2": Split(), "olmo": Split(is_composed=True), "smollm": Split(parts_digits=True),
    "starcoder": Split(parts_digits=True), "llama-bpe": LLAMA3, "llama-v3": LLAMA3, "llama3": LLAMA3, "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2, "tekken": Split(CASED, takes_whole_words=True, begins_with_bos=True),
}  # fmt: skip


def tokenizer_files(header: Header, expert: str) -> dict[str, dict[str, Any]]:
    """Files by name, as JSON; none for a model without a tokenizer. Raises ModelUnsupported, WeightsCorrupt."""
    metadata = header.metadata
    kind = metadata.get(KIND, WITHOUT_TOKENIZER[0])
    if kind in WITHOUT_TOKENIZER:
        return {}
    if kind not in (BYTE_LEVEL, SENTENCEPIECE):
        raise _refused(header, expert, KIND, f"{kind!r} is not served: {BYTE_LEVEL} and {SENTENCEPIECE} are")
    _refuse_effects(header, expert)
    words = _Words.of(header, expert)
    description = _byte_level(header, expert, words) if kind == BYTE_LEVEL else _sentencepiece(header, expert, words)
    template = metadata.get(TEMPLATE)
    generation = {
        "eos_token_id": words.ends,
        **{name: metadata[key] for end, name in SAMPLING.items() if (key := f"general.sampling.{end}") in metadata},
    }
    return {
        "tokenizer.json": description,
        "tokenizer_config.json": {**words.special, **({} if template is None else {"chat_template": template})},
        "generation_config.json": generation,
    }


def _refuse_effects(header: Header, expert: str) -> None:
    for key, value in header.metadata.items():
        if key.startswith("tokenizer.") and not key.startswith((TEMPLATE, DESCRIPTION)):
            served = WITHOUT_EFFECT.get(key.removeprefix("tokenizer.ggml."))
            if served is None or (served and value not in served):
                raise _refused(header, expert, key, f"is {str(value)[:SHOWN]}: no such tokenizer is served")


@dataclass(frozen=True, slots=True)
class _Words:
    """Vocabulary of a file. ``special``: text of its special tokens by role. ``ends``: tokens that end an answer."""

    ids: Mapping[str, int]
    kinds: Sequence[int]
    special: dict[str, str]
    ends: Sequence[int]

    @classmethod
    def of(cls, header: Header, expert: str) -> _Words:
        metadata = header.metadata
        tokens, kinds = metadata.get(TOKENS, ()), metadata.get("tokenizer.ggml.token_type")
        if not isinstance(kinds, tuple) or len(kinds) != len(tokens) or not tokens:
            raise _corrupt(header, expert, "token_type", f"does not give the type of each of {len(tokens)} tokens")
        ids = {token: number for number, token in enumerate(tokens)}
        if len(ids) != len(tokens):
            twice = next(token for number, token in enumerate(tokens) if ids[token] != number)
            raise _corrupt(header, expert, "tokens", f"has {twice!r} twice")
        usual = USUAL_IDS.get(metadata[KIND], {})
        roles = {role: _id(header, expert, f"{key}_token_id", usual.get(role)) for role, key in IDS.items()}
        ends = [roles["eos_token"], *(_id(header, expert, f"{key}_token_id") for key in ("eot", "eom"))]
        ends += [number for number in metadata.get("tokenizer.ggml.eos_token_ids", ()) if 0 <= number < len(tokens)]
        ends += [ids[token] for token in ENDS if token in ids and kinds[ids[token]] == TokenKind.CONTROL]
        special = {role: tokens[number] for role, number in roles.items() if number is not None}
        return cls(ids, kinds, special, sorted({number for number in ends if number is not None}))

    def description(self, *, adds_bos: bool, adds_eos: bool, **parts: Any) -> dict[str, Any]:  # noqa: ANN401  JSON
        """tokenizer.json with these parts."""
        sequence = {"Sequence": {"id": "A", "type_id": 0}}
        bos, eos = (
            [self.special[role]] if adds and role in self.special else []
            for role, adds in (("bos_token", adds_bos), ("eos_token", adds_eos))
        )
        before, after = ([{"SpecialToken": {"id": name, "type_id": 0}} for name in names] for names in (bos, eos))
        around = {
            "type": "TemplateProcessing",
            "single": [*before, sequence, *after],
            "pair": [sequence, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {name: {"id": name, "ids": [self.ids[name]], "tokens": [name]} for name in bos + eos},
        }
        head = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": list(self._added())}
        return {**head, "post_processor": around, **parts}

    def _added(self) -> Iterator[dict[str, Any]]:
        """Tokens that a text is cut at, before it is split."""
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        whole = (TokenKind.CONTROL, TokenKind.USER_DEFINED, TokenKind.UNKNOWN)
        for (token, number), kind in zip(self.ids.items(), self.kinds, strict=True):
            if kind in whole and token:
                yield {"id": number, "content": token, **flags, "special": kind != TokenKind.USER_DEFINED}


def _byte_level(header: Header, expert: str, words: _Words) -> dict[str, Any]:
    name = header.metadata.get(SPLIT)
    if name not in SPLITS:
        advice = "convert the model anew" if name is None else f"{', '.join(SPLITS)} are"
        raise _refused(header, expert, SPLIT, f"{name!r} is not served: {advice}")
    split = SPLITS[name]
    merges = header.metadata.get("tokenizer.ggml.merges", ())
    pairs = [merge.split(" ") for merge in merges if isinstance(merge, str)]
    known = all(len(pair) == 2 and pair[0] in words.ids and pair[1] in words.ids for pair in pairs)
    if len(pairs) != len(merges) or not known or not all(left + right in words.ids for left, right in pairs):
        raise _corrupt(header, expert, "merges", "joins what are no two tokens to one")
    by_bytes = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": split.pattern is None,
    }
    steps: list[dict[str, Any]] = [by_bytes]
    if split.pattern is not None:
        pattern = {"Regex": split.pattern}
        steps.insert(0, {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
    if split.parts_digits:
        steps.insert(0, {"type": "Digits", "individual_digits": True})
    return words.description(
        adds_bos=header.metadata.get("tokenizer.ggml.add_bos_token", split.begins_with_bos),
        adds_eos=header.metadata.get("tokenizer.ggml.add_eos_token", False),
        normalizer={"type": "NFC"} if split.is_composed else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": steps},
        decoder={**by_bytes, "use_regex": True},
        model=_bpe(words, pairs, ignore_merges=split.takes_whole_words),
    )


def _sentencepiece(header: Header, expert: str, words: _Words) -> dict[str, Any]:
    """SentencePiece's BPE joins the neighbours of the highest score; here the ranks of merges say so."""
    begins = header.metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces: list[dict[str, Any]] = [{"type": "Prepend", "prepend": WORD_START}] if begins else []
    spaces.append({"type": "Replace", "pattern": {"String": " "}, "content": WORD_START})
    back: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": WORD_START}, "content": " "}, {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]  # fmt: skip
    back += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if begins else []
    unknown = {"unk_token": words.special["unk_token"], "fuse_unk": True, "byte_fallback": True}
    return words.description(
        adds_bos=header.metadata.get("tokenizer.ggml.add_bos_token", True),
        adds_eos=header.metadata.get("tokenizer.ggml.add_eos_token", False),
        normalizer={"type": "Sequence", "normalizers": spaces},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": back},
        model=_bpe(words, _merges(header, expert, words), **unknown),
    )


def _merges(header: Header, expert: str, words: _Words) -> list[list[str]]:
    """Pairs of pieces that make a piece, by its score, highest first."""
    scores = header.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, tuple) or len(scores) != len(words.ids):
        raise _corrupt(header, expert, "scores", f"does not give the score of each of {len(words.ids)} tokens")
    joined = (TokenKind.NORMAL, TokenKind.USER_DEFINED)
    pieces = {piece for piece, number in words.ids.items() if words.kinds[number] in joined}
    if any(len(piece) > PIECE_MAXIMUM_CHARACTERS for piece in pieces):
        raise _corrupt(header, expert, "tokens", f"has a piece of over {PIECE_MAXIMUM_CHARACTERS} characters")
    found = [
        (scores[words.ids[piece]], [piece[:cut], piece[cut:]])
        for piece in sorted(pieces, key=words.ids.__getitem__)
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    if len(found) > 1 and len({score for score, _ in found}) == 1:
        raise _corrupt(header, expert, "scores", "are all the same, so nothing says which pieces are joined first")
    return [pair for _, pair in sorted(found, key=lambda one: -one[0])]


def _bpe(words: _Words, merges: list[list[str]], **options: Any) -> dict[str, Any]:  # noqa: ANN401  JSON
    usual = {
        "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
    }  # fmt: skip
    return {"type": "BPE", **usual, **options, "vocab": dict(words.ids), "merges": merges}


def _id(header: Header, expert: str, name: str, usual: int | None = None) -> int | None:
    number = header.metadata.get(f"tokenizer.ggml.{name}", usual)
    if number is not None and not (isinstance(number, int) and 0 <= number < len(header.metadata[TOKENS])):
        raise _corrupt(header, expert, name, f"is {number!r}, of {len(header.metadata[TOKENS])} tokens")
    return number


def _corrupt(header: Header, expert: str, name: str, message: str) -> WeightsCorrupt:
    return WeightsCorrupt(expert, f"{header.path}: tokenizer.ggml.{name} {message}")


def _refused(header: Header, expert: str, key: str, message: str) -> ModelUnsupported:
    return ModelUnsupported(expert, key, message, str(header.path))
