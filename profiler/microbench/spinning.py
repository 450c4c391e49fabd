"""How long OpenMP's threads should wait between operators on this box: measured, and chosen only where it wins clearly.

Guarantees: every setting is tried in a process of its own, for it is read once, when the library loads; settings take
turns, so that what a box does meanwhile to one it does to the others; another setting than the library's own is chosen
only if it was faster in every one of ROUNDS turns, in the mean by LEAST_GAIN and by SURE_ERRORS standard errors of that
mean, over a batch of one and the maximum batch, and neither of the two lost more than MOST_LOSS. Where the first turn
shows no such gain there is no other. What is run is the line's most used kind of those that torch executes on the CPU:
elsewhere nobody waits so.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from agent.config import environment_with
from agent.device_profile.openmp import DEFAULT, SPINNING, VARIABLES
from agent.device_profile.records import SpinTimes
from agent.runtime.expert_copy import by_kind
from experts.backends import GRAPH_FAMILIES, family
from experts.errors import CoServeError
from experts.expert import Precision

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from agent.device_profile.records import KindProfile
    from agent.runtime.expert_copy import ExpertCopy

ROUNDS = 4
LEAST_GAIN = 0.05
SURE_ERRORS = 3.0
MOST_LOSS = 0.02
TRIAL_LIMIT_S = 180.0  # of one process; torch alone takes seconds to load


@dataclass(frozen=True, slots=True)
class SpinTrial:
    """One process: the seconds of a batch of one, and of the maximum batch."""

    one_s: float
    largest_s: float

    def against(self, other: SpinTrial) -> float:
        """Its times as a part of another's: below 1 where it is faster."""
        return math.sqrt(self.one_s / other.one_s * self.largest_s / other.largest_s)


def measure_spinning(
    run: Callable[[str], SpinTrial],
    settings: Sequence[str] = tuple(SPINNING),
    rounds: int = ROUNDS,
    may_go_on: Callable[[], bool] = lambda: True,
) -> tuple[SpinTimes, ...]:
    """Times of all settings, one of them chosen. ``run``: one process with a setting.

    Once ``may_go_on`` refuses a further round, DEFAULT is chosen, as too little is known.
    """
    trials = {setting: [run(setting)] for setting in settings}
    (default,) = trials[DEFAULT]
    promising = [each for each in settings if each != DEFAULT and trials[each][0].against(default) <= 1 - LEAST_GAIN]
    for number in range(1, rounds if promising else 1):
        if not may_go_on():
            break
        again = [DEFAULT, *promising]
        for setting in reversed(again) if number % 2 else again:
            trials[setting].append(run(setting))
    chosen = chosen_setting(trials, rounds)
    return tuple(
        SpinTimes(
            setting,
            tuple(trial.one_s for trial in listed),
            tuple(trial.largest_s for trial in listed),
            setting == chosen,
        )
        for setting, listed in trials.items()
    )


def chosen_setting(trials: Mapping[str, Sequence[SpinTrial]], rounds: int = ROUNDS) -> str:
    """The fastest of those that win clearly, by the module's rule; DEFAULT where none does."""
    default = trials[DEFAULT]
    gains: dict[str, float] = {}
    for setting, listed in trials.items():
        if setting == DEFAULT or min(len(listed), len(default)) < rounds:
            continue
        pairs = list(zip(listed, default, strict=False))
        parts = [trial.against(other) for trial, other in pairs]
        one = fmean(trial.one_s / other.one_s for trial, other in pairs)
        largest = fmean(trial.largest_s / other.largest_s for trial, other in pairs)
        wanted = max(LEAST_GAIN, SURE_ERRORS * stdev(parts) / math.sqrt(len(parts)))
        if max(parts) < 1 and fmean(parts) <= 1 - wanted and max(one, largest) <= 1 + MOST_LOSS:
            gains[setting] = fmean(parts)
    return min(gains, key=gains.__getitem__, default=DEFAULT)


def most_used(
    copies: Sequence[ExpertCopy], kinds: Sequence[KindProfile], usage: Mapping[str, float]
) -> tuple[ExpertCopy, KindProfile] | None:
    """The most used kind on the CPU, and the most used expert of it; None where none has threads that wait.

    ``copies``: as they will run there; ``usage``: of each expert.
    """
    timed = {(kind.kind, kind.precision): kind for kind in kinds if kind.processor == "cpu" and kind.threads > 1}
    able = by_kind(copy for copy in copies if _waits(copy) and (copy.kind, copy.packed.precision) in timed)
    if not able:
        return None
    alike = max(able.values(), key=lambda listed: sum(usage.get(copy.expert.id, 0.0) for copy in listed))
    copy = max(alike, key=lambda each: usage.get(each.expert.id, 0.0))
    return copy, timed[copy.kind, copy.packed.precision]


def try_setting(line: Path, copy: ExpertCopy, kind: KindProfile, setting: str) -> SpinTrial:
    """One process that runs this expert with a setting. Raises CoServeError, with what it said last, if it fails."""
    command = [
        sys.executable,
        "-m",
        "profiler.microbench.spinning_trial",
        str(line),
        copy.expert.id,
        copy.packed.precision,
    ]
    try:
        done = subprocess.run(
            [*command, str(kind.max_batch), str(kind.threads)],
            env=environment_with(SPINNING[setting], VARIABLES),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TRIAL_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CoServeError(f"a trial of {copy.expert.id} took more than {TRIAL_LIMIT_S:g} s") from error
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise CoServeError(f"a trial of {copy.expert.id} failed: {said[-1]}")
    found = json.loads(done.stdout)
    return SpinTrial(found["one_s"], found["largest_s"])


def _waits(copy: ExpertCopy) -> bool:
    by_others = copy.packed.precision == Precision.ONNXRUNTIME or family(copy.expert.architecture) in GRAPH_FAMILIES
    return not by_others and not copy.expert.takes_texts
