"""All parts of ``coserve bench llm`` in one run: targets reached, targets SHORT, and parts that were not measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING

import torch

from agent.runtime.machine.threads import use_threads
from experts.llm.checkpoint import open_checkpoint
from experts.llm.config import read_spec
from experts.llm.model import LanguageModel
from experts.llm.quant import Int8Tensors, weight_bytes
from profiler.bench.measured import Measured, this_machine
from profiler.targets import Target
from profiler.workload.generated_line import removed_afterwards, require_disk
from proof.llm.difference import output_difference
from proof.llm.figures import COLUMNS, Figure, LlmFindings
from proof.llm.mixed import measure_mixed, measure_overhead
from proof.llm.offload import measure_offload
from proof.llm.peers import OURS, has_transformers
from proof.llm.random_models import LARGE, SMALL, TINY, mixed_lengths, write_random_model
from proof.llm.swapping import MODELS, Asking, measure_backbone, measure_swapping
from proof.parts.dispatch import LayerShape, measure_dispatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from proof.llm.random_models import QwenShape

    Progress = Callable[[str, int, int], None]  # stage, done, total

THREADS = 2  # what the targets are stated for
NEEDED_BYTES = 8_000_000_000  # of disk: checkpoints of 105M in fp32, and what is packed of them
INT8_TEXTS = 8
TARGET_INT8 = 0.55  # of bf16: half, and what is not quantised


@dataclass(frozen=True, slots=True)
class LlmExtent:
    """Extent of the measurement. ``mixed``: shapes; ``asking``: what is swapped, and its shape shared and quantised."""

    mixed: tuple[QwenShape, ...]
    asking: Asking
    overhead: QwenShape
    requests: int
    dispatch: LayerShape = field(default_factory=LayerShape)


FULL = LlmExtent((SMALL, LARGE), Asking(LARGE, 5), SMALL, 24)
QUICK = LlmExtent((TINY,), Asking(TINY, 1, MODELS[:2], 1, (OURS,)), TINY, 4, LayerShape(64, 8, 32))


def measure_llm(directory: Path, progress: Progress, *, quick: bool = False, threads: int = THREADS) -> Measured:
    """Measure all parts, one after the other; files in ``directory`` are removed afterwards.

    ``quick``: tiny models, one round. Raises CoServeError where systems that are compared do not write the same,
    ConfigError without room on the disk.
    """
    form = QUICK if quick else FULL
    before = torch.get_num_threads()
    if not quick:
        require_disk(directory, NEEDED_BYTES, "three models of 105M parameters, and what is packed of them,")
    use_threads(threads)
    try:
        with removed_afterwards(directory, "bench-llm-") as folder:
            parts = tuple(_parts(folder, form, progress))
    finally:
        use_threads(before)
    library = (f"transformers {version('transformers')}",) if has_transformers() else ()
    notes = ("tiny models, one round: these figures say that it runs, and nothing else",) if quick else ()
    return Measured(
        this_machine(*library, f"{threads} threads"),
        COLUMNS,
        tuple(figure for part in parts for figure in part.figures),
        tuple(target for part in parts for target in part.targets),
        (*notes, *(note for part in parts for note in part.notes)),
    )


def _parts(folder: Path, form: LlmExtent, progress: Progress) -> Iterator[LlmFindings]:
    shape, rounds = form.asking.shape, form.asking.rounds
    for each in form.mixed:
        told = partial(progress, f"mixed lengths, {each.name}")
        yield measure_mixed(folder, each, rounds, told, form.requests)
    stages: dict[str, Callable[[], LlmFindings]] = {
        "iteration overhead": lambda: measure_overhead(folder, form.overhead, rounds),
        "dispatch": lambda: _dispatch(form.dispatch),
        "swapping": lambda: measure_swapping(folder, form.asking),
        "backbone": lambda: measure_backbone(folder, form.asking),
        "offloaded experts": lambda: measure_offload(folder / "offload", shape, rounds),
        "int8": lambda: measure_int8(folder, shape),
    }
    for stage, measure in stages.items():
        progress(stage, 0, 1)
        yield measure()
        progress(stage, 1, 1)


def _dispatch(shape: LayerShape) -> LlmFindings:
    measured = measure_dispatch(shape)
    figures = (
        Figure("dispatch", f"{row.part}, {way}", seconds * 1e3, "ms")
        for row in measured.rows
        for way, seconds in (("einsum", row.einsum_s), ("table", row.table_s))
    )
    return LlmFindings(tuple(figures), measured.targets)


def measure_int8(folder: Path, shape: QwenShape) -> LlmFindings:
    """Bytes of int8 and bf16 weights, and how far what they say differs.

    Random weights are hard on quantisation: nothing makes one token much likelier than all others.
    """
    directory = write_random_model(folder / f"int8-{shape.name}", shape)
    spec = read_spec(directory, shape.name)
    tensors = open_checkpoint(directory, shape.name, spec).read_all(torch.bfloat16)
    quantised = Int8Tensors(tensors)
    held = {name: quantised[name] for name in quantised}
    share = weight_bytes(held.values()) / weight_bytes(tensors.values())
    texts = [job.prompt for job in mixed_lengths(INT8_TEXTS, shape.vocabulary)]
    difference = output_difference(LanguageModel(spec, tensors), LanguageModel(spec, held), texts)
    wanted = f"at most {TARGET_INT8:.0%}"
    target = Target("int8 weights, of their size in bf16", wanted, f"{share:.1%}", share <= TARGET_INT8)
    figure = Figure("int8", "of the bytes in bf16", 100 * share, "%")
    return LlmFindings((figure,), (target,), (f"int8 against bf16, random weights: {difference}",))
