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

from profiler.bench.measured import Column, Measured, Plan, Target, at_least, by_turns, this_machine, without_target
from profiler.workload.generated_line import removed_afterwards, require_disk
from proof.cluster.nodes import ray_nodes, require_ray
from proof.cluster.turns import OURS, ClusterTurn, our_turn
from proof.cluster.workload import SHRINK, Workload, paper_device

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from profiler.replay.player import Progress
    from profiler.workload.traces import TracedArrival

    Trace = Sequence[TracedArrival]

LEAST_OF_LINEAR, LEAST_OVER_SERVE = 0.9, 3.0
PACE = 0.6  # of Ray Serve's best images/s in the backlog of the same run
ONE, ALL, HALF, PACED = "one worker, its third", "all fit", "half fits", "half fits, paced"
COLUMNS = (
    Column("case", "case"),
    Column("contestant", "contestant"),
    Column("images", "images", "d"),
    Column("images/s", "images_per_s", ".1f"),
    Column("loads", "loads", "d"),
    Column("switches", "switches", "d"),
    Column("wait p50 s", "wait_p50_s", ".2f"),
    Column("wait p99 s", "wait_p99_s", ".2f"),
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
        f"paced: images arrive at {PACE:g} of Ray Serve's best rate with memory for half",
    )
    return Measured(this_machine(f"ray {ray.__version__}"), COLUMNS, found, targets_of(found, workload), notes)


def targets_of(turns: Sequence[ClusterTurn], workload: Workload) -> tuple[Target, ...]:
    workers, ours, theirs = workload.workers, _images_per_s(turns, HALF, OURS), _of_peers(turns)
    linear = _images_per_s(turns, ALL, OURS) / (workers * _images_per_s(turns, ONE, OURS))
    switches = max(turn.switches or 0 for turn in turns if turn.case == ALL)
    best, *others = sorted(theirs, key=lambda peer: -theirs[peer])
    return (
        at_least(f"{workers} workers, all experts fit, over {workers} times one worker", linear, LEAST_OF_LINEAR),
        Target("the same: switches after the first loads", "0", str(switches), switches == 0),
        at_least(f"memory for half: over {best}", ours / theirs[best], LEAST_OVER_SERVE),
        *(without_target(f"memory for half: over {peer}", ours / theirs[peer]) for peer in others),
    )


def _of_peers(turns: Sequence[ClusterTurn]) -> dict[str, float]:
    """Images/s of each peer with memory for half."""
    peers = dict.fromkeys(turn.contestant for turn in turns if turn.contestant != OURS)
    return {peer: _images_per_s(turns, HALF, peer) for peer in peers}


def _images_per_s(turns: Sequence[ClusterTurn], case: str, contestant: str) -> float:
    return statistics.median(turn.images_per_s for turn in turns if (turn.case, turn.contestant) == (case, contestant))


def _measured(
    folder: Path, address: str, workload: Workload, progress: Progress, turns: int
) -> tuple[ClusterTurn, ...]:
    from proof.cluster.ray_serve import best_settings, serve_turn

    workers, held, everything = workload.workers, workload.held_each, workload.by_usage
    third = everything[::workers]  # with a third of the usage, nearly
    workload.write_experts(folder)

    def ours(case: str, workers: int, held: int, components: Sequence[str], trace: Trace) -> ClusterTurn:
        config = workload.line(folder, address, workers, held, components)
        return our_turn(case, config, trace, workload.device.ssd_bytes_per_s)

    def in_half(case: str, trace: Trace) -> dict[str, Callable[[], ClusterTurn]]:
        line = workload.line(folder, address, workers, held, everything)  # packed by our turn, the first
        peers = {str(each): partial(serve_turn, case, line, workload, trace, each) for each in best_settings(workload)}
        return {OURS: partial(ours, case, workers, held, everything, trace), **peers}

    def run(stage: str, ways: dict[str, Callable[[], ClusterTurn]]) -> list[ClusterTurn]:
        plan = Plan(turns, warming_up=0, progress=partial(progress, stage))
        return [turn for each in by_turns(ways, plan).values() for turn in each.results]

    backlog = workload.trace(everything, workers)
    alone = {
        ONE: partial(ours, ONE, 1, len(third), third, workload.trace(third, 1)),
        ALL: partial(ours, ALL, workers, len(third), everything, backlog),
    }
    found = run("backlog", alone | in_half(HALF, backlog))
    every_s = 1 / (PACE * max(_of_peers(found).values()))
    return (*found, *run("paced", in_half(PACED, workload.trace(everything, workers, every_s))))
