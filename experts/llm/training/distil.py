"""Mixture-of-Students: a shallower student of a model, written as a directory that is served like its teacher.

Source: DeepSpeed-MoE (arXiv 2201.05596), section 4.2. Computes in fp32 and writes the teacher's dtype. Guarantees: the
student's directory appears whole or not at all; the same files, options and number of threads give the same weights on
one machine.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from experts.errors import ConfigError, LoadError, TokenizerUnusable, WeightsRefused
from experts.filesystem import is_taken, whole_folder
from experts.llm.checkpoint import SINGLE_NAME, open_checkpoint
from experts.llm.config import CONFIG_NAME, TOKENIZER_FILES, parse_spec, read_spec
from experts.llm.model import LanguageModel
from experts.llm.program import read_program
from experts.llm.text.tokenizer import TextModel
from experts.llm.training.depth import kept_layers, student_config, student_tensors
from experts.llm.training.directory import write_model
from experts.llm.training.staged import train
from experts.llm.training.step import losses_of
from experts.llm.training.texts import read_texts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from experts.llm.config import ArchSpec
    from experts.llm.training.staged import Schedule
    from experts.llm.training.step import Losses, TextBatch
    from experts.llm.training.texts import TrainingTexts

    Told = Callable[[int, Losses, float], None]

REPORTS = 10  # of losses during a training


@dataclass(frozen=True, slots=True)
class DistilOptions:
    depth: int
    schedule: Schedule
    batch_tokens: int = 2048
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Distilled:
    """``kept``: the teacher's layers, counted from 0; ``moe_experts``: of each layer, 0 for a dense one.

    Held-out losses: the teacher's, the student's before the first step, and after the last.
    """

    directory: Path
    kept: tuple[int, ...]
    moe_experts: tuple[int, ...]
    parameters: int
    teacher_parameters: int
    size_bytes: int
    teacher_loss: float
    first_loss: float
    loss: float


def distil(teacher: Path, student: Path, files: Sequence[Path], options: DistilOptions, told: Told) -> Distilled:
    """Train a student and write its directory. ``told``: steps so far, the last batch's losses, the held-out loss.

    Raises ConfigError (texts, options), WeightsRefused (depth, ``student`` exists), TokenizerUnusable, LoadError, and
    what ``read_spec`` and ``open_checkpoint`` raise: a quantised teacher has no gradients, and is refused there.
    """
    name = str(teacher)
    if is_taken(student):
        raise WeightsRefused(name, f"{student} exists already: name a new folder for the student")
    if not 0 <= options.schedule.stop_step <= options.schedule.steps:
        raise ConfigError(
            f"--stop-at {options.schedule.stop_step} is outside the training - give 0 to {options.schedule.steps}"
        )
    spec = read_spec(teacher, name)
    kept = kept_layers(len(spec.layers), options.depth, name)
    program = read_program(teacher, name)
    config = student_config(json.loads(program[CONFIG_NAME]), kept, name)
    checkpoint = open_checkpoint(teacher, name, spec)
    texts = read_texts(files, TextModel.of(program, name), options.batch_tokens, options.seed)
    if texts.largest_token >= spec.vocab_size:
        raise TokenizerUnusable(
            name, TOKENIZER_FILES[0], f"has tokens beyond the model's {spec.vocab_size}: correct it"
        )
    whole = checkpoint.read_all(torch.float32)
    own = student_tensors(whole, kept)
    held_out = texts.held_out_batches()
    first_loss = held_out_loss(LanguageModel(parse_spec(config, name), own), held_out)
    try:
        with whole_folder(student) as made:  # from here on, for a disk that refuses it costs no training
            loss = _train(LanguageModel(spec, whole), parse_spec(config, name), own, texts, options, told)
            write_model(made, config, own, checkpoint.dtype)
            for file in TOKENIZER_FILES:
                if file in program:
                    (made / file).write_bytes(program[file])
    except OSError as error:
        raise LoadError(name, f"{student} cannot be written: {error}") from error
    return Distilled(
        directory=student,
        kept=kept,
        moe_experts=tuple(spec.layers[layer].moe_experts for layer in kept),
        parameters=_parameters(own.values()),
        teacher_parameters=_parameters(whole.values()),
        size_bytes=(student / SINGLE_NAME).stat().st_size,
        teacher_loss=held_out_loss(LanguageModel(spec, whole), held_out),
        first_loss=first_loss,
        loss=loss,
    )


def _train(
    teacher: LanguageModel,
    spec: ArchSpec,
    tensors: Mapping[str, Tensor],
    texts: TrainingTexts,
    options: DistilOptions,
    told: Told,
) -> float:
    """Train the tensors; the held-out loss in the end."""
    schedule, held_out = options.schedule, texts.held_out_batches()
    batches = texts.batches(torch.Generator().manual_seed(options.seed))
    every = math.ceil(schedule.steps / REPORTS)
    last = math.nan

    def tell(step: int, losses: Losses) -> None:
        nonlocal last
        if (step + 1) % every and step + 1 < schedule.steps:
            return
        last = held_out_loss(LanguageModel(spec, tensors), held_out)
        if not math.isfinite(last):
            raise ConfigError(f"the loss is {last} in step {step + 1} - give a lower --learning-rate")
        told(step + 1, losses, last)

    train(spec, tensors, lambda _: next(batches), schedule, teacher, tell)
    return last


def held_out_loss(model: LanguageModel, batches: Iterable[TextBatch]) -> float:
    """Cross-entropy of all counted tokens, in nats a token."""
    with torch.no_grad():
        found = [(float(losses_of(model, batch).cross_entropy), int(batch.counted.sum())) for batch in batches]
    return sum(loss * count for loss, count in found) / sum(count for _, count in found)


def _parameters(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)
