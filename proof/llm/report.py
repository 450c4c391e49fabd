"""All parts of ``coserve bench llm`` in one run: targets reached, targets SHORT, and parts that were not measured."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING

import torch

from agent.runtime.machine.detection import detect
from agent.runtime.machine.threads import use_threads
from profiler.bench.measured import Measured, this_machine
from profiler.workload.generated_line import removed_afterwards, require_disk
from proof.llm.figures import COLUMNS, LlmFindings
from proof.llm.mixed import measure_mixed
from proof.llm.offload import measure_offload
from proof.llm.peers import OURS, has_transformers
from proof.llm.random_models import LARGE, SMALL, TINY
from proof.llm.swapping import MODELS, Asking, measure_backbone, measure_swapping

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from proof.llm.random_models import QwenShape

    Progress = Callable[[str, int, int], None]  # stage, done, total

THREADS = 2  # what the targets are stated for
NEEDED_BYTES = 8_000_000_000  # of disk: checkpoints of 105M in fp32, and their packed files


@dataclass(frozen=True, slots=True)
class LlmExtent:
    """Extent of the measurement. ``mixed``: shapes; ``asking``: rounds and shape of the other parts."""

    mixed: tuple[QwenShape, ...]
    asking: Asking
    requests: int


FULL = LlmExtent((SMALL, LARGE), Asking(LARGE, 5), 24)
QUICK = LlmExtent((TINY,), Asking(TINY, 1, MODELS[:2], 1, (OURS,)), 4)


def measure_llm(directory: Path, progress: Progress, *, quick: bool = False, threads: int = THREADS) -> Measured:
    """Measure all parts, one after the other; files in ``directory`` are removed afterwards.

    ``quick``: tiny models, one round. Raises CoServeError where systems that are compared do not write the same,
    ConfigError without room on the disk.
    """
    form = QUICK if quick else FULL
    before = torch.get_num_threads()
    if not quick:
        require_disk(directory, NEEDED_BYTES, "three models of 105M parameters and their packed files")
    use_threads(threads)
    try:
        with removed_afterwards(directory, "bench-llm-") as folder:
            parts = tuple(_parts(folder, form, progress))
    finally:
        use_threads(before)
    notes = ("tiny models, one round: these figures say that it runs, and nothing else",) if quick else ()
    return measured_of(parts, threads, notes)


def measured_of(parts: Sequence[LlmFindings], threads: int, notes: Sequence[str] = ()) -> Measured:
    library = (f"transformers {version('transformers')}",) if has_transformers() else ()
    return Measured(
        this_machine(detect("cpu").model, *library, f"{threads} threads"),
        COLUMNS,
        tuple(figure for part in parts for figure in part.figures),
        tuple(target for part in parts for target in part.targets),
        tuple(dict.fromkeys((*notes, *(note for part in parts for note in part.notes)))),
    )


def _parts(folder: Path, form: LlmExtent, progress: Progress) -> Iterator[LlmFindings]:
    shape, rounds = form.asking.shape, form.asking.rounds
    for each in form.mixed:
        of_rounds = partial(progress, f"mixed lengths, {each.name}")
        yield measure_mixed(folder, each, rounds, of_rounds, form.requests)
    stages: dict[str, Callable[[], LlmFindings]] = {
        "swapping": lambda: measure_swapping(folder, form.asking),
        "backbone": lambda: measure_backbone(folder, form.asking),
        "offloaded experts": lambda: measure_offload(folder / "offload", shape, rounds),
    }
    for stage, measure in stages.items():
        progress(stage, 0, 1)
        yield measure()
        progress(stage, 1, 1)
