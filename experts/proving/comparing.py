"""Comparison of an expert's answers with known ones: image by image, the worst first, and whether the model is blind.

An image agrees if all that is known of it agrees: the label; the score of each label within SCORE; an anomaly score
within SCORE of itself, or ANOMALY. Boxes that have scores are a model's: each is found with its label, within BOX_PX or
OVERLAP, and nothing beside them. Boxes without scores are a person's, for which OVERLAP_OF_PEOPLE suffices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING

from experts.errors import ConfigError
from experts.expert import NOTHING_FOUND, Task
from experts.labels import folded
from experts.proving.answers import read_answers

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from experts.expert import BoundingBox, Expert, Prediction
    from experts.proving.answers import KnownAnswer, KnownBox

SCORE = 0.01
ANOMALY = 0.001
BOX_PX = 1.0
CORNERS = attrgetter("left", "top", "right", "bottom")
OVERLAP, OVERLAP_OF_PEOPLE = 0.9, 0.5  # intersection over union
SAME_SCORE = 1e-6  # scores nearer than that are one
LARGEST = 1.0  # of a difference: another label, or a box too many or too few
GOOD_LABELS = frozenset({"ok", "good", "pass", "normal"})


@dataclass(frozen=True, slots=True)
class Compared:
    """One image. ``label``: the known one in the expert's words. ``why``: the differences; empty where all agrees.

    ``distance``: difference of the scores, 0 to 1, and LARGEST more for another label or each box too many or too few.
    """

    known: KnownAnswer
    label: str | None
    prediction: Prediction
    why: str
    distance: float

    @property
    def agrees(self) -> bool:
        return not self.why


@dataclass(frozen=True, slots=True)
class AnswerComparison:
    """All images, in the order of the answers. ``blind``: why the expert seems not to see its images; else empty."""

    rows: tuple[Compared, ...]
    blind: str = ""

    @property
    def images(self) -> int:
        return len(self.rows)

    @property
    def agreed(self) -> int:
        return sum(row.agrees for row in self.rows)

    @property
    def is_proof(self) -> bool:
        return self.agreed == self.images and not self.blind

    @property
    def largest_difference(self) -> float:
        """Largest difference of a score, over images whose labels agree."""
        return max((row.distance for row in self.rows if row.distance < LARGEST), default=0.0)

    @property
    def distance(self) -> float:
        return sum(row.distance for row in self.rows) / max(self.images, 1)

    def count_of(self, labels: Collection[str]) -> int:
        """Images whose known label is one of these: with the labels that a route passes, the known good parts."""
        return sum(row.label in labels for row in self.rows)

    def worst(self, most: int) -> tuple[Compared, ...]:
        """Images that differ, the most different first."""
        return tuple(sorted((row for row in self.rows if not row.agrees), key=lambda row: -row.distance)[:most])


def compare(expert: Expert, known: Sequence[KnownAnswer], predictions: Sequence[Prediction]) -> AnswerComparison:
    rows = tuple(_compared(expert, *each) for each in zip(in_words_of(expert, known), predictions, strict=True))
    return AnswerComparison(rows, _blindness(expert, rows))


def in_words_of(expert: Expert, known: Sequence[KnownAnswer]) -> tuple[KnownAnswer, ...]:
    """The answers with the expert's labels for the file's, and for words that differ in case alone."""
    names = expert.names or expert.labels
    words = dict(zip(folded(names), expert.labels, strict=True)) | {label: label for label in expert.answers}

    def word(label: str) -> str:
        return words.get(label) or words.get(folded([label])[0], label)

    return tuple(
        replace(
            each,
            label=each.label and word(each.label),
            scores=tuple((word(name), score) for name, score in each.scores),
            boxes=None if each.boxes is None else tuple(replace(box, label=word(box.label)) for box in each.boxes),
        )
        for each in known
    )


def require_comparable(expert: Expert, known: Sequence[KnownAnswer], named: str) -> None:
    """Raises ConfigError for answers that say nothing of this expert, or have other labels. ``named``: their file."""
    for each in in_words_of(expert, known):
        if expert.task is Task.ANOMALY:
            if each.anomaly is None and each.score is None and (each.label is None or expert.threshold is None):
                needs = "needs `anomaly`, its score" + ("" if expert.threshold is None else ", or a label")
                raise ConfigError(f"{named}: {each.image.name}: an answer of an anomaly expert {needs}")
            continue
        names = {
            *(name for name, _ in each.scores),
            *(box.label for box in each.boxes or ()),
            each.label or NOTHING_FOUND,
        }
        unknown = sorted(names - {*expert.answers, NOTHING_FOUND})
        if unknown:
            raise ConfigError(
                f"{named}: {each.image.name} has the label {unknown[0]}, and {expert.id} has "
                f"{', '.join(expert.labels)} - write the answers in these words, or name its outputs with --labels"
            )


def answers_of(expert: Expert, components: Collection[str] = ()) -> tuple[KnownAnswer, ...]:
    """Known answers of an expert that has a ``check``. Raises ConfigError, also for those that say nothing of it."""
    assert expert.check is not None, "asked of experts with known answers"
    known = read_answers(expert.check, components, expert.labels)
    require_comparable(expert, known, str(expert.check))
    return known


def is_good(label: str, passing: str) -> bool:
    """True if a label means a good part to an anomaly expert, whose label for it is ``passing``."""
    return label == passing or label.lower() in GOOD_LABELS


def known_label(expert: Expert, known: KnownAnswer) -> str | None:
    """The known label, in the words of the expert; None: unknown."""
    if expert.task is Task.ANOMALY:
        if known.label is not None:
            return expert.labels[not is_good(known.label, expert.labels[0])]
        score = _anomaly_of(known)
        return None if score is None or expert.threshold is None else expert.labels[score >= expert.threshold]
    if known.label is not None or not known.scores:
        return known.label
    if expert.task is Task.MULTILABEL:
        least = dict(expert.thresholds)
        held = [(score, name) for name, score in known.scores if score >= least.get(name, 0.5)]
        return max(held)[1] if held else expert.otherwise
    return max(known.scores, key=lambda pair: pair[1])[0]


def _compared(expert: Expert, known: KnownAnswer, prediction: Prediction) -> Compared:
    label = known_label(expert, known)
    if expert.task is Task.ANOMALY:
        why, distance = _of_anomaly(expert, known, label, prediction)
    elif known.boxes is not None:
        why, distance = _of_boxes(expert, known.boxes, prediction.boxes)
    else:
        why, distance = _of_labels(known, label, prediction)
    return Compared(known, label, prediction, why, distance)


def _of_labels(known: KnownAnswer, label: str | None, prediction: Prediction) -> tuple[str, float]:
    by_label = dict(known.scores)
    if label is not None and known.score is not None:
        by_label.setdefault(label, known.score)
    found = {output.label: output.score for output in prediction.outputs} or {prediction.label: prediction.score}
    found.setdefault(prediction.label, prediction.score)
    if label not in {None, prediction.label}:
        # Where the model gives no score of the known label: it has at most the answer's, and at most what that leaves.
        its_score = found.get(str(label), min(prediction.score, 1 - prediction.score))
        return f"is {prediction.label} instead of {label}", LARGEST + abs(by_label.get(str(label), 1.0) - its_score)
    apart = {name: abs(score - by_label[name]) for name, score in found.items() if name in by_label}
    worst = max(apart, key=lambda name: apart[name], default="")
    far = apart.get(worst, 0.0)
    return (f"{worst} {found[worst]:.3f} instead of {by_label[worst]:.3f}" if far > SCORE else ""), far


def _of_anomaly(expert: Expert, known: KnownAnswer, label: str | None, prediction: Prediction) -> tuple[str, float]:
    assert prediction.anomaly is not None, "an anomaly expert's program measures"
    score, expected = prediction.anomaly.score, _anomaly_of(known)
    far = 0.0 if expected is None else abs(score - expected) / max(abs(expected), ANOMALY / SCORE)
    if expert.threshold is not None and label not in {None, prediction.label}:
        return f"is {prediction.label} ({score:.4g}) instead of {label}", LARGEST + min(far, 1.0)
    return (f"anomaly score {score:.4g} instead of {expected:.4g}" if far > SCORE else ""), min(far, LARGEST - SCORE)


def _anomaly_of(known: KnownAnswer) -> float | None:
    return known.score if known.anomaly is None else known.anomaly


def _of_boxes(expert: Expert, known: Sequence[KnownBox], found: Sequence[BoundingBox]) -> tuple[str, float]:
    """Pair each known box, the best first, with the found box that overlaps it most."""
    left, why, far, lacking = list(found), [], 0.0, 0
    for box in sorted(known, key=lambda each: -(each.score or 0.0)):
        if box.score is not None and box.score <= expert.confidence - SCORE:
            continue  # the expert does not count it
        same = [each for each in left if each.label == box.label and _is_same(box, each)]
        if not same:
            if box.score is None or box.score > expert.confidence + SCORE:
                lacking += 1
                why.append(f"no {box.label} at {box.left:.0f}, {box.top:.0f}")
            continue
        nearest = max(same, key=lambda each: overlap(box, each))
        left.remove(nearest)
        apart = 0.0 if box.score is None else abs(nearest.score - box.score)
        far = max(far, apart)
        if apart > SCORE:
            why.append(f"{box.label} {nearest.score:.3f} instead of {box.score:.3f}")
    beside = [each for each in left if each.score > expert.confidence + SCORE]
    why += [f"also {each.label} {each.score:.2f} at {each.left:.0f}, {each.top:.0f}" for each in beside]
    return "; ".join(why), LARGEST * (lacking + len(beside)) + min(far, LARGEST - SCORE)


def _is_same(known: KnownBox, found: BoundingBox) -> bool:
    if known.score is None:
        return overlap(known, found) >= OVERLAP_OF_PEOPLE
    sides = (known.left - found.left, known.top - found.top, known.right - found.right, known.bottom - found.bottom)
    return max(map(abs, sides)) <= BOX_PX or overlap(known, found) >= OVERLAP


def overlap(one: KnownBox | BoundingBox, other: KnownBox | BoundingBox) -> float:
    """Intersection over union; 1 for two boxes of equal corners and no area."""
    width = min(one.right, other.right) - max(one.left, other.left)
    height = min(one.bottom, other.bottom) - max(one.top, other.top)
    common = max(width, 0.0) * max(height, 0.0)
    areas = sum((each.right - each.left) * (each.bottom - each.top) for each in (one, other))
    return common / (areas - common) if areas > common else float(CORNERS(one) == CORNERS(other))


def _blindness(expert: Expert, rows: Sequence[Compared]) -> str:
    """Describe answers that do not depend on the image; "" for others, and where all agree with known scores."""
    predictions = [row.prediction for row in rows]
    is_detector = expert.task is None and any(
        row.known.boxes is not None or row.prediction.boxes or row.prediction.label == NOTHING_FOUND for row in rows
    )
    if is_detector and not any(each.boxes for each in predictions):
        if seen := sum(row.known.finds_something for row in rows):
            return f"it finds nothing on any of {len(rows)} images, and on {seen} of them something is known to be"
        return f"nothing is known to be on any of {len(rows)} images: give also images with something to find"
    is_known = all(row.agrees and (row.known.score is not None or row.known.anomaly is not None) for row in rows)
    if len(rows) < 2 or is_known or not _are_equal(predictions):
        return ""
    first = predictions[0]
    score = first.score if first.anomaly is None else first.anomaly.score
    return f"its answer is the same on all of {len(rows)} images: {first.label} {score:.4g}"


def _are_equal(predictions: Sequence[Prediction]) -> bool:
    numbers = [_numbers(each) for each in predictions]
    return all(
        one[0] == numbers[0][0]
        and len(one[1]) == len(numbers[0][1])
        and all(abs(a - b) < SAME_SCORE for a, b in zip(one[1], numbers[0][1], strict=True))
        for one in numbers
    )


def _numbers(prediction: Prediction) -> tuple[str, tuple[float, ...]]:
    if prediction.anomaly is not None:
        return "", (prediction.anomaly.score,)
    boxes = [value for box in prediction.boxes for value in (box.score, box.left, box.top, box.right, box.bottom)]
    return prediction.label, (prediction.score, *(output.score for output in prediction.outputs), *boxes)
