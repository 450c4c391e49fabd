"""Tokenizers of a line's language models, read from packed programs once, then kept.

Guarantees: experts of one program share a tokenizer; the KEPT most recently used stay. For any thread.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from experts.errors import TokenizerUnusable
from experts.llm.files.program import files_of, spec_of
from experts.llm.serving.pooling import pooling_of
from experts.llm.text.tokenizer import CONFIG, TOKENIZER, TextModel

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.deployment.build import Agent
    from experts.llm.files.config import ArchSpec
    from experts.llm.serving.pooling import Pooling
    from experts.packed.weights import PackedExpert

KEPT = 32  # programs; a tokenizer with a large vocabulary takes tens of megabytes


@dataclass(frozen=True, slots=True)
class Speech:
    """Tokenizer and limits of one model. ``program``: its digest. ``labels``: answers, as tokens.

    ``most_tokens``: limit of prompt and output. ``pooling``: of its prompts; raises TokenizerUnusable for none.
    """

    program: str
    model: TextModel
    spec: ArchSpec
    labels: dict[str, tuple[int, ...]]
    most_tokens: int
    pooling: Callable[[], Pooling]


class TextModels:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._contexts: dict[str, int] = {}  # by program sha256, as ``_poolings``; a few bytes each
        self._poolings: dict[str, Pooling] = {}
        self._read: OrderedDict[str, tuple[TextModel, ArchSpec]] = OrderedDict()  # by the program's sha256

    def context_tokens(self, expert: str, agent: Agent) -> int:
        """Context of an expert, without reading its tokenizer. Raises as ``of``."""
        packed = _packed(expert, agent)
        sha256 = packed.program_sha256 or ""
        if sha256 not in self._contexts:
            program = agent.segments.program(packed)
            if TOKENIZER not in files_of(program):
                raise TokenizerUnusable(expert, TOKENIZER, "is not there: add it to the model's directory")
            self._contexts[sha256] = spec_of(program, expert).max_positions
        return _within(self._contexts[sha256], agent, expert)

    def pooling(self, expert: str, agent: Agent) -> Pooling:
        """How an expert makes a vector of a prompt. Raises TokenizerUnusable if it makes none."""
        packed = _packed(expert, agent)
        sha256 = packed.program_sha256 or ""
        if sha256 not in self._poolings:
            self._poolings[sha256] = pooling_of(files_of(agent.segments.program(packed)), expert)
        return self._poolings[sha256]

    def of(self, expert: str, agent: Agent) -> Speech:
        """Speech of an expert. Raises TokenizerUnusable, and WeightsError without packed files."""
        packed = _packed(expert, agent)
        with self._lock:
            found = self._read.get(packed.program_sha256 or "")
            if found is not None:
                self._read.move_to_end(packed.program_sha256 or "")
        model, spec = found or self._added(expert, packed, agent)
        model = model.named(expert)
        labels = agent.config.catalog.experts[expert].labels
        tokens = {label: model.encode(label, adds_special=False) for label in labels}
        most_tokens = _within(model.context_tokens, agent, expert)
        pooling = partial(self.pooling, expert, agent)
        return Speech(packed.program_sha256 or "", model, spec, tokens, most_tokens, pooling)

    def _added(self, expert: str, packed: PackedExpert, agent: Agent) -> tuple[TextModel, ArchSpec]:
        program = agent.segments.program(packed)
        read = TextModel.of(files_of(program), expert), spec_of(program, expert)
        with self._lock:
            self._read[packed.program_sha256 or ""] = read
            while len(self._read) > KEPT:
                self._read.popitem(last=False)
        return read


def _within(context_tokens: int, agent: Agent, expert: str) -> int:
    most = agent.loop.most_tokens(agent.expert(expert))
    return context_tokens if most is None else min(context_tokens, most)


def _packed(expert: str, agent: Agent) -> PackedExpert:
    """Packed file of any copy: all copies of an expert have one program."""
    for copy in agent.copies.values():
        if copy.expert.id == expert and copy.packed.program_sha256 is not None:
            return copy.packed
    reason = agent.setup.broken.get(agent.expert(expert), "it is not packed")
    raise TokenizerUnusable(expert, CONFIG, f"cannot be read: {reason}")
