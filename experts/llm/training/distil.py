"""Mixture-of-Students: a shallower student of a model, written as a directory that is served like its teacher.

Source: DeepSpeed-MoE (arXiv 2201.05596), section 4.2. Computes in fp32 and writes the teacher's dtype. Guarantees: the
student's directory appears whole or not at all; the same files, options and number of threads give the same weights on
one machine. Other numbers of ranks give the same steps but for the rounding of sums.

A student has layers of its teacher: the first and the last one, and those between at equal distances. Each kept layer
is kept whole, with its count of moe_experts, so a pyramid stays one.

Texts to train on are files, in tokens of the model, divided into rows, of which a tenth is held out by seed. A file
``.jsonl`` has a text on each line, as ``{"text": "..."}``; any other file is one text, in UTF-8. A text ends with the
model's end token, and is divided into rows where it is longer than one.
"""

from __future__ import annotations

import json
import math
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from experts.errors import ConfigError, LoadError, RanksLost, TokenizerUnusable, WeightsRefused
from experts.filesystem import is_taken, whole_folder
from experts.llm.files.checkpoint import SINGLE_NAME, open_checkpoint
from experts.llm.files.config import CONFIG_NAME, TOKENIZER_FILES, ConfigFamily, parse_spec, read_spec, text_values
from experts.llm.files.names import assemblies, layer_of
from experts.llm.files.program import read_program
from experts.llm.model import LanguageModel
from experts.llm.parallel.driver import Ranks
from experts.llm.parallel.messages import RankMessage, RanksSetup
from experts.llm.parallel.shape import MeshShape
from experts.llm.text.tokenizer import TextModel
from experts.llm.training.staged import Training, train
from experts.llm.training.step import Losses, TextBatch, losses_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from experts.llm.files.config import ArchSpec
    from experts.llm.training.staged import Schedule

    Report = Callable[[int, Losses, float], None]

LAYERS = "layers."
BY_LAYER = ("num_experts", "layer_types")  # keys of a config.json that may hold a list with an entry for each layer
HELD_OUT_EVERY = 10  # rows
JSONL = ".jsonl"
REPORTS = 10  # of losses during a training
TRAINING_PROCESS = "experts.llm.training.rank_process"


def kept_layers(layers: int, depth: int, teacher: str) -> tuple[int, ...]:
    """Numbers of the teacher's layers that a student of this depth keeps. Raises WeightsRefused."""
    if not 2 <= depth < layers:
        advice = f"give --depth from 2 to {layers - 1}" if layers > 2 else "it cannot be made shallower"
        raise WeightsRefused(teacher, f"has {layers} layers, and a student of {depth} is asked for: {advice}")
    return tuple(n * (layers - 1) // (depth - 1) for n in range(depth))


def student_config(config: Mapping[str, Any], kept: Sequence[int], teacher: str) -> dict[str, Any]:
    """The teacher's config.json for the kept layers alone."""
    whole, config = parse_spec(config, teacher), text_values(config, teacher)
    cut = {**config, "num_hidden_layers": len(kept), "quantization_config": None}  # a student's are whole
    for key in BY_LAYER:
        if isinstance(config.get(key), list):
            cut[key] = [config[key][layer] for layer in kept]
    if whole.family in {ConfigFamily.QWEN2_MOE, ConfigFamily.QWEN3_MOE}:
        dense = [number for number, layer in enumerate(kept) if whole.layers[layer].moe is None]
        cut |= {"decoder_sparse_step": 1, "mlp_only_layers": dense}
    kinds = [layer.attention_kind for layer in whole.layers]
    if len(set(kinds)) > 1:
        cut["layer_types"] = [kinds[layer] for layer in kept]
    assert parse_spec(cut, teacher).layers == tuple(whole.layers[layer] for layer in kept), "layers are kept whole"
    return cut


def student_tensors(tensors: Mapping[str, Tensor], kept: Sequence[int]) -> dict[str, Tensor]:
    """Copies of the teacher's tensors outside its layers and of the kept layers, that take gradients."""
    places = {layer: number for number, layer in enumerate(kept)}
    cut: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.startswith(LAYERS):
            own = name
        elif (layer := layer_of(name)) in places:
            own = name.replace(f"{LAYERS}{layer}.", f"{LAYERS}{places[layer]}.", 1)
        else:
            continue
        cut[own] = tensor.detach().clone().requires_grad_()
    return cut


def write_model(
    directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None
) -> None:
    """Write config.json, and the tensors in the family's usual form, in their own dtype or this one."""
    stored: dict[str, Tensor] = {}
    for assembly in assemblies(parse_spec(config, str(directory))):
        parts = assembly.forms[0]
        numbers = tensors[assembly.name].detach().to(dtype).flatten()
        split = numbers.split([math.prod(part.shape) for part in parts])
        stored |= {part.name: own.view(part.shape).clone() for part, own in zip(parts, split, strict=True)}
    save_file(stored, directory / SINGLE_NAME, metadata={"format": "pt"})
    (directory / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", "utf-8")


@dataclass(frozen=True, slots=True)
class TrainingTexts:
    """Rows of at most ``batch_tokens``, shuffled: those to train on, and those held out."""

    rows: tuple[tuple[int, ...], ...]
    held_out: tuple[tuple[int, ...], ...]
    batch_tokens: int

    @property
    def fewest_rows(self) -> int:
        """Rows that every batch has at least, but for the last of a round."""
        return self.batch_tokens // max(map(len, self.rows))

    @property
    def largest_token(self) -> int:
        return max(max(row) for row in (*self.rows, *self.held_out))

    def batches(self, generator: torch.Generator) -> Iterator[TextBatch]:
        """Batches without end; each row is taken once before any is taken again."""
        while True:
            order = torch.randperm(len(self.rows), generator=generator).tolist()
            yield from _batches([self.rows[number] for number in order], self.batch_tokens)

    def held_out_batches(self) -> list[TextBatch]:
        return list(_batches(sorted(self.held_out, key=len), self.batch_tokens))


def read_texts(files: Sequence[Path], model: TextModel, batch_tokens: int, seed: int) -> TrainingTexts:
    """Raises ConfigError: a file that cannot be read, a line without a text, or too few texts."""
    end = min(model.stop_tokens, default=None)  # of several, the first in the vocabulary ends a text, not a turn
    length = min(model.context_tokens, batch_tokens)
    rows: list[tuple[int, ...]] = []
    for text in (text for file in files for text in _texts_of(file)):
        tokens = model.encode(text)
        if end is not None and tokens[-1:] != (end,):
            tokens = (*tokens, end)
        pieces = (tokens[start : start + length] for start in range(0, len(tokens), length))
        rows += [piece for piece in pieces if len(piece) > 1]
    if len(rows) < HELD_OUT_EVERY:
        raise ConfigError(
            f"the texts make {len(rows)} rows of up to {length} tokens, and at least {HELD_OUT_EVERY} are needed, of "
            "which one is held out - give more texts to --texts, or a lower --batch-tokens"
        )
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    held_out = tuple(rows[number] for number in order[::HELD_OUT_EVERY])
    taken = tuple(rows[number] for place, number in enumerate(order) if place % HELD_OUT_EVERY)
    return TrainingTexts(taken, held_out, batch_tokens)


def _texts_of(file: Path) -> Iterator[str]:
    try:
        content = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read as text: {error} - give files of text in UTF-8") from error
    if file.suffix != JSONL:
        yield content
        return
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError):
            text = None
        if not isinstance(text, str):
            raise ConfigError(f'{file}:{number}: is no text - write {{"text": "..."}} on each line')
        yield text


def _batches(rows: Sequence[tuple[int, ...]], batch_tokens: int) -> Iterator[TextBatch]:
    """Rows in their order, as many in each batch as fit with their padding."""
    batch: list[tuple[int, ...]] = []
    for row in rows:
        if batch and (len(batch) + 1) * max(len(row), *map(len, batch)) > batch_tokens:
            yield TextBatch.of(batch)
            batch = []
        batch.append(row)
    yield TextBatch.of(batch)


@dataclass(frozen=True, slots=True)
class DistilOptions:
    depth: int
    schedule: Schedule
    batch_tokens: int = 2048
    seed: int = 0
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class Lesson:
    """A teacher, its student before the first step, and their texts. ``files``: files of the teacher's tokenizer."""

    teacher: LanguageModel
    kept: tuple[int, ...]
    config: Mapping[str, Any]
    tensors: dict[str, Tensor]
    texts: TrainingTexts
    files: Mapping[str, bytes]
    dtype: torch.dtype

    @property
    def spec(self) -> ArchSpec:
        return parse_spec(self.config, "student")

    def write(self, directory: Path, tensors: Mapping[str, Tensor]) -> None:
        write_model(directory, self.config, tensors, self.dtype)
        for file, content in self.files.items():
            (directory / file).write_bytes(content)


@dataclass(frozen=True, slots=True)
class Distilled:
    """``kept``: the teacher's layers, counted from 0; ``moe_experts``: number in each layer, 0 for a dense one.

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


def distil(teacher: Path, student: Path, files: Sequence[Path], options: DistilOptions, report: Report) -> Distilled:
    """Train a student and write its directory. ``report``: steps so far, the last batch's losses, the held-out loss.

    Raises ConfigError (texts, options), WeightsRefused (depth, ``student`` exists), TokenizerUnusable, LoadError,
    RanksLost, and what ``read_spec`` and ``open_checkpoint`` raise: a quantised teacher is refused there,
    but for one of AWQ or GPTQ, whose numbers are taken as they are.
    """
    name = str(teacher)
    if is_taken(student):
        raise WeightsRefused(name, f"{student} exists already: name a new folder for the student")
    lesson = read_lesson(teacher, files, options)
    held_out = lesson.texts.held_out_batches()
    first_loss = held_out_loss(LanguageModel(lesson.spec, lesson.tensors), held_out)
    last = math.nan

    def tell(step: int, losses: Losses, loss: float) -> None:
        nonlocal last
        last = loss
        if not math.isfinite(last):
            raise ConfigError(f"the loss is {last} in step {step} - give a lower --learning-rate")
        report(step, losses, last)

    try:
        with whole_folder(student) as made:  # from here on, for a disk that refuses it costs no training
            if options.ranks > 1:
                _write_by_ranks(teacher, made, files, options, tell)
            else:
                write_student(lesson, Training(lesson.spec, lesson.tensors), made, options, tell)
    except RanksLost as error:
        raise RanksLost(name, f"{error.reason} - no student was written: start the training again") from error
    except OSError as error:
        raise LoadError(name, f"{student} cannot be written: {error}") from error
    return Distilled(
        directory=student,
        kept=lesson.kept,
        moe_experts=tuple(layer.moe_experts for layer in lesson.spec.layers),
        parameters=_parameters(lesson.spec),
        teacher_parameters=_parameters(lesson.teacher.spec),
        size_bytes=(student / SINGLE_NAME).stat().st_size,
        teacher_loss=held_out_loss(lesson.teacher, held_out),
        first_loss=first_loss,
        loss=last,
    )


def read_lesson(teacher: Path, files: Sequence[Path], options: DistilOptions) -> Lesson:
    """Raises what ``distil`` raises before the first step."""
    name, schedule = str(teacher), options.schedule
    if not 0 <= schedule.stop_step <= schedule.steps:
        raise ConfigError(f"--stop-at {schedule.stop_step} is outside the training - give 0 to {schedule.steps}")
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
    if options.ranks > texts.fewest_rows:
        raise ConfigError(
            f"--ranks {options.ranks}: a step of {options.batch_tokens} tokens has as few as {texts.fewest_rows} rows, "
            f"and each rank needs one - give at most --ranks {texts.fewest_rows}, more --batch-tokens or shorter texts"
        )
    whole = checkpoint.read_all(torch.float32)
    small = {file: program[file] for file in TOKENIZER_FILES if file in program}
    own = student_tensors(whole, kept)
    return Lesson(LanguageModel(spec, whole), kept, config, own, texts, small, checkpoint.dtype)


def write_student(
    lesson: Lesson, training: Training, made: Path | None, options: DistilOptions, report: Report
) -> None:
    """Train a student, and write its files. ``made``: None on ranks that write nothing."""
    schedule, held_out = options.schedule, lesson.texts.held_out_batches()
    batches = lesson.texts.batches(torch.Generator().manual_seed(options.seed))
    every = math.ceil(schedule.steps / REPORTS)

    def tell(step: int, losses: Losses) -> None:
        if (step + 1) % every == 0 or step + 1 == schedule.steps:
            report(step + 1, losses, held_out_loss(LanguageModel(lesson.spec, training.whole()), held_out))

    train(training, lambda _: next(batches), schedule, lesson.teacher, tell)
    whole = training.whole()
    if made is not None:
        lesson.write(made, whole)


def _write_by_ranks(teacher: Path, made: Path, files: Sequence[Path], options: DistilOptions, report: Report) -> None:
    """Have ranks of this box, children, train the student; the first of them writes its files. Raises RanksLost."""
    name, threads = str(teacher), max(torch.get_num_threads() // options.ranks, 1)
    setup = RanksSetup(name, name, MeshShape(data=options.ranks), threads=threads)
    lesson = {"teacher": name, "made": str(made), "files": [*map(str, files)], "options": asdict(options)}
    with closing(Ranks(setup, process=TRAINING_PROCESS)) as ranks:
        ranks.meet()
        header = ranks.call(RankMessage(lesson)).header
        while header:
            report(header["step"], Losses(*map(torch.tensor, header["losses"])), header["held_out"])
            header = ranks.call(RankMessage({})).header


def held_out_loss(model: LanguageModel, batches: Iterable[TextBatch]) -> float:
    """Cross-entropy of all counted tokens, in nats a token."""
    with torch.no_grad():
        found = [(float(losses_of(model, batch).cross_entropy), int(batch.counted.sum())) for batch in batches]
    return sum(loss * count for loss, count in found) / sum(count for _, count in found)


def _parameters(spec: ArchSpec) -> int:
    return sum(math.prod(assembly.shape) for assembly in assemblies(spec))
