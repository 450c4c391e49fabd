"""TextModel: text to a model's tokens and back, and a chat to text, by the files of a Hugging Face directory.

Guarantees: needs only the bytes of the directory's small files, no disk and no network. A fault names its file
(TokenizerUnusable); a broken chat template affects chats only. A template may have any origin, so it runs in a bounded
sandbox (``experts.llm.text.bounded_sandbox``); one that refuses the messages raises PromptInvalid. Immutable and
thread-safe.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import TemplateError, TemplateRuntimeError, nodes
from jinja2.ext import Extension, loopcontrols

from experts.errors import ModelUnsupported, PromptInvalid, PromptTooLong, SamplingInvalid, TokenizerUnusable
from experts.llm.files.config import context_tokens
from experts.llm.serving.generation import Sampling
from experts.llm.serving.grammar import GrammarVocabulary
from experts.llm.text.bounded_sandbox import RENDER_S, BoundedSandbox
from experts.llm.text.constraints import constrained
from experts.llm.text.tool_calls import ToolUse, calls_grammar, style_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jinja2.parser import Parser
    from tokenizers import AddedToken, Tokenizer

    from experts.llm.serving.generation import CallStyle
    from experts.llm.serving.grammar import Grammar
    from experts.llm.text.constraints import Constraint

MISTAKES = (
    TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError,
)  # fmt: skip
CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG, CHAT_TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # read from generation_config.json
DEFAULT_SAMPLING = Sampling()
SPECIAL_TOKENS_MAP, ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"  # of older directories
TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")  # which a chat template may name
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # SentencePiece-like tokenizers' spelling of a single byte
WORD_START = "\u2581"  # their spelling of a space
THOUGHT = b"<think>"  # start of a model's reasoning: some templates end inside it
THOUGHT_TOKENS = 16  # last tokens of a prompt, searched for it


class ChatTemplate:
    """Chat template of one model. Thread-safe."""

    def __init__(
        self, expert: str, file: str, source: str, special_tokens: Mapping[str, str], render_s: float = RENDER_S
    ) -> None:
        self._expert = expert
        self._file = file
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._sandbox = _sandbox(render_s)
        self._compiled = functools.cache(self._sandbox.compiled)

    def named(self, expert: str) -> ChatTemplate:
        other = copy.copy(self)
        other._expert = expert
        return other

    @property
    def call_style(self) -> CallStyle | None:
        return style_of(self._source)

    def render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:  # fmt: skip
        """``variables``: further ones. Raises PromptInvalid (refused by the template), TokenizerUnusable (it fails)."""
        reserved = {**self._special_tokens, "messages": list(messages), "add_generation_prompt": True}
        reserved |= {"tools": list(tools)} if tools else {}
        if taken := sorted((variables or {}).keys() & reserved.keys()):
            raise PromptInvalid("chat_template_kwargs", f"{taken[0]}: is set by the agent - leave it out")
        given = {"tools": None, "documents": None, **(variables or {}), **reserved}  # templates test these for None
        try:
            return self._sandbox.render(self._compiled(self._source), given)
        except _TemplateRefused as refused:
            raise PromptInvalid("messages", f"the chat template of {self._expert} refuses them: {refused}") from None
        except MISTAKES as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise TokenizerUnusable(
                self._expert, self._file, f"the chat template fails for these messages: {reason}"
            ) from error


class _TemplateRefused(TemplateRuntimeError):
    """The template does not accept these messages: it called raise_exception."""


class _GenerationTag(Extension):
    """`{% generation %}`: marks the part that a model is trained to write; the rendered text does not change."""

    tags = {"generation"}  # noqa: RUF012 - as the library declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _sandbox(render_s: float) -> BoundedSandbox:
    """Environment of transformers' chat templates: trimming, globals and tags."""
    sandbox = BoundedSandbox(render_s, trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag])
    sandbox.give(filters={"tojson": _json}, calls={"raise_exception": _refuse, "strftime_now": _time_now})
    return sandbox


def _json(value: Any, indent: int | None = None, **options: Any) -> str:  # noqa: ANN401 - JSON
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)  # Jinja's own escapes HTML


def _refuse(message: str) -> NoReturn:
    raise _TemplateRefused(str(message))


def _time_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


@dataclass(frozen=True)
class TextModel:
    """Tokenizer, chat template and defaults of one model. ``stop_tokens``: tokens that end its answer."""

    expert: str
    context_tokens: int
    stop_tokens: frozenset[int]
    sampling: Mapping[str, Any]  # by its generation_config.json
    chat: ChatTemplate | None
    _tokenizer: Tokenizer
    _is_byte_level: bool
    _grammars: GrammarVocabulary

    @classmethod
    def of(cls, files: Mapping[str, bytes], expert: str) -> TextModel:
        """Build from a directory's files by name (PROGRAM_FILES, two of them required). Raises TokenizerUnusable."""
        config = _object(files, CONFIG, expert, is_needed=True)
        settings = {**_object(files, SPECIAL_TOKENS_MAP, expert), **_object(files, TOKENIZER_CONFIG, expert)}
        description = _object(files, TOKENIZER, expert, is_needed=True)
        tokenizer = _tokenizer(files[TOKENIZER], expert)
        _add_tokens(tokenizer, _added_tokens(files, settings, expert), expert)
        generation = _object(files, GENERATION_CONFIG, expert)
        try:
            context = context_tokens(config, expert)
        except ModelUnsupported as error:
            raise TokenizerUnusable(expert, CONFIG, error.message.removeprefix(f"{CONFIG}: ")) from error
        stop_tokens, sampling = _stop_tokens(config, generation, settings, tokenizer), _sampling(generation, expert)
        chat = _chat(files, settings, expert)
        is_byte_level = '"ByteLevel"' in json.dumps(description.get("decoder"))
        spell, encode = partial(_spelled_tokens, tokenizer, is_byte_level), partial(_ids, tokenizer)
        grammars = GrammarVocabulary(spell, encode, _special_tokens(tokenizer), stop_tokens)
        return cls(expert, context, stop_tokens, sampling, chat, tokenizer, is_byte_level, grammars)

    def named(self, expert: str) -> TextModel:
        return replace(self, expert=expert, chat=self.chat and self.chat.named(expert))

    def encode(self, text: str, *, adds_special: bool = True) -> tuple[int, ...]:
        """Tokens of a text. Raises PromptInvalid for one that the tokenizer refuses.

        As a batch: only then does the library let other threads run meanwhile.
        """
        try:
            (encoded,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=adds_special)
        except Exception as error:  # the library raises nothing narrower
            raise PromptInvalid("prompt", f"is refused by {TOKENIZER} of {self.expert}: {error}") from error
        return tuple(encoded.ids)

    def decode(self, tokens: Sequence[int], spelled: frozenset[int] = frozenset()) -> str:
        """Text of tokens. Special tokens have none, but for those that are ``spelled`` out."""
        if spelled.isdisjoint(tokens):
            return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))
        runs = groupby(tokens, spelled.__contains__)
        return "".join("".join(map(self._piece, run)) if is_mark else self.decode(list(run)) for is_mark, run in runs)

    def prompt_of(self, text: str) -> tuple[int, ...]:
        """Tokens of a text to continue. Raises PromptInvalid for none, or for more than the context has."""
        return self.checked(self.encode(text), "prompt")

    def chat_prompt_of(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[int, ...]:  # fmt: skip
        """A chat's tokens; see ``render``. Raises PromptInvalid; TokenizerUnusable without a template."""
        if self.chat is None:
            raise TokenizerUnusable(
                self.expert, TOKENIZER_CONFIG, "the model has no chat template: give it a prompt to continue instead"
            )
        return self.checked(self.encode(self.chat.render(messages, variables, tools), adds_special=False), "messages")

    def checked(self, prompt: tuple[int, ...], field: str) -> tuple[int, ...]:
        """Return a checked prompt. Raises PromptInvalid, naming this field, for one that the model cannot continue."""
        if not prompt:
            raise PromptInvalid(field, "is empty: there is nothing to continue")
        if len(prompt) >= self.context_tokens:
            raise PromptTooLong(
                field,
                f"has {len(prompt)} tokens, and the context of {self.expert} is {self.context_tokens}, "
                "of which one at least is for the answer: shorten it",
            )
        if max(prompt) >= self.tokens or min(prompt) < 0:
            raise PromptInvalid(field, f"has a token that {self.expert} does not know: they are 0 to {self.tokens - 1}")
        return prompt

    @cached_property
    def tokens(self) -> int:
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def with_defaults(self, requested: Sampling, given: frozenset[str]) -> Sampling:
        """Fill in the model's values, except for those that are ``given`` by the caller or not the default."""
        unset = {
            name for name in self.sampling.keys() - given if getattr(requested, name) == getattr(DEFAULT_SAMPLING, name)
        }
        return replace(requested, **{name: self.sampling[name] for name in unset})

    def token_bytes(self, token: int) -> bytes:
        """Bytes of a token, perhaps a part of a character. Special tokens are spelled out."""
        return _bytes_of(self._piece(token), self._is_byte_level)

    def opens_thought(self, prompt: Sequence[int]) -> bool:
        """True if a prompt ends inside a reasoning."""
        end = b"".join(self.token_bytes(token) for token in prompt[-THOUGHT_TOKENS:])
        return end.rstrip().endswith(THOUGHT)

    def call_style(self) -> CallStyle:
        """Style of the model's tool calls. Raises PromptInvalid for a template without a known one."""
        style = None if self.chat is None else self.chat.call_style
        if style is None:
            raise PromptInvalid("tools", f"{self.expert} has no chat template with tools in a known style")
        return style

    def given_specials(self) -> frozenset[int]:
        """Special tokens that a prompt has only if its caller wrote them."""
        return frozenset(_special_tokens(self._tokenizer)) - {*self.encode("")}

    def marks_of(self, style: CallStyle) -> frozenset[int]:
        """Special tokens that mark calls."""
        marks = {self._tokenizer.token_to_id(mark) for mark in (style.opening, style.closing)}
        return frozenset(mark for mark in _special_tokens(self._tokenizer) if mark in marks)

    def grammar(self, constraint: Constraint | None, use: ToolUse | None, prompt: Sequence[int]) -> Grammar | None:
        """Grammar of the text after a prompt. Raises GrammarInvalid, PromptInvalid."""
        is_thought = self.opens_thought(prompt)
        if use is not None and use.is_bound:
            style = self.call_style()
            mark = partial(self._mark, self.marks_of(style))
            return self._grammars.compiled(*calls_grammar(use, style, mark, constraint, is_thought=is_thought))
        if constraint is None:
            return None
        return self._grammars.compiled(*constrained(constraint, is_thought=is_thought))

    def _mark(self, special: frozenset[int], mark: str) -> str:
        token = self._tokenizer.token_to_id(mark)
        return f"<[{token}]>" if token in special else json.dumps(mark)

    def _piece(self, token: int) -> str:
        return self._tokenizer.id_to_token(token) or ""


def _object(files: Mapping[str, bytes], name: str, expert: str, *, is_needed: bool = False) -> dict[str, Any]:
    if name not in files:
        if is_needed:
            raise TokenizerUnusable(expert, name, "is not there: add it to the model's directory, and pack it again")
        return {}
    try:
        values = json.loads(files[name])
    except (ValueError, RecursionError) as error:
        raise TokenizerUnusable(expert, name, f"cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise TokenizerUnusable(expert, name, "holds no JSON object")
    return values


def _tokenizer(content: bytes, expert: str) -> Tokenizer:
    from tokenizers import Tokenizer  # lazily: only a line with texts loads it

    try:
        tokenizer = Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerUnusable(expert, TOKENIZER, f"describes no tokenizer of a known kind: {error}") from error
    tokenizer.no_truncation()  # a tokenizer file may request it, but long prompts are refused, not cut
    tokenizer.no_padding()
    return tokenizer


def _added_tokens(files: Mapping[str, bytes], settings: Mapping[str, Any], expert: str) -> dict[int, AddedToken]:
    """Tokens by number that a directory has beside its tokenizer.json, as older ones have. Raises TokenizerUnusable."""
    from tokenizers import AddedToken

    found: dict[int, AddedToken] = {}
    try:
        for number, token in (settings.get("added_tokens_decoder") or {}).items():
            flags = {name: token.get(name, False) for name in TOKEN_FLAGS}
            found[int(number)] = AddedToken(token["content"], **flags)
        for content, number in _object(files, ADDED_TOKENS, expert).items():
            found.setdefault(int(number), AddedToken(content, normalized=False))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TokenizerUnusable(expert, TOKENIZER_CONFIG, f"names added tokens that cannot be read: {error}") from error
    return found


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def _special_tokens(tokenizer: Tokenizer) -> set[int]:
    return {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}


def _spelled_tokens(tokenizer: Tokenizer, is_byte_level: bool) -> list[bytes]:
    pieces = {token: piece for piece, token in tokenizer.get_vocab(with_added_tokens=True).items()}
    return [_bytes_of(pieces.get(token, ""), is_byte_level) for token in range(max(pieces, default=-1) + 1)]


def _bytes_of(piece: str, is_byte_level: bool) -> bytes:
    if is_byte_level and all(character in BYTE_OF for character in piece):
        return bytes(BYTE_OF[character] for character in piece)
    if found := BYTE_TOKEN.fullmatch(piece):
        return bytes([int(found[1], 16)])
    return piece.replace(WORD_START, " ").encode("utf-8")


def _add_tokens(tokenizer: Tokenizer, tokens: Mapping[int, AddedToken], expert: str) -> None:
    """Add tokens that the tokenizer lacks. Raises TokenizerUnusable where one would get another number."""
    for number, token in sorted(tokens.items()):
        if tokenizer.token_to_id(token.content) is not None:
            continue
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
        own = tokenizer.token_to_id(token.content)
        if own != number:
            reason = f"lacks {token.content!r}, which would become token {own} and not {number}: correct the files"
            raise TokenizerUnusable(expert, TOKENIZER, reason)


def _stop_tokens(
    config: Mapping[str, Any], generation: Mapping[str, Any], settings: Mapping[str, Any], tokenizer: Tokenizer
) -> frozenset[int]:
    """Stop tokens of generation_config.json, or else config.json, and the tokenizer's own."""
    named = generation.get("eos_token_id", config.get("eos_token_id"))
    several = named if isinstance(named, list) else [named]
    spelled = _spelled(settings.get("eos_token"))
    own = None if spelled is None else tokenizer.token_to_id(spelled)
    return frozenset(one for one in (*several, own) if isinstance(one, int) and not isinstance(one, bool))


def _sampling(generation: Mapping[str, Any], expert: str) -> dict[str, Any]:
    """Sampling that the model recommends. ``do_sample`` is ignored: few files keep it up to date."""
    found = {name: generation[name] for name in SAMPLING_KEYS if generation.get(name) is not None}
    try:
        Sampling(**found)
    except SamplingInvalid as error:
        raise TokenizerUnusable(expert, GENERATION_CONFIG, str(error)) from error
    return found


def _spelled(token: object) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _chat(files: Mapping[str, bytes], settings: Mapping[str, Any], expert: str) -> ChatTemplate | None:
    source, file = _template_source(settings), TOKENIZER_CONFIG
    if CHAT_TEMPLATE in files:
        source, file = files[CHAT_TEMPLATE].decode("utf-8", "replace"), CHAT_TEMPLATE
    if source is None:
        return None
    spelled = {name: _spelled(settings.get(name)) or "" for name in SPECIAL_TOKENS}
    return ChatTemplate(expert, file, source, spelled)


def _template_source(settings: Mapping[str, Any]) -> str | None:
    """The only template, or the one named default."""
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _bytes_of_characters() -> dict[str, int]:
    """The visible character that spells each byte in byte-level BPE (Radford et al. 2019, `bytes_to_unicode`)."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


BYTE_OF = _bytes_of_characters()
