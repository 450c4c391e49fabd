"""Search for the input that explains known answers: which values of open keys make an expert answer as its trainer.

An entry is an expert's keys as a line file has them. The values of a key come from the sections of the line file, so
that new resamplers, fits and variants of architectures join by themselves; only numbers have a table here. A beam of
the nearest entries changes one key at a time, on few images; the best of them, and the best with another value of each
key, are then compared on all images. An entry that is far off on the first of the few is tried on no more of them, and
one that differs on the few is not compared on all.

Guarantees: another order of labels is found from the answers themselves. What explains the answers as well as the best,
and differs in a key that decides, is reported and never chosen. A search ends with its patience, and says so.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from experts.expert import ALIKE_BUT_FOR_ROUNDING, NAMED, RESAMPLERS
from experts.model_files.trainers import TRAINERS
from experts.proving.comparing import compare, overlap
from experts.sections.experts import ExpertSection
from experts.sections.inputs import FitSection, InputSection

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from experts.expert import Expert, Prediction
    from experts.proving.answers import KnownAnswer
    from experts.proving.comparing import AnswerComparison

    Entry = dict[str, Any]
    Ask = Callable[["Entry", Sequence[KnownAnswer]], "AnsweredEntry | None"]  # None: no such expert

CLOSED = frozenset(
    {"precision", "pin", "nothing_found", "normalize", "fit"}
)  # no choices of a section, or choices that decide nothing
CROPS = (1.0, 0.875, 0.9, 0.95, 0.96, 224 / 232)  # size by shorter side: torchvision's and timm's
MEANS = (  # besides NAMED: TensorFlow's and timm's Inception; OpenAI's CLIP; up to 255 as Caffe's; imagenet twice
    {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]},
    {"mean": [0.48145466, 0.4578275, 0.40821073], "std": [0.26862954, 0.26130258, 0.27577711]},
    {"mean": [0, 0, 0], "std": [1, 1, 1], "scale": 255},
    {"mean": [123.675, 116.28, 103.53], "std": [1, 1, 1], "scale": 255},
    {"mean": [0.596065, 0.558144, 0.49735], "std": [0.052441, 0.050176, 0.050625]},
)
GREYS: tuple[dict[str, Any], ...] = tuple(  # of graphs that take one channel
    {"mean": [mean] * 3, "std": [std] * 3, "scale": scale, "channels": "grey"}
    for mean, std, scale in ((0.0, 1.0, 1), (0.5, 0.5, 1), (0.0, 1.0, 255))
)
STEPS = (-1, 1)  # of a shorter side in pixels
NUMBERS = {"color": (114, 128, 255)}  # of keys that take any number
DETAILS = {"rounding": "nearest", "color": 0}  # of a cut or padded image, by default
PILLOW_DEFAULT = FitSection.model_fields["interpolation"].default
FUNCTION = "resample"  # the fit's interpolation alone, where the rest of the fit is known
APART = {"resize": ("pad", "color"), "pad": ("resize", "crop")}  # keys of a fit that a key excludes
FEW = 6  # images on which all entries are tried
GLIMPSE = 2  # of them, which show that an entry is far off
BEAM, ROUNDS = 2, 5
SEARCH_S, TRYING = 120.0, 0.6  # of a search, and the share of it for trying on few images
CLEARLY, NEGLIGIBLE = 3.0, 3e-6  # a rival is no worse up to so many times the distance, or within rounding


@dataclass(frozen=True, slots=True)
class AnsweredEntry:
    """An entry as an expert, and its answers."""

    expert: Expert
    predictions: tuple[Prediction, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    entry: Entry
    comparison: AnswerComparison

    @property
    def distance(self) -> float:
        return self.comparison.distance


@dataclass(frozen=True, slots=True)
class FoundInputs:
    """The entry that explains the answers, or None. ``rivals``: by key the best with another value of it.

    ``alike``: another that explains them as well; ``open``: keys in which it differs, and that decide.
    ``unfinished``: says what was left when time was over; else empty.
    """

    best: Candidate | None = None
    rivals: Mapping[str, Candidate] = field(default_factory=dict)
    alike: Candidate | None = None
    open: tuple[str, ...] = ()
    unfinished: str = ""


class Patience:
    """Time for searches, which share it from the first on. ``clock``: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, seconds: float = SEARCH_S) -> None:
        self._clock = clock
        self._seconds = seconds
        self._began_s: float | None = None

    def begun(self) -> Patience:
        self._began_s = self._clock() if self._began_s is None else self._began_s
        return self

    def is_over(self, share: float = 1.0) -> bool:
        return self._passed_s >= share * self._seconds

    def stopped(self, tried: int, known: int) -> str:
        return f"the search stopped after {self._passed_s:.0f} s with {tried} of at least {known} tried"

    @property
    def _passed_s(self) -> float:
        return 0.0 if self._began_s is None else self._clock() - self._began_s


def value_of(entry: Entry, key: str) -> object:
    """``fit`` is stretched where it is not there."""
    if key == FUNCTION:
        fit = entry.get("input", {}).get("fit")
        return fit.get("interpolation", PILLOW_DEFAULT) if isinstance(fit, dict) else PILLOW_DEFAULT
    found = entry.get("input", {}).get(key) if key in InputSection.model_fields else entry.get(key)
    return "stretched" if key == "fit" and found is None else found


def _meaning(entry: Entry, key: str) -> object:
    """The value, where functions that scale alike but for rounding are one, and details of no cut or pad are none."""
    value = value_of(entry, key)
    if key == FUNCTION:
        return ALIKE_BUT_FOR_ROUNDING.get(str(value), value)
    if key != "fit" or not isinstance(value, dict):
        return value
    details = set() if {"resize", "pad"} & value.keys() else DETAILS.keys()
    whole = {name: kept for name, kept in value.items() if name not in details}
    whole["interpolation"] = _meaning(entry, FUNCTION)
    return "stretched" if whole == {"interpolation": PILLOW_DEFAULT} else whole


def with_value(entry: Entry, key: str, value: object) -> Entry:
    """None, or the default fit: without the key."""
    if key == FUNCTION:
        present = entry["input"].get("fit")
        return with_value(entry, "fit", _fit(present if isinstance(present, dict) else {}, "interpolation", value))
    is_input = key in InputSection.model_fields
    keys = dict(entry["input"] if is_input else entry)
    keys.pop(key, None)
    if value is not None and (key, value) != ("fit", "stretched"):
        keys[key] = value
    return {**entry, "input": keys} if is_input else keys


def searchable_keys() -> tuple[str, ...]:
    choosing = (
        name
        for section in (ExpertSection, InputSection)
        for name, info in section.model_fields.items()
        if name not in CLOSED and _choices(info.annotation)
    )
    return ("labels", "normalize", "fit", *choosing)


def telling_first(known: Sequence[KnownAnswer], first: AnswerComparison) -> list[KnownAnswer]:
    """Images of every label by turns, those first on which the answers differ most."""
    seen: Counter[str | None] = Counter()
    turns: list[tuple[int, int, KnownAnswer]] = []
    pairs = zip(first.rows, known, strict=True) if first.rows else ()
    for row, each in sorted(pairs, key=lambda pair: -pair[0].distance):
        turns.append((seen[row.label], len(turns), each))
        seen[row.label] += 1
    return [each for _, _, each in sorted(turns, key=lambda turn: turn[:2])] or list(known)


def explain(
    start: Entry,
    keys: Collection[str],
    asked: Collection[str],
    known: Sequence[KnownAnswer],
    ask: Ask,
    patience: Patience | None = None,
) -> FoundInputs:
    """Search from an entry by changing ``keys``. ``asked``: keys without a default, which the answers must decide.
    ``known``: known answers, the most telling first. Once ``patience`` ends, the best one alone is compared with all
    answers."""
    patience = (patience or Patience()).begun()
    few, tried = known[:FEW], dict[str, Candidate | None]()
    waiting: dict[str, Entry] = {}
    beam, expanded, recipes = [start], set[str](), [*_recipes(start, keys)]
    for _ in range(ROUNDS):
        around = (entry for each in beam for entry in (each, *_neighbours(each, keys)))
        waiting = {text: entry for entry in (*recipes, *around) if (text := _text(entry)) not in tried}
        expanded |= {_text(entry) for entry in beam}
        while waiting and not patience.is_over(TRYING):
            worst, best = (
                _worst_kept(tried.values()),
                min((each.distance for each in tried.values() if each), default=1),
            )
            text = next(iter(waiting))
            entry = waiting.pop(text)
            found = tried[text] = _unless_far(entry, keys, few, ask, worst)
            if found is not None and found.comparison.agreed == len(few) and found.distance < best:
                rivals = {_text(each): each for each in _neighbours(entry, keys)}
                waiting = {each: rivals[each] for each in rivals if each not in tried} | waiting  # these first
        ranked = sorted(
            filter(None, tried.values()), key=lambda each: (each.distance, _changes(start, each.entry, keys))
        )
        beam = [each.entry for each in ranked[:BEAM]]
        if waiting or not ranked or (_text(beam[0]) in expanded and ranked[0].comparison.agreed == len(few)):
            break
    decided = _decided(start, keys, asked, _on_all(ranked, keys, known, ask, patience), len(known))
    if not waiting and not patience.is_over():
        return decided
    return replace(decided, unfinished=patience.stopped(len(tried), len(tried) + len(waiting)))


def _on_all(
    ranked: Sequence[Candidate], keys: Collection[str], known: Sequence[KnownAnswer], ask: Ask, patience: Patience
) -> list[Candidate]:
    """The best, and the best with another value of each key; compared with all answers where they agree so far."""
    chosen = {_text(each.entry): each for each in ranked[:BEAM]}
    for key in keys:
        others = [each for each in ranked if value_of(each.entry, key) != value_of(ranked[0].entry, key)]
        worse = [each for each in others if each.distance > _limit(ranked[:1])]
        chosen |= {_text(each.entry): each for each in (*others[:1], *worse[:1])}
    compared: dict[str, Candidate | None] = {}
    for text, each in chosen.items():
        if each.comparison.agreed == each.comparison.images and not (compared and patience.is_over()):
            compared[text] = _candidate(each.entry, keys, known, ask)
    return [each for each in (chosen | compared).values() if each is not None]


def _unless_far(
    entry: Entry, keys: Collection[str], known: Sequence[KnownAnswer], ask: Ask, most: float
) -> Candidate | None:
    """Compared on the first images alone where they show that its distance is above ``most``."""
    glimpse = _candidate(entry, keys, known[:GLIMPSE], ask)
    is_near = glimpse is not None and glimpse.distance * glimpse.comparison.images <= most * len(known)
    return _candidate(entry, keys, known, ask) if is_near and len(known) > GLIMPSE else glimpse


def _worst_kept(tried: Collection[Candidate | None]) -> float:
    """Distance above which an entry is neither in the beam nor explains the answers as well as the best."""
    ranked = sorted((each for each in tried if each is not None), key=lambda each: each.distance)
    return max(ranked[BEAM - 1].distance, _limit(ranked[:1])) if len(ranked) >= BEAM else math.inf


def assumed(entry: Entry, known: Sequence[KnownAnswer], ask: Ask, patience: Patience) -> dict[str, list[Any]]:
    """Details that a cut or padded image has by default: by key the other values that change the model's answers, and
    agree with the known ones as well."""
    fit, own = value_of(entry, "fit"), _candidate(entry, (), known, ask)
    if not isinstance(fit, dict) or not {"resize", "pad"} & fit.keys() or own is None:
        return {}

    def is_alike(name: str, value: object) -> bool:
        other = _unless_far(with_value(entry, "fit", {**fit, name: value}), (), known, ask, _limit([own]))
        answers = None if other is None else [row.prediction for row in other.comparison.rows]
        is_other = answers != [row.prediction for row in own.comparison.rows]
        return other is not None and is_other and other.comparison.is_proof and other.distance <= _limit([own])

    patience.begun()
    values = {name: [each for each in _of_fit(name) if each not in {None, DETAILS[name]}] for name in DETAILS}
    others = {name: values[name] for name in values if name not in fit and (name != "color" or "pad" in fit)}
    alike = {name: [each for each in others[name] if patience.is_over() or is_alike(name, each)] for name in others}
    return {name: found for name, found in alike.items() if found}


def _decided(
    start: Entry, keys: Collection[str], asked: Collection[str], whole: Sequence[Candidate], count: int
) -> FoundInputs:
    """``count``: number of all images; an entry compared on fewer is not chosen, and may be a rival."""
    explaining = [each for each in whole if each.comparison.is_proof]
    compared = [each for each in explaining if each.comparison.images == count]
    if not compared:
        return FoundInputs()
    near = [each for each in explaining if each.distance <= _limit(compared)]
    best = min(
        (each for each in near if each in compared),
        key=lambda each: (_changes(start, each.entry, keys), round(each.distance, 6), len(_text(each.entry))),
    )
    rivals = {}
    for key in keys:
        others = [each for each in whole if value_of(each.entry, key) != value_of(best.entry, key)]
        if others:
            rivals[key] = max(others, key=lambda each: (each not in near, each.comparison.agreed, -each.distance))
    for other in (each for each in near if each is not best):
        apart = [key for key in keys if _meaning(other.entry, key) != _meaning(best.entry, key)]
        decisive = [key for key in apart if _is_rival(key, start, best.entry, other.entry, key in asked)]
        if decisive:
            return FoundInputs(best, rivals, other, tuple(decisive))
    return FoundInputs(best, rivals)


def _limit(candidates: Sequence[Candidate]) -> float:
    """Distance up to which another explains the answers as well."""
    return CLEARLY * min(each.distance for each in candidates) + NEGLIGIBLE


def _is_rival(key: str, start: Entry, best: Entry, other: Entry, is_asked: bool) -> bool:
    """False where the best keeps a value that needs no answer, or the other one only adds to its keys: of an asked one,
    details that have a default."""
    own, another = value_of(best, key), value_of(other, key)
    if isinstance(own, dict) and isinstance(another, dict) and own.items() <= another.items():
        return is_asked and not another.keys() - own.keys() <= DETAILS.keys()
    return is_asked or own != value_of(start, key)


def _candidate(entry: Entry, keys: Collection[str], known: Sequence[KnownAnswer], ask: Ask) -> Candidate | None:
    asked = ask(entry, known)
    if asked is None:
        return None
    found = Candidate(entry, compare(asked.expert, known, asked.predictions))
    order = _order(asked, known) if "labels" in keys and isinstance(entry.get("labels"), list) else None
    if order is None:
        return found
    predictions = [_relabelled(each, order) for each in asked.predictions]
    labels = [order[label] for label in asked.expert.labels]
    expert = replace(asked.expert, labels=tuple(labels))
    other = Candidate({**entry, "labels": labels}, compare(expert, known, predictions))
    return min(found, other, key=lambda each: each.distance)


def _order(asked: AnsweredEntry, known: Sequence[KnownAnswer]) -> dict[str, str] | None:
    """New label by label, if the answers show another order of labels; else None."""
    votes: Counter[tuple[str, str]] = Counter()
    for answer, prediction in zip(known, asked.predictions, strict=True):
        votes.update(_votes(answer, prediction))
    order: dict[str, str] = {}
    for (own, label), _ in votes.most_common():
        if own not in order and label not in order.values() and label in asked.expert.labels:
            order[own] = label
    left = [label for label in asked.expert.labels if label not in order.values()]
    for own in (label for label in asked.expert.labels if label not in order):
        order[own] = own if own in left else left[0]
        left.remove(order[own])
    is_other = any(own != label for own, label in order.items())
    return order if is_other and set(order) == {*asked.expert.labels} else None


def _votes(answer: KnownAnswer, prediction: Prediction) -> Iterator[tuple[str, str]]:
    if answer.boxes is not None:
        yield from (
            (box.label, each.label) for box in prediction.boxes for each in answer.boxes if overlap(each, box) > 0.5
        )
    elif answer.scores and len(answer.scores) == len(prediction.outputs):
        found = sorted(prediction.outputs, key=lambda output: output.score)
        expected = sorted(answer.scores, key=lambda pair: pair[1])
        yield from ((output.label, name) for output, (name, _) in zip(found, expected, strict=True))
    elif label := answer.label or max(answer.scores, key=lambda pair: pair[1], default=("", 0.0))[0]:
        yield prediction.label, label


def _relabelled(prediction: Prediction, order: dict[str, str]) -> Prediction:
    return replace(
        prediction,
        label=order.get(prediction.label, prediction.label),
        boxes=tuple(replace(box, label=order[box.label]) for box in prediction.boxes),
        outputs=tuple(replace(output, label=order[output.label]) for output in prediction.outputs),
    )


def _recipes(start: Entry, keys: Collection[str]) -> Iterator[Entry]:
    """The entry with several keys at once, as a known trainer has them by default."""
    for trainer in TRAINERS.values():
        entry = start
        if trainer.normalize is not None and "normalize" in keys and not _is_grey(start):
            entry = with_value(
                entry, "normalize", trainer.normalize if isinstance(trainer.normalize, str) else dict(trainer.normalize)
            )
        if "fit" in keys:
            cut = {"resize": min(start["input"]["size"])} if trainer.fit == "cut" else {}
            fit = dict(trainer.fit) if isinstance(trainer.fit, Mapping) else cut
            entry = with_value(entry, "fit", _fit(fit, "interpolation", trainer.resample or PILLOW_DEFAULT))
        yield entry


def _neighbours(entry: Entry, keys: Collection[str]) -> Iterator[Entry]:
    """Entries that differ in one key."""
    for key in keys:
        for value in _values(entry, key):
            if value != value_of(entry, key):
                yield with_value(entry, key, value)


def _values(entry: Entry, key: str) -> Iterator[Any]:
    if key == "labels":
        return
    if key == "normalize":
        yield from GREYS if _is_grey(entry) else _normalizations()
    elif key == FUNCTION:
        yield from RESAMPLERS
    elif key == "fit":
        yield from _fits(entry)
    else:
        section = InputSection if key in InputSection.model_fields else ExpertSection
        yield from _choices(section.model_fields[key].annotation)


def _is_grey(entry: Entry) -> bool:
    present = value_of(entry, "normalize")
    return isinstance(present, dict) and present.get("channels") == "grey"


def _normalizations() -> Iterator[Any]:
    for name, known in NAMED.items():
        yield name
        yield from ({"mean": [*known.mean], "std": [*known.std], "channels": each} for each in ("bgr", "grey"))
    for numbers in MEANS:
        yield numbers
        yield {**numbers, "channels": "bgr"}


def _fits(entry: Entry) -> Iterator[Any]:
    """Stretched; cut from a scaled image; and the present one with another choice of each of its keys."""
    present = entry["input"].get("fit")
    if not isinstance(present, dict):  # a detector's own fit, and OpenCV's code, scale so
        yield from (_fit({"interpolation": "opencv-linear"}, "pad", at) for at in ("center", "top-left"))
    present = present if isinstance(present, dict) else {}
    yield "stretched"
    for share in CROPS:
        yield _fit(present, "resize", math.floor(min(entry["input"]["size"]) / share + 1e-6))
    if isinstance(near := present.get("resize"), int):
        yield from (_fit(present, "resize", near + step) for step in STEPS)
    for name in FitSection.model_fields:
        yield from (_fit(present, name, value) for value in _of_fit(name))


def _of_fit(name: str) -> list[Any]:
    return [*_choices(FitSection.model_fields[name].annotation), *NUMBERS.get(name, ())]


def _fit(present: dict[str, Any], name: str, value: object) -> object:
    """The fit with another value, without keys that exclude it or that are defaults."""
    keys = {key: kept for key, kept in present.items() if key not in APART.get(name, ())} | {name: value}
    keys = {key: kept for key, kept in keys.items() if kept != FitSection.model_fields[key].default}
    return keys or "stretched"


def _choices(annotation: Any) -> list[Any]:  # noqa: ANN401  # a type expression
    """Values of a type that has few; None is one where it stands for a default."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _choices(get_args(annotation)[0])
    if origin in {Union, UnionType}:
        found = [value for each in get_args(annotation) if each is not NoneType for value in _choices(each)]
        return [None, *found] if found and NoneType in get_args(annotation) else found
    if origin is Literal:
        return list(get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return [each.value for each in annotation]
    return [False, True] if annotation is bool else []


def _changes(start: Entry, entry: Entry, keys: Collection[str]) -> int:
    return sum(value_of(entry, key) != value_of(start, key) for key in keys)


def _text(entry: Entry) -> str:
    return json.dumps(entry, sort_keys=True, default=str)
