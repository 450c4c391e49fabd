"""All parts of `coserve bench llm`, in one run: what is reached, what is SHORT, and what could not be measured."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

from agent.runtime.threads import use_threads
from profiler.bench.software import software
from profiler.targets import targets_text
from profiler.workload.generated_line import removed_afterwards, require_disk
from proof.llm.int8 import measure_int8
from proof.llm.mixed import measure_mixed
from proof.llm.overhead import measure_overhead
from proof.llm.part import Part
from proof.llm.peer_process import OURS
from proof.llm.random_models import LARGE, SMALL, TINY
from proof.llm.swapping import EACH, MODELS, WAYS, measure_backbone, measure_swapping
from proof.llm.transformers_peer import is_there
from proof.parts import moe_offload
from proof.parts.dispatch import measure_dispatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from proof.llm.random_models import QwenShape

    Progress = Callable[[str, int, int], None]  # stage, done, total

THREADS = 2  # what the targets are stated for
ROUNDS = 5
NEEDED_BYTES = 8_000_000_000  # of disk: checkpoints of 105M in fp32, and what is packed of them


@dataclass(frozen=True, slots=True)
class Form:
    """Extent of the measurement. ``mixed``: shapes; ``swapped``: the shape that is swapped, shared and quantised.

    ``each``: requests to each model in a round of swapping; ``ways``: what the processes run there.
    """

    mixed: tuple[QwenShape, ...]
    swapped: QwenShape
    overhead: QwenShape
    rounds: int
    requests: int
    models: Sequence[str]
    dispatch: tuple[int, int, int]  # tokens, experts, width
    offloaded: moe_offload.OffloadShape = moe_offload.LARGE
    each: int = EACH
    ways: Sequence[str] = WAYS


FULL = Form((SMALL, LARGE), LARGE, SMALL, ROUNDS, 24, MODELS, (1024, 128, 256))
QUICK = Form((TINY,), TINY, TINY, 1, 4, MODELS[:2], (64, 8, 32), moe_offload.TINY, 1, (OURS,))


@dataclass(frozen=True, slots=True)
class LlmReport:
    machine: str
    is_quick: bool
    parts: tuple[Part, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure_llm(directory: Path, progress: Progress, *, quick: bool = False, threads: int = THREADS) -> LlmReport:
    """All parts, one after the other; what is written in ``directory`` is removed afterwards.

    ``quick``: tiny models, one round: whether it runs, not what it reaches. Raises CoServeError where systems that are
    compared do not write the same, ConfigError without room on the disk.
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
    return LlmReport(_machine(threads), quick, parts)


def report(found: LlmReport) -> str:
    lines = [f"machine  {found.machine}"]
    if found.is_quick:
        lines.append("tiny models, one round: these figures say that it runs, and nothing else")
    lines.append(targets_text(target for part in found.parts for target in part.targets))
    lines += [f"{part.name}: {remark}" for part in found.parts for remark in part.remarks]
    lines += [f"NOT MEASURED  {why}" for part in found.parts for why in part.skipped]
    return "\n".join(lines)


def _parts(folder: Path, form: Form, progress: Progress) -> Iterator[Part]:
    for shape in form.mixed:
        told = partial(progress, f"mixed lengths, {shape.name}")
        yield measure_mixed(folder, shape, form.rounds, told, form.requests)
    progress("iteration overhead", 0, 1)
    yield measure_overhead(folder, form.overhead, form.rounds)
    progress("iteration overhead", 1, 1)
    yield _dispatch(form)
    progress("swapping", 0, 1)
    yield measure_swapping(folder, form.swapped, form.rounds, form.models, form.each, form.ways)
    progress("swapping", 1, 1)
    yield measure_backbone(folder, form.swapped, form.each)
    progress("offloaded experts", 0, 1)
    yield _offload(folder, form)
    progress("offloaded experts", 1, 1)
    yield measure_int8(folder, form.swapped)


def _dispatch(form: Form) -> Part:
    tokens, moe_experts, width = form.dispatch
    times = measure_dispatch(tokens, moe_experts, width)
    return Part("dispatch", times.targets, asdict(times))


def _offload(folder: Path, form: Form) -> Part:
    own = folder / "offload"
    own.mkdir()
    times = moe_offload.measure_moe_offload(own, form.offloaded, form.rounds)
    return Part("offloaded experts", times.targets, asdict(times), times.remarks)


def _machine(threads: int) -> str:
    library = f", transformers {version('transformers')}" if is_there() else ""
    return f"{platform.machine()}, {software()}{library}, {threads} threads"
