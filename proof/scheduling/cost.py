"""Cost of scheduling: a recorded run against the same batches and loads played back without any scheduling.

Section 5.3 of the CoServe paper schedules requests offline and performs inference directly; its Figure 19 sets the
latency of scheduling a request beside that of its inference with and without scheduling. Here the effects of a real run
are recorded; a ``Playback`` then stands in the Engine's place and releases each as soon as its needs are met.
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
from profiler.bench.measured import Column, Measured
from profiler.bench.policy_runs import RunOptions, machine
from profiler.bench.rows import busy_s
from profiler.replay.images import experts_of, images_of
from profiler.replay.player import player
from profiler.targets import Target, at_most
from proof.scheduling.playback import Playback, PlayedRecording, Recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agent.config import LineConfig
    from agent.runtime.loop import Decider
    from profiler.replay.player import Played, Progress
    from profiler.workload.traces import TracedArrival

TARGET_GAP = 0.03
TARGET_MANAGEMENT_SHARE = 0.002
COLUMNS = (
    Column("policy", "policy"),
    Column("requests", "requests", "d"),
    Column("scheduling ms", "scheduling_s", ".3f", 1e3),
    Column("inference ms", "inference_s", ".3f", 1e3),
    Column("pre-scheduled ms", "prescheduled_s", ".3f", 1e3),
    Column("gap", "gap", "+.2%"),
    Column("of the trace", "seconds_gap", "+.2%"),
    Column("expert management", "management_share", ".3%"),
)


@dataclass(frozen=True, slots=True)
class SchedulingCost:
    """Figure 19, and the share of expert management: means over pairs of a run and its playback, in seconds.

    ``scheduling_s``, ``inference_s``, ``prescheduled_s``: of one request. Scheduling is the deciding thread's processor
    time, inference the executors' busy time. ``gap``: inference over inference without scheduling, less one;
    ``seconds_gap``: the same of the whole trace. ``management_share``: of the trace's time. ``differences``: labels
    unlike the recorded ones. ``error``: the standard error of ``seconds_gap``; None for a single pair.
    """

    policy: str
    requests: int
    repeats: int
    scheduling_s: float
    inference_s: float
    prescheduled_s: float
    gap: float
    seconds_gap: float
    management_share: float
    differences: int
    error: float | None

    @property
    def targets(self) -> tuple[Target, Target]:
        """The paper's figures. The larger gap counts: an executor that waits for a decision is not busy."""
        gap = max(self.gap, self.seconds_gap)
        what, wanted = "scheduling, against pre-scheduled requests", f"at most {TARGET_GAP:.1%}"
        share = at_most("expert management, of the time", self.management_share, TARGET_MANAGEMENT_SHARE)
        return Target(what, wanted, f"{gap:.2%}", gap < TARGET_GAP), share

    def measured(self, box: str) -> Measured:
        error = "" if self.error is None else f"; pairs differ: standard error {self.error:.2%} of the trace"
        notes = [f"means of {self.repeats} pairs of a run and its playback{error}"]
        if self.differences:
            notes.append(f"DIFFERENCES: {self.differences} labels were judged unlike in the run that was played back")
        return Measured(box, COLUMNS, (self,), self.targets, tuple(notes))


@dataclass(frozen=True, slots=True)
class PlayedPair:
    recording: PlayedRecording
    scheduled: Played
    played_back: Played
    differences: int
    machine: str


def measure_scheduling(
    config: LineConfig,
    trace: Sequence[TracedArrival],
    options: RunOptions | None = None,
    progress: Progress = lambda *_: None,
) -> Measured:
    """Run and play back a trace ``repeats`` times, after one pair that counts for nothing.

    In every second pair the playback, of the run before, goes first: a machine that slows down touches both alike.

    Raises what ``run_line`` raises, and ConfigError for a run in which something fails.
    """
    options = options or RunOptions()
    config = options.on(config)
    pairs: list[PlayedPair] = []
    with ExitStack() as ending:
        if not options.is_locked:
            ending.enter_context(StateLock(config.state))
        for number in range(1 + options.repeats):
            progress("prescheduled", number, 1 + options.repeats)
            loop = LoopOptions(ssd_bytes_per_s=options.ssd_bytes_per_s)
            earlier = pairs[-1].recording if number and number % 2 == 0 else None
            pairs.append(run_and_play_back(config, trace, loop, earlier))
    progress("prescheduled", 1 + options.repeats, 1 + options.repeats)
    return _cost(config.policy, len(trace), pairs[1:]).measured(pairs[0].machine)


def run_and_play_back(
    config: LineConfig, trace: Sequence[TracedArrival], options: LoopOptions, earlier: PlayedRecording | None = None
) -> PlayedPair:
    """One pair; the recording of an ``earlier`` run is played back before the run instead of its own after it.

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
    return PlayedPair(recorders[0].recording(), scheduled, played_back, playbacks[0].differences, box_text)


def _cost(policy: str, requests: int, pairs: Sequence[PlayedPair]) -> SchedulingCost:
    def mean_cpu_s(is_management: bool) -> list[float]:
        return [
            sum(each.cpu_s for each in pair.scheduled.decisions if each.is_expert_management is is_management)
            for pair in pairs
        ]

    inference = [busy_s(pair.scheduled) / requests for pair in pairs]
    prescheduled = [busy_s(pair.played_back) / requests for pair in pairs]
    gaps = [pair.scheduled.seconds / pair.played_back.seconds - 1 for pair in pairs]
    shares = (cpu_s / pair.scheduled.seconds for cpu_s, pair in zip(mean_cpu_s(True), pairs, strict=True))
    return SchedulingCost(
        policy=policy,
        requests=requests,
        repeats=len(pairs),
        scheduling_s=statistics.fmean(mean_cpu_s(False)) / requests,
        inference_s=statistics.fmean(inference),
        prescheduled_s=statistics.fmean(prescheduled),
        gap=statistics.fmean(with_ / without - 1 for with_, without in zip(inference, prescheduled, strict=True)),
        seconds_gap=statistics.fmean(gaps),
        management_share=statistics.fmean(shares),
        differences=sum(pair.differences for pair in pairs),
        error=statistics.stdev(gaps) / len(pairs) ** 0.5 if len(pairs) > 1 else None,
    )
