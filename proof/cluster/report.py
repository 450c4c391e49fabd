"""``coserve bench cluster``: workers that hold a third of the experts each, and memory for half beside Ray Serve.

Contestants alternate, on the same nodes, packed files, arrivals, link rate and times of a batch; medians of their turns
are compared. Ray Serve's settings are the best of those in ``docs/benchmarks.md``, and its best within the GPU's batch.
"""

from __future__ import annotations

import statistics
import sys
from contextlib import ExitStack, redirect_stdout
from functools import partial
from typing import TYPE_CHECKING

from profiler.bench.measured import Column, Measured, Target, at_least, this_machine, without_target
from profiler.workload.generated_line import removed_afterwards, require_disk
from proof.cluster.nodes import ray_nodes, require_ray
from proof.cluster.turns import OURS, ClusterTurn, our_turn
from proof.cluster.workload import SHRINK, Workload, paper_device

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from proof.cluster.ray_serve import ServeSettings

    Progress = Callable[[str, int, int], None]  # stage, done, total

LEAST_OF_LINEAR, LEAST_OVER_SERVE = 0.9, 3.0
ONE, ALL, HALF = "one worker, its third", "all fit", "half fits"
COLUMNS = (
    Column("case", "case"),
    Column("contestant", "contestant"),
    Column("images", "images", "d"),
    Column("images/s", "images_per_s", ".1f"),
    Column("loads", "loads", "d"),
    Column("switches", "switches", "d"),
    Column("wait p99 s", "wait_p99_s", ".1f"),
)


def measure_cluster(directory: Path, progress: Progress, workload: Workload | None = None, turns: int = 2) -> Measured:
    """Start nodes of Ray on this machine and measure both cases; files in ``directory`` are removed afterwards.

    Raises CoServeError where Ray or Ray Serve is missing, ConfigError without room on the disk.
    """
    require_ray()
    workload = workload or Workload(paper_device())
    require_disk(directory, 2 * workload.experts * workload.device.weight_bytes, "the experts")
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(sys.stderr))  # Ray prints there what its nodes report
        folder = stack.enter_context(removed_afterwards(directory, "bench-cluster-"))
        address = stack.enter_context(ray_nodes(workload.workers))
        found = _measured(folder, address, workload, progress, turns)
    import ray

    device = workload.device
    rate = f"{device.ssd_bytes_per_s * SHRINK / 1e6:.0f} MB/s"
    notes = (
        f"{workload.workers} nodes of Ray on this machine; weights and SSDs are {SHRINK} times smaller than a "
        f"ResNet101 and {rate}, so that a load takes its true {device.load_s:.3f} s",
        f"compute is emulated: a batch of n sleeps {device.K_s:g} n + {device.B_s:g} s, as on the paper's RTX 3080 Ti; "
        f"{workload.workers} such devices reach {workload.workers * device.most_images_per_s:.0f} images/s",
        "loads and switches are counted after the first loads; Ray Serve's caches are warm, too",
    )
    return Measured(this_machine(f"ray {ray.__version__}"), COLUMNS, found, targets_of(found, workload), notes)


def targets_of(turns: Sequence[ClusterTurn], workload: Workload) -> tuple[Target, ...]:
    def images_per_s(case: str, contestant: str) -> float:
        found = [turn.images_per_s for turn in turns if (turn.case, turn.contestant) == (case, contestant)]
        return statistics.median(found)

    workers = workload.workers
    linear = images_per_s(ALL, OURS) / (workers * images_per_s(ONE, OURS))
    switches = max(turn.switches or 0 for turn in turns if turn.case == ALL)
    peers = dict.fromkeys(turn.contestant for turn in turns if turn.contestant != OURS)
    gains = {peer: images_per_s(HALF, OURS) / images_per_s(HALF, peer) for peer in peers}
    best, *others = sorted(gains, key=lambda peer: gains[peer])
    return (
        at_least(f"{workers} workers, all experts fit, over {workers} times one worker", linear, LEAST_OF_LINEAR),
        Target("the same: switches after the first loads", "0", str(switches), switches == 0),
        at_least(f"memory for half: over {best}", gains[best], LEAST_OVER_SERVE),
        *(without_target(f"memory for half: over {peer}", gains[peer]) for peer in others),
    )


def _measured(
    folder: Path, address: str, workload: Workload, progress: Progress, turns: int
) -> tuple[ClusterTurn, ...]:
    from proof.cluster.ray_serve import best_settings, serve_turn

    workers, everything = workload.workers, workload.by_usage
    third = everything[::workers]  # with a third of the usage, nearly
    workload.write_experts(folder)

    def ours(case: str, workers: int, held: int, components: Sequence[str]) -> ClusterTurn:
        config = workload.line(folder, address, workers, held, components)
        trace = workload.trace(components, workers)
        return our_turn(case, config, trace, workload.device.ssd_bytes_per_s)

    def theirs(settings: ServeSettings) -> ClusterTurn:
        config = workload.line(folder, address, workers, workload.held_each, everything)  # packed for our turns
        return serve_turn(HALF, config, workload, settings)

    contestants: list[Callable[[], ClusterTurn]] = [
        partial(ours, ONE, 1, len(third), third),
        partial(ours, ALL, workers, len(third), everything),
        partial(ours, HALF, workers, workload.held_each, everything),
        *(partial(theirs, settings) for settings in best_settings(workload)),
    ]
    found: list[ClusterTurn] = []
    for number in range(turns * len(contestants)):
        progress("turns", number, turns * len(contestants))
        found.append(contestants[number % len(contestants)]())
    return tuple(found)
