"""What scheduling costs: a recorded run against the same batches and loads played back without any scheduling.

Section 5.3 of the CoServe paper schedules requests offline in advance and performs inference directly; Figure 19 sets
the latency of scheduling a request beside that of its inference with and without scheduling. Here the effects of a
real run are recorded; a ``Playback`` then stands in the Engine's place and releases them in their recorded order, each
as soon as what it needs has happened.
"""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.deployment.build import AgentOptions
from agent.records.database import StateLock
from agent.runtime.loop import LoopOptions
from agent.runtime.machine.detection import detect
from profiler.bench.policy_runs import RunOptions, machine
from profiler.bench.rows import busy_s
from profiler.charts import Labels, bar_chart
from profiler.replay.images import experts_of, images_of
from profiler.replay.player import player
from profiler.targets import Target, at_most
from proof.paper.figures import FIGURE_19, FIGURE_19_SAID, section
from proof.scheduling.playback import Playback
from proof.scheduling.recorder import Recorder, Recording

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from agent.config import LineConfig
    from agent.runtime.loop import Decider
    from profiler.replay.player import Played, Progress
    from profiler.workload.traces import TracedArrival

TARGET_GAP = 0.03
TARGET_MANAGEMENT_SHARE = 0.002


@dataclass(frozen=True, slots=True)
class SchedulingCost:
    """Figure 19, and the share of expert management: means over pairs of a run and its playback, in seconds.

    ``scheduling_s``, ``inference_s``, ``prescheduled_s``: of one request. Scheduling is the deciding thread's processor
    time, inference what the executors were busy for. ``gap``: by how much inference takes longer than without any
    scheduling; ``seconds_gap``: the same of the whole trace. ``management_share``: of the trace's time. ``error``: the
    standard error of ``seconds_gap``, by how much pairs differ; None for a single one.
    """

    machine: str
    policy: str
    requests: int
    repeats: int
    scheduling_s: float
    inference_s: float
    prescheduled_s: float
    gap: float
    seconds_gap: float
    management_share: float
    differences: int  # labels that a playback judged unlike its recording
    error: float | None

    @property
    def targets(self) -> tuple[Target, Target]:
        """The paper's figures: a gap under 3 %, expert management at most 0.2 %.

        The larger gap counts: an executor that waits for a decision is not busy, but the trace takes longer.
        """
        larger_gap = max(self.gap, self.seconds_gap)
        what, wanted = "scheduling, against pre-scheduled requests", f"at most {TARGET_GAP:.1%}"
        gap = Target(what, wanted, f"{larger_gap:.2%}", larger_gap < TARGET_GAP)
        return gap, at_most("expert management, of the time", self.management_share, TARGET_MANAGEMENT_SHARE)


@dataclass(frozen=True, slots=True)
class Pair:
    recording: Recording
    scheduled: Played
    played_back: Played
    differences: int
    machine: str


def measure_scheduling(
    config: LineConfig,
    trace: Sequence[TracedArrival],
    options: RunOptions | None = None,
    progress: Progress = lambda *_: None,
) -> SchedulingCost:
    """Run and play back a trace ``repeats`` times, after one pair that counts for nothing.

    In every second pair the playback, of the run before, goes first: a machine that slows down touches both alike.

    Raises what ``run_line`` raises, and ConfigError for a run in which something fails.
    """
    options = options or RunOptions()
    config = options.on(config)
    pairs: list[Pair] = []
    with ExitStack() as ending:
        if not options.is_locked:
            ending.enter_context(StateLock(config.state))
        for number in range(1 + options.repeats):
            progress("prescheduled", number, 1 + options.repeats)
            loop = LoopOptions(ssd_bytes_per_s=options.ssd_bytes_per_s)
            earlier = pairs[-1].recording if number and number % 2 == 0 else None
            pairs.append(run_and_play_back(config, trace, loop, earlier))
    progress("prescheduled", 1 + options.repeats, 1 + options.repeats)
    return _cost(config, len(trace), pairs[1:])


def run_and_play_back(
    config: LineConfig, trace: Sequence[TracedArrival], options: LoopOptions, earlier: Recording | None = None
) -> Pair:
    """One pair; with the recording of an earlier run, that is played back before the run instead of its own after it.

    Raises what ``run_line`` raises.
    """
    experts, images = experts_of(trace, config.catalog), images_of(trace, config.catalog)
    box = detect(config.device)
    recorders: list[Recorder] = []
    playbacks: list[Playback] = []

    def memories(engine: Decider) -> dict[int, str]:
        return {queue.executor: box.pool_of(queue.processor) for queue in engine.statistics().queues}

    def record(engine: Decider) -> Decider:
        recorders.append(Recorder(engine, memories(engine)))
        return recorders[0]

    def play_back(engine: Decider) -> Decider:
        playbacks.append(Playback(earlier or recorders[0].recording(), memories(engine)))
        return playbacks[0]

    def played(decider: Callable[[Decider], Decider]) -> tuple[Played, str]:
        with player(config, experts, AgentOptions(loop=options, decider=decider)) as stage:
            return stage.play(trace, images), machine(stage.agent)

    if earlier is None:
        (scheduled, box_text), (played_back, _) = played(record), played(play_back)
    else:
        (played_back, box_text), (scheduled, _) = played(play_back), played(record)
    return Pair(recorders[0].recording(), scheduled, played_back, playbacks[0].differences, box_text)


def report(cost: SchedulingCost) -> str:
    """The figures in words, with the machine they come from, and whether they reach the paper's."""
    error = "" if cost.error is None else f" (pairs differ: standard error {cost.error:.2%})"
    gap, share = cost.targets
    lines = [
        f"machine       {cost.machine}",
        f"runs          policy {cost.policy}, {cost.requests} requests, means of {cost.repeats} pairs",
        f"scheduling    {cost.scheduling_s * 1e3:.3f} ms a request, of the deciding thread",
        f"inference     {cost.inference_s * 1e3:.3f} ms a request; pre-scheduled {cost.prescheduled_s * 1e3:.3f} ms",
        f"gap           {cost.gap:+.2%} of inference, {cost.seconds_gap:+.2%} of the whole trace{error}, "
        f"target under {TARGET_GAP:.0%} for both: {gap.remark}",
        f"management    {cost.management_share:.3%} of the time, target {TARGET_MANAGEMENT_SHARE:.1%}: {share.remark}",
    ]
    if cost.differences:
        lines.append(f"DIFFERENCES   {cost.differences} labels were judged unlike in the run that was played back")
    return "\n".join(lines)


def _cost(config: LineConfig, requests: int, pairs: Sequence[Pair]) -> SchedulingCost:
    inference = [busy_s(pair.scheduled) / requests for pair in pairs]
    prescheduled = [busy_s(pair.played_back) / requests for pair in pairs]
    managing = [
        sum(each.cpu_s for each in pair.scheduled.decisions if each.is_expert_management) / pair.scheduled.seconds
        for pair in pairs
    ]
    scheduling = [
        sum(each.cpu_s for each in pair.scheduled.decisions if not each.is_expert_management) / requests
        for pair in pairs
    ]
    seconds_gaps = [pair.scheduled.seconds / pair.played_back.seconds - 1 for pair in pairs]
    return SchedulingCost(
        machine=pairs[0].machine,
        policy=config.policy,
        requests=requests,
        repeats=len(pairs),
        scheduling_s=statistics.fmean(scheduling),
        inference_s=statistics.fmean(inference),
        prescheduled_s=statistics.fmean(prescheduled),
        gap=statistics.fmean(with_ / without - 1 for with_, without in zip(inference, prescheduled, strict=True)),
        seconds_gap=statistics.fmean(seconds_gaps),
        management_share=statistics.fmean(managing),
        differences=sum(pair.differences for pair in pairs),
        error=statistics.stdev(seconds_gaps) / len(pairs) ** 0.5 if len(pairs) > 1 else None,
    )


def figure_19(folder: Path, cost: SchedulingCost) -> str:
    """Cost of scheduling and expert management, on the real engine."""
    chart = folder / "figure-19.png"
    latencies = [cost.scheduling_s * 1e3, cost.inference_s * 1e3, cost.prescheduled_s * 1e3]
    groups = ["scheduling", "inference", "pre-scheduled inference"]
    labels = Labels("Average latency of one request", "ms", note=cost.machine)
    bar_chart(chart, labels, groups, {cost.policy: latencies})
    times = ("scheduling, ms", "inference, ms", "pre-scheduled, ms")
    header = ("policy", "requests", *times, "gap", "of the trace", "expert management")
    figures = (f"{value:.3f}" for value in latencies)
    gaps = (f"{cost.gap:.2%}", f"{cost.seconds_gap:.2%}")
    line = (cost.policy, str(cost.requests), *figures, *gaps, f"{cost.management_share:.3%}")
    pairs = f"means of {cost.repeats} pairs" + ("" if cost.error is None else f", standard error {cost.error:.2%}")
    return section(FIGURE_19, [chart], header, [line], f"{FIGURE_19_SAID} Here: {cost.machine}, {pairs}.")
