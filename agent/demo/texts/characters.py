"""The tokens of the demo's models: characters, and a few marks around what is asked and answered.

A text is ``<user>question<answer>answer<end>``. Written beside a model are the files that everybody reads: tokenizer,
chat template, and what ends an answer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from agent.demo.texts.questions import DemoQuestion

USER, ANSWER, END, UNKNOWN = "<user>", "<answer>", "<end>", "<unknown>"
MARKS = (USER, ANSWER, END, UNKNOWN)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'user' %}" + USER + "{{ message.content }}" + ANSWER + "{% endif %}"
    "{% if message.role == 'assistant' %}{{ message.content }}" + END + "{% endif %}"
    "{% endfor %}"
)


@dataclass(frozen=True, slots=True)
class Characters:
    """Alphabet; a token is a place in ``tokens``."""

    tokens: tuple[str, ...]

    @classmethod
    def of(cls, questions: Iterable[DemoQuestion]) -> Characters:
        return cls((*MARKS, *sorted({sign for one in questions for sign in one.text + one.answer})))

    def encode(self, question: DemoQuestion) -> list[int]:
        numbers = {token: number for number, token in enumerate(self.tokens)}
        return [numbers[token] for token in (USER, *question.text, ANSWER, *question.answer, END)]

    @property
    def letters(self) -> list[int]:
        return [number for number, token in enumerate(self.tokens) if len(token) == 1 and not token.isdigit()]

    @property
    def answer_mark(self) -> int:
        return MARKS.index(ANSWER)

    @property
    def end_mark(self) -> int:
        return MARKS.index(END)

    def tokenizer(self) -> dict[str, Any]:
        """Content of tokenizer.json: each character is a word, joined with nothing between."""
        marks = [
            {
                "id": self.tokens.index(mark), "content": mark, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": True,
            }
            for mark in MARKS
        ]  # fmt: skip
        vocabulary = {token: number for number, token in enumerate(self.tokens)}
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": marks,
            "normalizer": None,
            "pre_tokenizer": {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False},
            "post_processor": None,
            "decoder": {"type": "Fuse"},
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": UNKNOWN},
        }

    def write(self, directory: Path) -> None:
        _write_json(directory / "tokenizer.json", self.tokenizer())
        settings = {"eos_token": END, "unk_token": UNKNOWN, "tokenizer_class": "PreTrainedTokenizerFast"}
        _write_json(directory / "tokenizer_config.json", settings)
        _write_json(directory / "generation_config.json", {"eos_token_id": self.end_mark})
        (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, "utf-8")


def _write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", "utf-8")


def padded(texts: Sequence[Sequence[int]], filler: int) -> list[list[int]]:
    longest = max(map(len, texts))
    return [[*text, *[filler] * (longest - len(text))] for text in texts]
