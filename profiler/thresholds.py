"""Scores that an anomaly expert gives samples, and the chart of false alarms and catches by threshold.

Guarantees: every sample is scored as by the agent; an unreadable one is skipped and reported. The line is
not written, and its agent may run meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from agent.commands.rejudging.archive import GONE, ArchivedImage, archived_image, pixels_of
from agent.records.station.reviews import ReviewQuery
from agent.records.truth.reviewed import reviewed_results, right_answer_of
from experts.errors import ConfigError, ImageError
from experts.expert import Task, Verdict
from experts.images import decode_image
from experts.proving.answers import read_answers
from experts.proving.comparing import is_good
from experts.thresholds.learning import Meter, rates_at
from profiler.charts import Labels, Series, line_chart
from profiler.workload.samples import Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np

    from agent.config import LineConfig
    from agent.runtime.images.sources import Frame
    from experts.expert import Expert
    from experts.thresholds.learning import Learned

GOOD, BAD = "good", "bad"
REVIEWS = "reviews"  # in place of a folder; a folder of this name is ./reviews
OK_LABEL = "ok"  # of labelled crops: a good part
MOST_POINTS = 60  # of a curve: with more, its markers overlap


@dataclass(frozen=True, slots=True)
class LabelledSamples:
    """Images of parts known to be good or bad. ``left_out``: skipped files, with the reason."""

    good: tuple[Sample | ArchivedImage, ...]
    bad: tuple[Sample | ArchivedImage, ...]
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores by the sample's path, of a part with its box. ``left_out`` as in LabelledSamples."""

    good: Mapping[str, float]
    bad: Mapping[str, float] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


def anomaly_expert(config: LineConfig, name: str) -> Expert:
    """Expert of a line that has or needs a threshold. Raises ConfigError for any other."""
    expert = config.catalog.experts.get(name)
    measuring = sorted(each.id for each in config.catalog.experts.values() if each.task is Task.ANOMALY)
    if expert is None or expert.task is not Task.ANOMALY:
        reason = "no expert of this line" if expert is None else "no anomaly expert, and decides without a threshold"
        raise ConfigError(f"{name} is {reason} - name one of `task: anomaly`: {', '.join(measuring) or 'none yet'}")
    return expert


def labelled_samples(config: LineConfig, expert: Expert, source: str) -> LabelledSamples:
    """The samples of a folder or file as experts.proving.answers reads them, without those of components that the
    expert is not asked about; or REVIEWS, the images that the expert judged and people reviewed.

    Raises ConfigError where no good one is among them.
    """
    found = _reviewed(config, expert) if source == REVIEWS else _known(config, expert, Path(source))
    if not found.good:
        example = "".join(f"; {each}" for each in found.left_out[:1])
        raise ConfigError(
            f"{source} holds no good sample for {expert.id}: a threshold is learned above the scores of good parts - "
            f"name a folder that holds {GOOD}/ and {BAD}/, or <component>/{OK_LABEL}/ and <component>/<defect>/, a "
            f"table of file and label, or {REVIEWS} once people reviewed good parts{example}"
        )
    return found


def measured(expert: Expert, samples: LabelledSamples, progress: Callable[[str, int, int], None]) -> Scores:
    """Score of each sample. Raises ConfigError if no good one is readable, OutputInvalid, and as packing does."""
    meter = Meter(expert)
    scores: dict[str, dict[str, float]] = {GOOD: {}, BAD: {}}
    left_out = list(samples.left_out)
    frames: dict[str, Frame] = {}
    listed = [(GOOD, sample) for sample in samples.good] + [(BAD, sample) for sample in samples.bad]
    for number, (kind, sample) in enumerate(listed, start=1):
        try:
            part = sample.subject.box if isinstance(sample, ArchivedImage) else None
            scores[kind][str(sample.path) if part is None else f"{sample.path} {list(part)}"] = meter.score(
                _image(sample, expert, frames)
            )
        except ImageError as error:
            left_out.append(str(error))
        progress("score samples", number, len(listed))
    if not scores[GOOD]:
        raise ConfigError(f"none of {len(samples.good)} good samples can be read: {left_out[0]}")
    return Scores(scores[GOOD], scores[BAD], tuple(left_out))


def _image(sample: Sample | ArchivedImage, expert: Expert, frames: dict[str, Frame]) -> np.ndarray:
    """Pixels as the expert gets them. ``frames``: pixels of the image that was cut last."""
    if isinstance(sample, Sample):
        image = decode_image(sample.path, str(sample.path), sample.max_pixels)
    else:
        image = pixels_of(sample, frames)
    return image.seen_by(expert)


def _reviewed(config: LineConfig, expert: Expert) -> LabelledSamples:
    samples: dict[Verdict | None, list[ArchivedImage]] = {Verdict.OK: [], Verdict.NG: [], None: []}
    left_out = []
    reviewed = reviewed_results(config, ReviewQuery(expert=expert.id))
    for each in sorted(reviewed, key=lambda each: each.result.subject.key):  # parts of a frame in a row
        image = archived_image(config, each.result)
        if image is None:
            left_out.append(f"{each.result.subject.name}: {GONE}")
        else:
            samples[right_answer_of(config, each, expert.id)].append(image)
    return LabelledSamples(tuple(samples[Verdict.OK]), tuple(samples[Verdict.NG]), tuple(left_out))


def _known(config: LineConfig, expert: Expert, source: Path) -> LabelledSamples:
    routes = config.catalog.components
    asked = {component for component in routes if any(step.expert == expert.id for step in routes[component])}
    samples: dict[str, list[Sample]] = {GOOD: [], BAD: []}
    for known in read_answers(source, routes, expert.labels):
        if known.label is not None and known.component in {None, *asked}:
            kind = GOOD if is_good(known.label, expert.labels[0]) else BAD
            samples[kind].append(Sample(known.image, known.component or "", known.label, str(source)))
    return LabelledSamples(tuple(samples[GOOD]), tuple(samples[BAD]))


def draw_curve(path: Path, expert: str, good: Sequence[float], bad: Sequence[float], learned: Learned) -> None:
    """False alarms and what is caught, in percent, over the thresholds between the lowest score and the highest."""
    scores = sorted({*good, *bad, learned.rates.threshold})
    steps = min(MOST_POINTS, len(scores))
    chosen = [scores[round(number * (len(scores) - 1) / max(steps - 1, 1))] for number in range(steps)]
    rates = [rates_at(threshold, good, bad) for threshold in chosen]
    series = [Series(f"false alarms, of {len(good)} good", chosen, [100 * each.false_alarms for each in rates])]
    if bad:
        series.append(Series(f"caught, of {len(bad)} bad", chosen, [100 * (each.caught or 0.0) for each in rates]))
    at = learned.rates.threshold
    series.append(Series(f"threshold {at:g}", [at, at], [0.0, 100.0], kind="dashed"))
    line_chart(path, Labels(f"{expert}: what a threshold does to the samples", "% of samples", "threshold"), series)
