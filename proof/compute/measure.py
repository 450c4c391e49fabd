"""The compute table, measured: all that take part, in turn, for each architecture and batch size.

Guarantees: what is compared took turns in one process, on as many threads as each CPU executor of this box has; a form
that cannot be run here has no row, and a note that says why; one that is far slower than torch itself is tried, and
told so. What was written is removed afterwards.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from agent.deployment.executors import CORES_PER_CPU_EXECUTOR, executors_on
from agent.runtime.machine.box import threads_per_executor
from agent.runtime.machine.detection import detect
from agent.runtime.threads import end_team, lone_team, use_threads
from experts.backends import backend_for
from experts.errors import ConfigError, CoServeError
from experts.expert import Precision
from experts.packed.weights import SegmentStore
from profiler.bench.software import software
from profiler.replay.host_load import CoresInUse
from profiler.workload.generated_line import removed_afterwards, write_experts
from proof.compute.alternating import Times, alternating, one_run
from proof.compute.arithmetic import NAMES, Multiplications, operations_per_image
from proof.compute.contestants import (
    EAGER,
    INT8_SESSION,
    NO_OPENVINO,
    OPENVINO,
    PEERS,
    SESSION,
    Contestant,
    eager,
    has_openvino,
    int8_session,
    openvino,
    our_form,
    plain_model,
    prepared_images,
    session,
)
from proof.compute.quantising import quantised
from proof.compute.spending import Spending, measure_spending
from proof.compute.table import ComputeRow, ComputeTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from agent.runtime.machine.box import Box
    from experts.backends.base import Prepared
    from experts.expert import Expert
    from proof.compute.contestants import Model

    Progress = Callable[[str, int, int], None]  # stage, done, total

FLOOR = "floor"
HOPELESS = 4.0  # times as slow as torch itself in fp32: then what was tried has to do
TRIES = 2
LIMIT_S = 120.0  # of rounds, for one architecture in batches of one size
LIBRARIES = ("onnxruntime", "openvino")


@dataclass(frozen=True, slots=True)
class ComputeOptions:
    """``forms``: ours to compare; none: all that the architecture's backend has here. ``peers``: others, of PEERS.

    ``limit_s``: after it no round begins for one architecture and batch size, but the few that a median needs; notes
    tell what is left out. ``tells_spending``: also the time of our fastest form by kind of operator.
    """

    architectures: tuple[str, ...] = ("resnet101",)
    size: tuple[int, int] = (224, 224)
    batches: tuple[int, ...] = (1, 8)
    forms: tuple[Precision, ...] = ()
    rounds: int = 15
    limit_s: float = LIMIT_S
    peers: tuple[str, ...] = PEERS
    tells_spending: bool = True


def measure_compute_forms(directory: Path, options: ComputeOptions, progress: Progress) -> ComputeTable:
    """The whole table. ``directory``: where experts with random weights are written, and removed.

    Raises ConfigError for an architecture that is neither a torchvision classifier nor an ultralytics YAML, or a form
    that its backend does not have; CoServeError where torch itself cannot run it; OSError for what the disk refuses.
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
    machine = f"{box.model}, {torch.backends.cpu.get_cpu_capability()}, {box.cores} cores, {_software()}"
    return bench.table(machine, cores.others_fraction())


def executor_threads(box: Box) -> int:
    executors = executors_on(box, ["cpu"] * max(box.cores // CORES_PER_CPU_EXECUTOR, 1))
    return threads_per_executor(box, executors)


class _ComputeBench:
    """Measures architecture by architecture; the floor's multiplications are found once."""

    def __init__(self, options: ComputeOptions, threads: int, progress: Progress) -> None:
        self._options = options
        self._threads = threads
        self._progress = progress
        self._multiplications = Multiplications()
        self._operations: dict[str, int] = {}
        self._rows: list[ComputeRow] = []
        self._spending: list[Spending] = []
        self._notes: list[str] = [] if has_openvino() or not set(OPENVINO) & set(options.peers) else [NO_OPENVINO]

    def table(self, machine: str, others_fraction: float) -> ComputeTable:
        return ComputeTable(
            machine=machine,
            threads=self._threads,
            others_fraction=others_fraction,
            operations=self._operations,
            rows=tuple(self._rows),
            spending=tuple(self._spending),
            notes=tuple(dict.fromkeys(self._notes)),
        )

    def measure(self, folder: Path, architecture: str) -> None:
        """One architecture: an expert in each form and its peers, batch size by batch size, the smallest first."""
        forms = self._forms(architecture)
        (expert,) = write_experts(folder, architecture, 1, size=self._options.size)
        try:
            model = plain_model(expert)
        except ValueError as error:
            raise ConfigError(f"{architecture}: {error}") from error
        model = self._with_quantised(model, folder)
        self._operations[architecture] = operations_per_image(model.module, self._options.size)
        store = SegmentStore(folder / "packed")
        try:
            for batch in sorted(set(self._options.batches)):
                self._progress(f"{architecture} in batches of {batch}", 0, 1)
                forms, fastest = self._compare(model, forms, store, batch)
                if fastest is not None and self._options.tells_spending:
                    self._tell_spending(folder, architecture, batch, fastest)
                self._progress(f"{architecture} in batches of {batch}", 1, 1)
        finally:
            store.close()

    def _forms(self, architecture: str) -> list[Precision]:
        known = backend_for(architecture).precisions
        if unknown := [form for form in self._options.forms if form not in known]:
            raise ConfigError(
                f"{architecture} does not run in {', '.join(unknown)} here - choose of {', '.join(sorted(known))}"
            )
        return [form for form in Precision if form in (self._options.forms or known)]

    def _with_quantised(self, model: Model, folder: Path) -> Model:
        if INT8_SESSION not in self._options.peers:
            return model
        try:
            return replace(model, quantised=quantised(model, folder))
        except CoServeError as error:
            self._notes.append(f"{model.expert.architecture} in {INT8_SESSION} is not measured: {error}")
            return model

    def _compare(
        self, model: Model, forms: Sequence[Precision], store: SegmentStore, batch: int
    ) -> tuple[list[Precision], Precision | None]:
        """The rows of one batch size; which forms are worth running in larger ones, and torch's fastest."""
        images = prepared_images(model.expert, batch)
        with ExitStack() as stack:
            tried_s = {each: self._tried_s(each) for each in self._contestants(stack, model, forms, store, images)}
            able = {each: took_s for each, took_s in tried_s.items() if took_s is not None}
            most_s = HOPELESS * next(took_s for each, took_s in able.items() if each.form == EAGER)
            running = [each for each, took_s in able.items() if took_s <= most_s]
            held_against = {each: self._multiplications.of(each.numbers) for each in able}
            floors = {_floor(each.dtype): each for each in held_against.values()}
            ways = {each.form: each.run for each in running} | {name: each.run for name, each in floors.items()}
            times = alternating(ways, self._options.rounds, limit_s=self._options.limit_s)
        self._tell_left_out(model.expert.architecture, batch, len(times[EAGER].seconds))
        times |= {each.form: Times((took_s,)) for each, took_s in able.items() if each not in running}
        operations = batch * self._operations[model.expert.architecture]
        times |= {name: times[name].scaled(operations / each.operations) for name, each in floors.items()}
        names = {each: _floor(one.dtype) for each, one in held_against.items()}
        rows = _rows(model.expert, batch, names, times)
        self._rows += rows
        self._tell_hopeless(model.expert.architecture, batch, [each.form for each in able if each not in running])
        quick = [form for form in forms if form in {each.form for each in running}]
        watched = [form for form in quick if form is not Precision.ONNXRUNTIME]  # its kernels are not reported
        return quick, min(watched, key=lambda form: times[form].median_s, default=None)

    def _contestants(
        self,
        stack: ExitStack,
        model: Model,
        forms: Sequence[Precision],
        store: SegmentStore,
        images: Sequence[Prepared],
    ) -> Iterator[Contestant]:
        """Torch itself first; forms that cannot be run here are told. What they hold is let go of with the stack."""
        yield eager(model, images)
        for form in forms:
            try:
                yield stack.enter_context(our_form(model.expert, form, store, images))
            except CoServeError as error:
                self._notes.append(f"{model.expert.architecture} in {form} is not measured: {error}")
        peers = self._options.peers
        if SESSION in peers:
            yield session(model, images, self._threads)
        if model.quantised is not None:
            yield int8_session(model, model.quantised, images, self._threads)
        for name in (name for name in OPENVINO if name in peers and has_openvino()):
            try:
                yield openvino(model, images, self._threads, name)
            except CoServeError as error:
                self._notes.append(f"{model.expert.architecture} in {name} is not measured: {error}")

    def _tried_s(self, contestant: Contestant) -> float | None:
        """Seconds of the faster of two runs, as kernels are built in the first; None where the way fails.

        Raises CoServeError where torch itself fails, the reference of all others.
        """
        try:
            return min(one_run(contestant.run) for _ in range(TRIES))
        except CoServeError as error:
            if contestant.form == EAGER:
                raise
            self._notes.append(f"{contestant.form} is not measured: {error}")
            return None

    def _tell_hopeless(self, architecture: str, batch: int, forms: Iterable[str]) -> None:
        for form in forms:
            self._notes.append(
                f"{architecture} in {form} took more than {HOPELESS:g} times what {EAGER} takes: tried in batches of "
                f"{batch}, and not in larger ones"
            )

    def _tell_left_out(self, architecture: str, batch: int, rounds: int) -> None:
        if rounds < self._options.rounds:
            self._notes.append(
                f"{architecture} in batches of {batch}: {rounds} rounds of {self._options.rounds}, as these took "
                f"{self._options.limit_s:g} s or more (--limit)"
            )

    def _tell_spending(self, folder: Path, architecture: str, batch: int, form: str) -> None:
        try:
            found = measure_spending(folder, architecture, self._options.size, batch, form, self._threads)
        except CoServeError as error:
            self._notes.append(f"{architecture} in batches of {batch}: {error}")
        else:
            self._spending.append(found)


def _floor(numbers: torch.dtype) -> str:
    return f"{FLOOR}-{NAMES[numbers]}"


def _rows(expert: Expert, batch: int, floors: Mapping[Contestant, str], times: Mapping[str, Times]) -> list[ComputeRow]:
    """One for each contestant and each floor, in that order. ``floors``: which one each is held against."""
    listed = [(each.form, NAMES[each.numbers], each.is_ours, floor) for each, floor in floors.items()]
    listed += [(floor, floor.removeprefix(f"{FLOOR}-"), False, floor) for floor in dict.fromkeys(floors.values())]
    fastest = min(
        (form for form, _, is_ours, _ in listed if is_ours), key=lambda form: times[form].median_s, default=""
    )
    return [
        ComputeRow(
            architecture=expert.architecture,
            size=f"{expert.pixels.height}x{expert.pixels.width}",
            batch=batch,
            form=form,
            numbers=numbers,
            is_ours=is_ours,
            rounds=len(times[form].seconds),
            ms_per_image=times[form].median_s * 1e3 / batch,
            least_ms_per_image=times[form].least_s * 1e3 / batch,
            times_fp32_eager=times[EAGER].median_s / times[form].median_s,
            of_floor=times[floor].median_s / times[form].median_s,
            is_fastest_of_ours=form == fastest,
        )
        for form, numbers, is_ours, floor in listed
    ]


def _software() -> str:
    there = [f"{name} {version(name)}" for name in LIBRARIES if find_spec(name) is not None]
    return ", ".join((software(), *there))
