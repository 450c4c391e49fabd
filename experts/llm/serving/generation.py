"""Requests for texts, and their outcomes: records for API and runtime that need no torch.

Guarantees: a record that is invalid by itself is refused by its constructor, naming the field. Limits of a model
(context, vocabulary) are checked by ``check_against``, before the API accepts a request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

from experts.errors import PromptInvalid, PromptTooLong, SamplingInvalid

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from experts.devices.copies import Download
    from experts.llm.files.config import ArchSpec
    from experts.llm.model import LanguageModel
    from experts.llm.serving.grammar import Grammar

MOST_ALTERNATIVES = 20
COLDEST = 1e-5  # logits divided by less exceed fp32
MOST_WHOLE = 2**63 - 1
NUMBERS = (
    ("temperature", 0, 100), ("top_p", 0, 1), ("min_p", 0, 1), ("repetition_penalty", 0, 100),
    ("presence_penalty", -2, 2), ("frequency_penalty", -2, 2),
)  # fmt: skip
ABOVE = ("top_p", "repetition_penalty")  # exclude their least value
WHOLE_NUMBERS = (("top_k", 0, MOST_WHOLE), ("seed", -MOST_WHOLE, MOST_WHOLE), ("logprobs", 0, MOST_ALTERNATIVES))


class Ending(StrEnum):
    """Reason why a text ended: a stop token or stop string, its largest length, or its deadline."""

    STOP = "stop"
    LENGTH = "length"
    DEADLINE = "deadline"


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling of a token. The defaults draw from the model's own distribution. Raises SamplingInvalid."""

    temperature: float = 1.0  # below ``COLDEST``: the likeliest token, always
    top_p: float = 1.0  # leaves no token out, as do ``top_k`` and ``min_p`` 0
    top_k: int = 0
    min_p: float = 0.0  # as a share of the likeliest token's probability (arXiv 2407.01082)
    repetition_penalty: float = 1.0  # divides logits of tokens read or written (CTRL, arXiv 1909.05858, section 4.1)
    presence_penalty: float = 0.0  # subtracted once for tokens that were written
    frequency_penalty: float = 0.0  # and once each time
    seed: int | None = None  # None: another text each time
    logprobs: int | None = None  # alternatives reported with each token; None: none

    def __post_init__(self) -> None:
        for name, least, most in NUMBERS:
            value = getattr(self, name)
            if not _is_within(value, least, most) or (name in ABOVE and value <= least):
                above = f"above {least} and up to {most}" if name in ABOVE else f"from {least} to {most}"
                raise SamplingInvalid(name, value, f"a number {above}")
        for name, least, whole_most in WHOLE_NUMBERS:
            value = getattr(self, name)
            is_left_out = value is None and name != "top_k"
            if not is_left_out and not (isinstance(value, int) and _is_within(value, least, whole_most)):
                raise SamplingInvalid(name, value, f"a whole number from {least} to {whole_most}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < COLDEST or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


@dataclass(frozen=True, slots=True)
class Token:
    """Token of a text. ``logprob``: by the model's own distribution, before sampling; 0 unless asked for, None for the
    first of a prompt. ``alternatives``: likeliest first. Added by a TextWriter: ``content``, its bytes, perhaps a part
    of a character; ``offset``, the character of the text that it begins at."""

    id: int
    logprob: float | None
    alternatives: tuple[Token, ...] = ()
    content: bytes = b""
    offset: int = 0

    @property
    def text(self) -> str:
        """Its characters, or, of a part of a character, its bytes as OpenAI spells them."""
        try:
            return self.content.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.content)


@dataclass(frozen=True, slots=True)
class CallStyle:
    """Style of tool calls. ``opening``: before a call, or before all of them; ``closing``: after each. ``arguments``:
    their key."""

    opening: str
    closing: str = ""
    arguments: str = "arguments"
    is_list: bool = False  # one opening, and a JSON array
    is_bare: bool = False  # a text that begins with JSON is a call, also without the opening


@dataclass(frozen=True, slots=True)
class Piece:
    """More of an expert's text. ``tokens``: tokens that begin in it, if the caller wants them. ``is_thought``: the
    prompt already opened the reasoning. ``calls``: style of the model's tool calls, if the text may have some.
    ``vector``: of the prompt, instead of a text."""

    expert: str
    text: str
    tokens: tuple[Token, ...] = ()
    is_thought: bool = False
    calls: CallStyle | None = None
    vector: tuple[float, ...] = ()


class Writer(Protocol):
    """Called on the executor's thread: returns soon, does not raise. A writer that raises ends only its request."""

    def write(self, token: Token) -> bool:
        """Take a token. True: the text ends with it, for instance as a stop string is complete."""


class Reading(Protocol):
    """Wants the prompt's hidden states (``experts.llm.serving.readings``). ``read``: positions that count already."""

    read: int

    def take(
        self, prompt: Sequence[int], first: int, hidden: Tensor, following: Tensor, model: LanguageModel,
        results: Download,
    ) -> Callable[[], bool]:  # fmt: skip
        """Add what it wants of positions from ``first`` on to the results. Raises as a model.

        ``hidden``: behind the last layer; ``following``: the tokens after these positions, and more. To be called once
        the results are on the host: counts the positions; False for NaN or infinity.
        """


class Discarding:
    """Writer that drops the tokens."""

    def write(self, token: Token) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class TextRequest:
    """Request for a text of one expert: prompt, length, sampling. Raises PromptInvalid. ``deadline_s``: monotonic;
    tokens written until then are kept."""

    prompt: tuple[int, ...]
    most_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    writer: Writer = field(default_factory=Discarding)
    deadline_s: float | None = None
    stop_tokens: frozenset[int] = frozenset()  # any of them ends the text, and is not written
    choices: Mapping[str, tuple[int, ...]] | None = None  # a router's: the likeliest is the answer, nothing is sampled
    grammar: Grammar | None = None  # bounds what is sampled; its end ends the text
    program: str | None = None  # digest of the program in whose vocabulary the tokens are; None: of any
    reading: Reading | None = None  # of the prompt; then nothing need be written

    def __post_init__(self) -> None:
        if not self.prompt:
            raise PromptInvalid("prompt", "is empty: give at least one token, as the beginning of a text is")
        if self.choices is not None:
            _check_choices(self.choices)
        elif self.most_new_tokens < (self.reading is None):
            raise PromptInvalid("most_new_tokens", f"is {self.most_new_tokens}: give 1 or more")

    @property
    def most_tokens(self) -> int:
        if self.choices is None:
            return len(self.prompt) + self.most_new_tokens
        return len(self.prompt) + max(len(tokens) for tokens in self.choices.values())


def check_against(text: TextRequest, spec: ArchSpec) -> None:
    """Check a request against a model. Raises PromptInvalid naming the field."""
    if text.most_tokens > spec.max_positions:
        raise PromptTooLong("prompt", _too_long(text, spec.max_positions))
    _check_vocabulary("prompt", text.prompt, spec.vocab_size)
    for label, tokens in (text.choices or {}).items():
        _check_vocabulary(f"choices.{label}", tokens, spec.vocab_size)


def _too_long(text: TextRequest, context: int) -> str:
    read, new = len(text.prompt), text.most_tokens - len(text.prompt)
    if read >= context:
        return f"has {read} tokens, over the model's context of {context}: give fewer than that"
    return (
        f"has {read} tokens, with {new} new ones over the model's context of {context}: "
        f"shorten it, or ask for at most {context - read}"
    )


def _check_vocabulary(name: str, tokens: tuple[int, ...], vocab_size: int) -> None:
    if min(tokens) >= 0 and max(tokens) < vocab_size:
        return
    place, token = next((place, token) for place, token in enumerate(tokens) if not 0 <= token < vocab_size)
    raise PromptInvalid(name, f"has token {token} at {place}, the model knows 0 to {vocab_size - 1}")


def _check_choices(choices: Mapping[str, tuple[int, ...]]) -> None:
    if not choices:
        raise PromptInvalid("choices", "are none: give a label and its tokens, or several")
    for label, tokens in choices.items():
        if not tokens:
            raise PromptInvalid(f"choices.{label}", "has no tokens: give at least one")
    ordered = sorted((tokens, label) for label, tokens in choices.items())
    for (tokens, label), (longer, other) in pairwise(ordered):
        if longer[: len(tokens)] == tokens:
            raise PromptInvalid(f"choices.{label}", f"begins choices.{other} and would always be likelier: change one")


def _is_within(value: object, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


GREEDY = Sampling(temperature=0.0)
