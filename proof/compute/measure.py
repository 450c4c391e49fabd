"""The compute table: contestants in turn, for each architecture and batch size, and the targets of the forms.

Guarantees: contestants take turns in one process, on as many threads as each CPU executor of this box has. A note says
why a form has no row, or was only tried because it is far slower than torch. Generated files are removed afterwards.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from agent.deployment.executors import CORES_PER_CPU_EXECUTOR, executors_on
from agent.runtime.machine.box import threads_per_executor
from agent.runtime.machine.detection import detect
from agent.runtime.machine.threads import end_team, lone_team, use_threads
from experts.backends import backend_for
from experts.backends.forms import form_of
from experts.errors import ConfigError, CoServeError
from experts.expert import Precision
from experts.packed.weights import SegmentStore
from profiler.bench.measured import Column, Measured, Plan, Target, TimedTurns, at_least, by_turns, one_turn, software
from profiler.replay.host_load import QUIET_FRACTION, CoresInUse
from profiler.workload.generated_line import removed_afterwards, write_experts
from proof.compute.arithmetic import NAMES, operations_per_image, reference_of
from proof.compute.contestants import (
    EAGER,
    INT8_SESSION,
    NO_OPENVINO,
    OPENVINO,
    OPENVINO_BF16,
    PEERS,
    Contestant,
    PlainModel,
    eager,
    has_openvino,
    our_form,
    plain_model,
    prepared_images,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from agent.runtime.machine.box import Box
    from experts.expert import Expert

    Progress = Callable[[str, int, int], None]  # stage, done, total

EARLIER = frozenset({"fp32", "bf16", "fp16", "onnxruntime"})  # forms of ours that later ones are to beat
LEAST_GAIN_ALONE, LEAST_GAIN, LEAST_GAIN_FP32 = 1.5, 1.4, 1.1  # of a single image, of more, and in fp32
LEAST_OVER_OPENVINO = 0.9  # of its throughput, in the same numbers
LEAST_OVER_ONNXRUNTIME = 1.0  # of its throughput, both in eight bits
LEGEND = (
    f"x eager: how many times as fast as {EAGER}. of the floor: the floor's time over the row's, where the floor is "
    "the arithmetic alone at the rate of the fastest matrix multiplication in the same numbers, torch's or oneDNN's."
)
COLUMNS = (
    Column("architecture", "architecture"),
    Column("batch", "batch", "d"),
    Column("form", "form"),
    Column("ms/image", "ms_per_image", ".2f"),
    Column("least", "least_ms_per_image", ".2f"),
    Column("x eager", "times_fp32_eager", ".2f"),
    Column("of the floor", "of_floor", ".0%"),
    Column("", "mark"),
)
FLOOR = "floor"
HOPELESS = 4.0  # times as slow as torch itself in fp32: its trial has to do
TRIES = 2
LIMIT_S = 120.0  # of rounds, for one architecture in batches of one size
LIBRARIES = ("onnxruntime", "openvino")


@dataclass(frozen=True, slots=True)
class ComputeRow:
    """One way to run a batch. ``numbers``: name of its arithmetic's dtype. ``least_ms_per_image``: the fastest of
    ``rounds``.

    ``times_fp32_eager``: how many times as fast as the plain module in fp32, by medians. ``of_floor``: time of the
    arithmetic alone in the same numbers, over the row's; 1 of the floor itself. ``is_fastest_of_ours``: among the forms
    that an agent can run.
    """

    architecture: str
    size: str
    batch: int
    form: str
    numbers: str
    is_ours: bool
    rounds: int
    ms_per_image: float
    least_ms_per_image: float
    times_fp32_eager: float
    of_floor: float
    is_fastest_of_ours: bool = False

    @property
    def mark(self) -> str:
        return "fastest of ours" if self.is_fastest_of_ours else ""


def targets_of(rows: Sequence[ComputeRow]) -> tuple[Target, ...]:
    """Targets of the forms, for each measured architecture and batch size."""
    groups = groupby(rows, lambda row: (row.architecture, row.batch))
    return tuple(
        target
        for (architecture, batch), each in groups
        for target in _targets(list(each), f"{architecture}, batch {batch}")
    )


def _targets(rows: Sequence[ComputeRow], where: str) -> Iterator[Target]:
    """Targets of one architecture and batch size. bf16 counts where the processor multiplies it faster than fp32.

    Eight bits are compared with ONNX Runtime's alone: only samples show whether an expert can run in them.
    """
    took = {row.form: row.ms_per_image for row in rows}
    ours = {
        numbers: {row.form for row in rows if row.is_ours and row.numbers == numbers}
        for numbers in ("fp32", "bf16", "int8")
    }

    def over(what: str, others: Collection[str], forms: Collection[str], least: float) -> Iterator[Target]:
        theirs, own = (min((took[form] for form in listed if form in took), default=None) for listed in (others, forms))
        if theirs is not None and own is not None:
            yield at_least(f"{where}: {what}", theirs / own, least)

    if "floor-bf16" in took and ours["bf16"]:
        everything = {row.form for row in rows if row.is_ours} - ours["int8"]
        least = LEAST_GAIN_ALONE if rows[0].batch == 1 else LEAST_GAIN
        yield from over("the fastest form over the earlier ones", everything & EARLIER, everything, least)
    yield from over("in fp32 over the earlier ones", ours["fp32"] & EARLIER, ours["fp32"], LEAST_GAIN_FP32)
    for numbers in ("fp32", "bf16"):
        yield from over(f"in {numbers} over OpenVINO", {f"openvino-{numbers}"}, ours[numbers], LEAST_OVER_OPENVINO)
    yield from over("in int8 over ONNX Runtime", {INT8_SESSION}, ours["int8"], LEAST_OVER_ONNXRUNTIME)


@dataclass(frozen=True, slots=True)
class ComputeOptions:
    """``forms``: ours to compare; none: all that the architecture's backend has here. ``peers``: others, of PEERS.

    ``limit_s``: no round begins later for one architecture and batch size, but the few that a median needs.
    """

    architectures: tuple[str, ...] = ("resnet101",)
    size: tuple[int, int] = (224, 224)
    batches: tuple[int, ...] = (1, 8)
    forms: tuple[Precision, ...] = ()
    rounds: int = 15
    limit_s: float = LIMIT_S
    peers: tuple[str, ...] = tuple(PEERS)


def measure_compute_forms(directory: Path, options: ComputeOptions, progress: Progress) -> Measured:
    """The whole table. ``directory``: where experts with random weights are written, and removed.

    Raises ConfigError for an architecture that is neither a torchvision classifier nor an ultralytics YAML, or a form
    that its backend does not have; CoServeError where torch itself cannot run it; OSError.
    """
    box = detect("cpu")
    threads = executor_threads(box)
    before = torch.get_num_threads()
    use_threads(threads)
    cores = CoresInUse()
    bench = _ComputeBench(options, threads, progress)
    try:
        lone_team(threads).keep()
        with removed_afterwards(directory, "compute-") as folder:
            for architecture in dict.fromkeys(options.architectures):
                own = folder / architecture
                own.mkdir()
                bench.measure(own, architecture)
    finally:
        end_team()
        use_threads(before)
    libraries = [f"{name} {version(name)}" for name in LIBRARIES if find_spec(name) is not None]
    capability = torch.backends.cpu.get_cpu_capability()
    machine = ", ".join((box.model, capability, f"{box.cores} cores", software(), *libraries, f"{threads} threads"))
    return bench.measured(machine, cores.others_fraction())


def executor_threads(box: Box) -> int:
    executors = executors_on(box, ["cpu"] * max(box.cores // CORES_PER_CPU_EXECUTOR, 1))
    return threads_per_executor(box, executors)


class _ComputeBench:
    """Measures architecture by architecture."""

    def __init__(self, options: ComputeOptions, threads: int, progress: Progress) -> None:
        self._options = options
        self._threads = threads
        self._progress = progress
        self._operations: dict[str, int] = {}
        self._rows: list[ComputeRow] = []
        self._notes: list[str] = [] if has_openvino() or not set(OPENVINO) & set(options.peers) else [NO_OPENVINO]

    def measured(self, machine: str, others_fraction: float) -> Measured:
        notes = [f"{name}: {count / 1e9:.2f} GFLOP an image" for name, count in self._operations.items()]
        notes += [LEGEND, *self._notes]
        if others_fraction > QUIET_FRACTION:
            notes.append(f"SHARED: other processes had {others_fraction:.0%} of the cores: compare rows only")
        rows = tuple(self._rows)
        more = {"operations": self._operations}
        return Measured(machine, COLUMNS, rows, targets_of(rows), tuple(dict.fromkeys(notes)), more)

    def measure(self, folder: Path, architecture: str) -> None:
        """One architecture: an expert in each form and its peers, batch size by batch size, the smallest first."""
        forms = self._forms(architecture)
        (expert,) = write_experts(folder, architecture, 1, size=self._options.size)
        try:
            model = plain_model(expert)
        except ValueError as error:
            raise ConfigError(f"{architecture}: {error}") from error
        self._operations[architecture] = operations_per_image(model.plain.module, self._options.size)
        store = SegmentStore(folder / "packed")
        try:
            for batch in sorted(set(self._options.batches)):
                self._progress(f"{architecture} in batches of {batch}", 0, 1)
                forms = self._compare(model, forms, store, batch)
                self._progress(f"{architecture} in batches of {batch}", 1, 1)
        finally:
            store.close()

    def _forms(self, architecture: str) -> list[Precision]:
        known = backend_for(architecture).precisions
        if unknown := [form for form in self._options.forms if form not in known]:
            raise ConfigError(
                f"{architecture} does not run in {', '.join(unknown)} here - choose of {', '.join(sorted(known))}"
            )
        if self._options.forms:
            return [form for form in Precision if form in self._options.forms]
        emulated = [form for form in Precision if form in known and form_of(form).is_emulated()]
        self._notes += [f"left out: {form}, which this CPU emulates (--precision measures it)" for form in emulated]
        return [form for form in Precision if form in known and form not in emulated]

    def _compare(
        self, model: PlainModel, forms: Sequence[Precision], store: SegmentStore, batch: int
    ) -> list[Precision]:
        architecture = model.expert.architecture
        with ExitStack() as stack:
            found = self._contestants(stack, model, forms, store, batch)
            tried_s = {each: took_s for each in found if (took_s := self._tried_s(each)) is not None}
            most_s = HOPELESS * next(took_s for each, took_s in tried_s.items() if each.form == EAGER)
            running = [each for each, took_s in tried_s.items() if took_s <= most_s]
            reference = {each: reference_of(each.numbers) for each in tried_s}
            floors = {_floor(each.dtype): each for each in reference.values()}
            ways = {each.form: each.run for each in running} | {name: each.run for name, each in floors.items()}
            plan = Plan(self._options.rounds, limit_s=self._options.limit_s)
            times: dict[str, TimedTurns[object]] = by_turns(ways, plan)
        if (rounds := len(times[EAGER].seconds)) < self._options.rounds:
            self._notes.append(
                f"{architecture} in batches of {batch}: {rounds} rounds of {self._options.rounds}, as these took "
                f"{self._options.limit_s:g} s or more (--limit)"
            )
        for each in [each for each in tried_s if each not in running]:
            times[each.form] = TimedTurns((tried_s[each],))
            self._notes.append(
                f"{architecture} in {each.form} took more than {HOPELESS:g} times what {EAGER} takes: tried in batches "
                f"of {batch}, and not in larger ones"
            )
        operations = batch * self._operations[architecture]
        times |= {name: times[name].scaled(operations / each.operations) for name, each in floors.items()}
        floor_names = {each: _floor(one.dtype) for each, one in reference.items()}
        self._rows += _rows(model.expert, batch, floor_names, times)
        quick = {each.form for each in running}
        return [form for form in forms if form in quick]

    def _contestants(
        self, stack: ExitStack, model: PlainModel, forms: Sequence[Precision], store: SegmentStore, batch: int
    ) -> list[Contestant]:
        """Torch first; a note for each contestant that cannot run here. The stack frees their memory."""
        images = prepared_images(model.expert, batch)
        found = [eager(model, images)]
        for form in forms:
            with self._noting(f"{model.expert.architecture} in {form} is not measured"):
                found.append(stack.enter_context(our_form(model.expert, form, store, images)))
        for peer in PEERS:
            if peer == OPENVINO_BF16 and form_of(Precision.BF16).is_emulated():
                self._notes.append(f"left out: {peer}, which this CPU emulates")
            elif peer in self._options.peers and (peer not in OPENVINO or has_openvino()):
                with self._noting(f"{model.expert.architecture} in {peer} is not measured"):
                    found.append(PEERS[peer](model, images, self._threads))
        return found

    @contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        try:
            yield
        except CoServeError as error:
            self._notes.append(f"{what}: {error}")

    def _tried_s(self, contestant: Contestant) -> float | None:
        """Seconds of the faster of two runs, as the first builds kernels; None where the way fails.

        Raises CoServeError where torch itself fails, the reference of all others.
        """
        try:
            return min(one_turn(contestant.run)[0] for _ in range(TRIES))
        except CoServeError as error:
            if contestant.form == EAGER:
                raise
            self._notes.append(f"{contestant.form} is not measured: {error}")
            return None


def _floor(numbers: torch.dtype) -> str:
    return f"{FLOOR}-{NAMES[numbers]}"


def _rows(
    expert: Expert, batch: int, floors: Mapping[Contestant, str], times: Mapping[str, TimedTurns[object]]
) -> list[ComputeRow]:
    def row(form: str, numbers: str, floor: str, *, is_ours: bool = False) -> ComputeRow:
        return ComputeRow(
            architecture=expert.architecture,
            size=f"{expert.pixels.height}x{expert.pixels.width}",
            batch=batch,
            form=form,
            numbers=numbers,
            is_ours=is_ours,
            rounds=len(times[form].seconds),
            ms_per_image=times[form].median_s * 1e3 / batch,
            least_ms_per_image=min(times[form].seconds) * 1e3 / batch,
            times_fp32_eager=times[EAGER].median_s / times[form].median_s,
            of_floor=times[floor].median_s / times[form].median_s,
        )

    rows = [row(each.form, NAMES[each.numbers], floor, is_ours=each.is_ours) for each, floor in floors.items()]
    fastest = min((each.ms_per_image for each in rows if each.is_ours), default=None)
    marked = [replace(each, is_fastest_of_ours=each.is_ours and each.ms_per_image == fastest) for each in rows]
    alone = [row(floor, floor.removeprefix(f"{FLOOR}-"), floor) for floor in dict.fromkeys(floors.values())]
    return marked + alone
