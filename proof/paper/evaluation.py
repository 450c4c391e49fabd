"""The paper's evaluation in simulation: its systems on its tasks and devices, and every missed target.

Guarantees: seeded, so the same rows in every run; constants of devices are read, never fitted here; every system has a
row for each task and device. CoServe Best is found on a sample of other requests, as the offline phase does it
(sections 4.4 and 5.3), and our policy likewise; the ablations run with the paper's configuration. Ours may overtake for
the 3 minutes that a board has (section 5.1), and in one row for a line's default of 5 seconds.

Samba-CoE has two rows. The main one, which the paper's ratios stand beside, splits the memory 75 to 25 as CoServe
Casual does; the other has as many experts as fit beside the workspace of one image (``figures`` shows the difference).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from agent.core.performance import Limits
from agent.deployment.executors import CORES_PER_CPU_EXECUTOR
from experts.errors import ConfigError
from profiler.allocation.decay_window import (
    ExecutorCounts,
    WindowSearch,
    decay_window_search,
    decay_windows,
    executor_sweep,
)
from profiler.bench.measured import Target
from profiler.tables import text_table
from proof.paper.devices import CPU, GPU
from proof.paper.systems import CASUAL_FRACTION, Loading, System, SystemRow, most_experts, simulate
from proof.paper.tasks import TASKS, paper_task, sample_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from proof.paper.devices import PaperDevice
    from proof.paper.tasks import PaperTask

MOST_GPU_EXECUTORS = 8  # a sweep ends before, once more of them are no better
SAMBA, SAMBA_ALL_MEMORY = "samba", "samba-all-memory"
SAMBA_FIFO, SAMBA_PARALLEL = "samba-fifo", "samba-parallel"
CASUAL, PAPER, COSERVE = "casual", "paper", "coserve"
COSERVE_5S, COSERVE_PACKED = "coserve-5s", "coserve-packed"
ABLATIONS = ("none", "em", "em-ra", PAPER)  # in the order of section 5.3, lowest throughput first
SAMBAS = (SAMBA, SAMBA_ALL_MEMORY, SAMBA_FIFO, SAMBA_PARALLEL)
POLICIES = (*SAMBAS, CASUAL, *ABLATIONS, COSERVE, COSERVE_5S, COSERVE_PACKED)
CASUAL_GPU_EXECUTORS = {True: 3, False: 2}  # where the memories are split, and where not (section 5.2)
SAMPLE_REQUESTS = 1500
FULL_FORM, SHORT_FORM = (TASKS, SAMPLE_REQUESTS), (("A1", "B1"), 750)  # what is run, and searched on
LEAST_RATIO, MOST_RATIO = 4.5, 12.0  # CoServe over Samba-CoE (sections 1 and 5.2)
HEADINGS = ("policy", "images/s", "of floor", "over samba", "all memory", "switches", "fewer", "executors")
LEAST_FEWER_SWITCHES = 0.78  # section 5.2: at least 78.5 % fewer


@dataclass(frozen=True, slots=True)
class Best:
    """Best configuration of a policy on one board and device, with all runs of the search.

    ``executors``: figure 17, the GPU's beside one of the CPU, then the CPU's. ``memory``: figure 18, in ascending order
    of experts, all bounds of windows that fit; empty where the memory is unified, and ``search`` None.
    """

    board: str
    device: str
    system: System
    executors: tuple[SystemRow, ...]
    memory: tuple[SystemRow, ...]
    search: WindowSearch | None

    @property
    def gpu_sweep(self) -> tuple[SystemRow, ...]:
        """GPU executors beside one of the CPU, in ascending order; none where memory does not hold one of each."""
        return _ascending(self.executors, GPU, CPU, 1)

    @property
    def cpu_sweep(self) -> tuple[SystemRow, ...]:
        """CPU executors beside those of the GPU that were best beside one, in ascending order."""
        beside_one = max(self.gpu_sweep, key=lambda row: row.images_per_s, default=None)
        chosen = self.system if beside_one is None else beside_one
        return _ascending(self.executors, CPU, GPU, chosen.executors[GPU])


def search_best(device: PaperDevice, sample: PaperTask, board: str, start: System) -> Best:
    """The best executors and memory for a system on a sample. ``start``: everything else about it.

    The sweep ends where memory holds no more executors. Raises ConfigError where it does not even hold one.
    """
    start = replace(start, experts=None, expert_fraction=CASUAL_FRACTION if device.is_split else None)
    tried: list[SystemRow] = []
    refused: list[ConfigError] = []

    def of_executors(counts: ExecutorCounts) -> float | None:
        try:
            tried.append(simulate(replace(start, executors={GPU: counts.device, CPU: counts.cpu}), device, sample))
        except ConfigError as error:
            refused.append(error)
            return None
        return tried[-1].images_per_s

    most_cpu = max(device.cores.value // CORES_PER_CPU_EXECUTOR, 1)
    counts = executor_sweep(of_executors, MOST_GPU_EXECUTORS, most_cpu).best
    if counts is None:
        raise refused[0]
    best = replace(start, executors={GPU: counts.device, CPU: counts.cpu})
    if not device.is_split:
        return Best(board, device.device, best, tuple(tried), (), None)
    rows: dict[int, SystemRow] = {}

    def of_memory(experts: int) -> float:
        if experts not in rows:
            rows[experts] = simulate(replace(best, experts=experts), device, sample)
        return rows[experts].images_per_s

    most = most_experts(best, device, sample)
    search = decay_window_search(of_memory, most)
    for window in decay_windows(most):
        of_memory(window.upper)
    memory = tuple(rows[experts] for experts in sorted(rows))
    chosen = max(rows, key=lambda experts: (rows[experts].images_per_s, experts))
    return Best(board, device.device, replace(best, experts=chosen), tuple(tried), memory, search)


def highest(rows: Sequence[SystemRow]) -> int:
    return max(range(len(rows)), key=lambda number: rows[number].images_per_s)


def _ascending(rows: tuple[SystemRow, ...], counted: str, beside: str, count: int) -> tuple[SystemRow, ...]:
    chosen = [row for row in rows if row.executors.get(beside, 0) == count]
    return tuple(sorted(chosen, key=lambda row: row.executors.get(counted, 0)))


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Everything that was simulated: a row for each task, device and system, and the searches, the paper's first."""

    rows: tuple[SystemRow, ...]
    best: tuple[Best, ...]
    sample_requests: int = SAMPLE_REQUESTS  # that the searches were made on

    @property
    def runs(self) -> dict[tuple[str, str], dict[str, SystemRow]]:
        found: dict[tuple[str, str], dict[str, SystemRow]] = {}
        for row in self.rows:
            found.setdefault((row.task, row.device), {})[row.policy] = row
        return found

    @property
    def targets(self) -> tuple[Target, ...]:
        return tuple(
            replace(target, what=f"simulated {task} on {device}: {target.what}")
            for (task, device), rows in self.runs.items()
            for target in _task_targets(rows)
        )


def evaluate(
    devices: Sequence[PaperDevice],
    progress: Callable[[str, int, int], None],
    tasks: Sequence[str] = TASKS,
    sample_requests: int = SAMPLE_REQUESTS,
) -> Evaluation:
    """Run every system on every task and device. ``tasks``, ``sample_requests``: those of FULL_FORM or SHORT_FORM.

    Raises ConfigError where a device has no room for a system.
    """
    boards = tuple(dict.fromkeys(name[0] for name in tasks))
    rows: list[SystemRow] = []
    best: list[Best] = []
    for device in devices:
        for board in boards:
            searching = f"search for board {board} on {device.device}"
            progress(searching, 0, 1)
            sample = sample_of(board, sample_requests)
            found = {policy: search_best(device, sample, board, _start(policy)) for policy in (PAPER, COSERVE)}
            best += found.values()
            progress(searching, 1, 1)
            for name in (name for name in tasks if name[0] == board):
                task = paper_task(name)
                set_up = systems(device, task, found[PAPER].system, found[COSERVE].system)
                for number, system in enumerate(set_up):
                    progress(f"task {name} on {device.device}", number, len(set_up))
                    rows.append(simulate(system, device, task, with_roofline=True))
                progress(f"task {name} on {device.device}", len(set_up), len(set_up))
    by_policy = sorted(best, key=lambda each: each.system.policy != PAPER)
    return Evaluation(tuple(rows), tuple(by_policy), sample_requests)


def systems(device: PaperDevice, task: PaperTask, paper: System, ours: System) -> tuple[System, ...]:
    """Every system of the evaluation, in the order of POLICIES. ``paper``, ``ours``: CoServe's systems on this
    device."""
    samba = System(SAMBA, SAMBA, {GPU: 1})
    return (
        samba,
        replace(samba, name=SAMBA_ALL_MEMORY, experts=most_experts(samba, device, task)),
        System(SAMBA_FIFO, SAMBA_FIFO, {GPU: 1}),
        System(SAMBA_PARALLEL, SAMBA_PARALLEL, paper.executors),  # as many executors as CoServe (section 5.1)
        System(CASUAL, PAPER, {GPU: CASUAL_GPU_EXECUTORS[device.is_split], CPU: 1}),
        *(replace(paper, name=policy, policy=policy) for policy in ABLATIONS),
        ours,
        replace(ours, name=COSERVE_5S, max_overtake_s=Limits(()).max_overtake_s),
        replace(ours, name=COSERVE_PACKED, loading=Loading.PACKED),
    )


def _start(policy: str) -> System:
    """Start of a search. Each executor of the paper's loads for itself; ours keeps its own limit."""
    in_flight = Limits(()).loads_in_flight if policy == COSERVE else None
    return System(policy, policy, {GPU: 1, CPU: 1}, loads_in_flight=in_flight)


def short_form(evaluation: Evaluation) -> str | None:
    """Difference of a short form from the full one, in words; None where its searches are as long."""
    if evaluation.sample_requests >= SAMPLE_REQUESTS:
        return None
    tasks = ", ".join(dict.fromkeys(row.task for row in evaluation.rows))
    return (
        f"Tasks {tasks} only, and executors and memory were searched for on {evaluation.sample_requests:,} requests "
        f"instead of {SAMPLE_REQUESTS:,}: what was found, and with it the figures of CoServe on a task, may differ "
        "from those of the full form."
    )


def shortfalls(evaluation: Evaluation) -> list[str]:
    """Each target of the evaluation that is missed, in words; empty when all are reached."""
    found = [
        f"{task} on {device}: {text}"
        for (task, device), rows in evaluation.runs.items()
        for text in _task_shortfalls(rows)
    ]
    for best in evaluation.best:
        if best.system.policy == PAPER:
            found += [f"board {best.board} on {best.device}: {text}" for text in _sweep_shortfalls(best)]
    return found


def _task_targets(rows: Mapping[str, SystemRow]) -> tuple[Target, Target]:
    samba, paper, ours = rows[SAMBA], rows[PAPER], rows[COSERVE]
    ratio, gain = paper.images_per_s / samba.images_per_s, ours.images_per_s / paper.images_per_s
    wanted, is_within = f"{LEAST_RATIO} to {MOST_RATIO:g}", LEAST_RATIO <= ratio <= MOST_RATIO
    return (
        Target("paper over Samba-CoE", wanted, f"{ratio:.2f}", is_within),
        Target("coserve over paper", "above 1", f"{gain:.3f}", gain > 1),
    )


def _task_shortfalls(rows: Mapping[str, SystemRow]) -> list[str]:
    samba, paper, ours = rows[SAMBA], rows[PAPER], rows[COSERVE]
    ratio, gain = _task_targets(rows)
    over_all_memory = paper.images_per_s / rows[SAMBA_ALL_MEMORY].images_per_s
    found = []
    if not ratio.reached:
        found.append(f"{ratio.what} is {ratio.found}, not {ratio.wanted}")
    if over_all_memory < LEAST_RATIO:
        found.append(f"{ratio.what} with all memory for experts is {over_all_memory:.2f}, below {LEAST_RATIO}")
    if not gain.reached:
        found.append(f"coserve with {ours.images_per_s:.2f} images/s is not above paper with {paper.images_per_s:.2f}")
    order = [rows[policy].images_per_s for policy in ABLATIONS]
    if any(later <= earlier for earlier, later in pairwise(order)):
        figures = ", ".join(f"{name} {value:.2f}" for name, value in zip(ABLATIONS, order, strict=True))
        found.append(f"the ablations are not in the paper's order: {figures} images/s")
    for row in (paper, ours):
        fewer = fewer_switches(row.switches, samba.switches)
        if fewer < LEAST_FEWER_SWITCHES:
            counts = f"{samba.switches} to {row.switches}"
            found.append(
                f"{row.policy} has {fewer:.1%} fewer switches ({counts}), not {LEAST_FEWER_SWITCHES:.0%} at least"
            )
    return found


def _sweep_shortfalls(best: Best) -> list[str]:
    sweeps = {"GPU executors": best.gpu_sweep, "CPU executors": best.cpu_sweep, "experts": best.memory}
    return [
        f"the highest throughput over {name} is at the {'low' if place == 0 else 'high'} end of the sweep"
        for name, rows in sweeps.items()
        if rows and (place := highest(rows)) in (0, len(rows) - 1)
    ]


def fewer_switches(switches: int, than: int) -> float:
    return 1 - switches / than if than else 0.0


def evaluation_table(evaluation: Evaluation) -> str:
    """Rows for a terminal, by task and device, each beside both rows of Samba-CoE; then every missed target.

    "of floor": of the bound on any schedule with the row's executors, memories and loading, as in `coserve plan`.
    """
    lines: list[str] = []
    for (task, device), rows in evaluation.runs.items():
        samba, all_memory = rows[SAMBA], rows[SAMBA_ALL_MEMORY]
        cells = [
            (
                row.policy,
                f"{row.images_per_s:.2f}",
                "-" if row.roofline_fraction is None else f"{row.roofline_fraction:.0%}",
                f"{row.images_per_s / samba.images_per_s:.2f}",
                f"{row.images_per_s / all_memory.images_per_s:.2f}",
                str(row.switches),
                "-" if row is samba else f"{fewer_switches(row.switches, samba.switches):.1%}",
                ", ".join(f"{count} {processor}" for processor, count in row.executors.items() if count),
            )
            for row in rows.values()
        ]
        lines += [f"task {task} on {device}", text_table([HEADINGS, *cells], range(1, 7)), ""]
    note = short_form(evaluation)
    lines += [] if note is None else [f"short      {note}"]
    lines += [f"SHORT      {text}" for text in shortfalls(evaluation)] or ["target     every one is reached"]
    return "\n".join(lines)


def evaluation_json(evaluation: Evaluation) -> dict[str, Any]:
    """The object of `coserve bench tasks --json`. ``short_form``: shortened parts; None: none."""
    return {
        "rows": [asdict(row) for row in evaluation.rows],
        "shortfalls": shortfalls(evaluation),
        "short_form": short_form(evaluation),
    }
