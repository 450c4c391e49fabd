"""Add a language model's GGUF file to a line: `coserve experts add LINE model.gguf`.

Guarantees: before any file is written, its metadata, tokenizer and tensors' headers are read as packing reads them, so
what `serve` would refuse is refused. Its weights are in place before the line file names them. The model is not run.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from agent.commands.adding.adding import expert_name, put_in_place
from agent.commands.adding.facts import Wishes
from agent.config import line_of
from agent.line_file.editing import add_expert, content_of, created, edit_file
from experts.backends import LLM, backend_for, own_precision
from experts.document import parse_document
from experts.errors import ConfigError
from experts.filesystem import file_sha256
from experts.llm.files.config import read_spec
from experts.llm.files.program import read_program
from experts.llm.gguf.header import SUFFIX, read_header
from experts.llm.text.tokenizer import TextModel
from experts.packed.sources import size_bytes_of
from experts.sizes import size_text

if TYPE_CHECKING:
    from pathlib import Path

    from experts.expert import Expert

TAKEN = ("id", "prints")  # of Wishes
OPTIONS = {"components": "component", "passing": "pass", "names": "labels"}  # that have other names there
WITHOUT_TEMPLATE = "it has no chat template: callers give it prompts to continue"


@dataclass(frozen=True, slots=True)
class AddedLanguageModel:
    """A language model that was added, or would be. ``weights``: the file to serve; None if nothing was written."""

    expert: str
    entry: dict[str, Any]
    lines: str
    facts: dict[str, str]
    remarks: tuple[str, ...]
    weights: Path | None
    sha256: str

    def as_json(self) -> dict[str, Any]:
        names = ("expert", "entry", "lines", "facts", "sha256")
        weights = None if self.weights is None else str(self.weights)
        return {"kind": LLM, **{key: getattr(self, key) for key in names}, "said": self.remarks, "weights": weights}

    def page_lines(self, line: Path, file: Path) -> list[str]:
        lines = [f"{file}: a language model", *(f"  {key:<13}{value}" for key, value in self.facts.items())]
        lines += [f"  {remark}" for remark in self.remarks]
        if self.weights is None:
            return [*lines, f"nothing was written; {line} would get experts.{self.expert}:"]
        ask = f"`coserve serve {line}`, and then `coserve generate {line} {self.expert} PROMPT`"
        return [*lines, f"{self.weights}: sha256 {self.sha256}", f"{line}: experts.{self.expert} - ask it with {ask}"]


def add_language_model(line: Path, file: Path, wishes: Wishes) -> AddedLanguageModel:
    """Add a GGUF file to a line. After an error, no new file is left. Raises ConfigError, WeightsError, LoadError."""
    _refuse_others(wishes)
    content = content_of(line)
    folder, expert = line.absolute().parent, wishes.id or f"{LLM}/{expert_name(file)}"
    is_in_place = file.resolve().is_relative_to(folder.resolve())
    weights = file.resolve() if is_in_place else folder / "weights" / f"{expert}{SUFFIX}"
    served = os.path.relpath(weights, folder.resolve() if is_in_place else folder)
    entry = {"architecture": LLM, "weights": served}

    def edited(text: str) -> str:
        return add_expert(text, expert, entry, f"Added from {file.name}.", file=line)

    config = line_of(parse_document(line.absolute(), edited(content.decode("utf-8")).encode()))
    on_trial = replace(config.catalog.experts[expert], weights=file)
    backend_for(LLM).check(on_trial)
    facts, has_template = _facts(on_trial)
    remarks = () if has_template else (WITHOUT_TEMPLATE,)
    if not wishes.prints:
        with put_in_place(file, weights, is_in_place=is_in_place), created(line, content):
            edit_file(line, edited)
    return AddedLanguageModel(
        expert, entry, edited(""), facts, remarks, None if wishes.prints else weights, file_sha256(file)
    )


def _refuse_others(wishes: Wishes) -> None:
    """Raises ConfigError for an option that is for images."""
    usual = Wishes()
    for option in (each.name for each in fields(Wishes)):
        if option not in TAKEN and getattr(wishes, option) != getattr(usual, option):
            raise ConfigError(
                f"--{OPTIONS.get(option, option)} is for images, and a GGUF file takes texts: leave it out"
            )


def _facts(expert: Expert) -> tuple[dict[str, str], bool]:
    """Facts by name, and whether there is a chat template."""
    header, spec = read_header(expert.weights, expert.id), read_spec(expert.weights, expert.id)
    words = TextModel.of(read_program(expert.weights, expert.id), expert.id)
    formats = Counter(tensor.format.name for tensor in header.tensors.values())
    facts = {
        "name": str(header.metadata.get("general.name", expert.weights.name)),
        "architecture": f"{spec.family}, {len(spec.layers)} layers, {spec.vocab_size:,} tokens",
        "context": f"{spec.max_positions:,} tokens",
        "numbers": ", ".join(f"{name} in {count} tensors" for name, count in formats.most_common()),
        "size": size_text(size_bytes_of(expert)),
        "precision": f"{own_precision(expert, 'cpu')} on this CPU; `precision: int8` or `int4` takes less memory",
    }
    return facts, words.chat is not None
