"""Search for the input that explains known answers: which values of open keys make an expert answer as its trainer.

An entry is an expert's keys as a line file has them. The values of a key come from the sections of the line file, so
that new resamplers, fits and variants of architectures join by themselves; only numbers have a table here. A beam of
the nearest entries changes one key at a time, on few images; the best of them, and the best with another value of each
key, are then compared on all images.

Guarantees: another order of labels is found from the answers themselves. What explains the answers as well as the best,
and differs in a key that decides, is told and never chosen.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from experts.catalog import ExpertSection, FitSection, InputSection
from experts.expert import ALIKE_BUT_FOR_ROUNDING, NAMED, RESAMPLERS
from experts.model_files.trainers import TRAINERS
from experts.proving.comparing import compare, overlap

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
MEANS = (  # besides NAMED: TensorFlow's and timm's Inception; OpenAI's CLIP; of pixels up to 255 as Caffe's
    {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]},
    {"mean": [0.48145466, 0.4578275, 0.40821073], "std": [0.26862954, 0.26130258, 0.27577711]},
    {"mean": [0, 0, 0], "std": [1, 1, 1], "scale": 255},
    {"mean": [123.675, 116.28, 103.53], "std": [1, 1, 1], "scale": 255},
)
GREYS: tuple[dict[str, Any], ...] = tuple(  # of graphs that take one channel
    {"mean": [mean] * 3, "std": [std] * 3, "scale": scale, "channels": "grey"}
    for mean, std, scale in ((0.0, 1.0, 1), (0.5, 0.5, 1), (0.0, 1.0, 255))
)
STEPS = (-1, 1)  # of a shorter side in pixels
NUMBERS = {"color": (114, 128, 255)}  # of keys that take any number
DETAILS = {"rounding", "color"}  # of a fit, with a default
PILLOW_DEFAULT = FitSection.model_fields["interpolation"].default
FUNCTION = "resample"  # the fit's interpolation alone, where the rest of the fit is known
APART = {"resize": ("pad", "color"), "pad": ("resize", "crop")}  # keys of a fit that a key excludes
FEW = 6  # images on which all entries are tried
BEAM, ROUNDS, MOST_TRIED = 2, 5, 300
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
    """

    best: Candidate | None = None
    rivals: Mapping[str, Candidate] = field(default_factory=dict)
    alike: Candidate | None = None
    open: tuple[str, ...] = ()


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
    details = set() if {"resize", "pad"} & value.keys() else DETAILS
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


def explain(
    start: Entry, keys: Collection[str], asked: Collection[str], known: Sequence[KnownAnswer], ask: Ask
) -> FoundInputs:
    """Search from an entry by changing ``keys``. ``asked``: those without a default, which the answers must decide."""
    few = _few(start, known, ask)
    tried: dict[str, Candidate] = {}
    beam, expanded, recipes = [start], set[str](), [*_recipes(start, keys)]
    for _ in range(ROUNDS):
        around = [entry for each in beam for entry in (each, *_neighbours(each, keys))]
        new = [entry for entry in (*recipes, *around) if _text(entry) not in tried]
        expanded |= {_text(entry) for entry in beam}
        for entry in {_text(entry): entry for entry in new}.values():
            if len(tried) < MOST_TRIED and (candidate := _candidate(entry, keys, few, ask)) is not None:
                tried[_text(entry)] = candidate
        ranked = sorted(tried.values(), key=lambda each: (each.distance, _changes(start, each.entry, keys)))
        beam = [each.entry for each in ranked[:BEAM]]
        if not ranked or (_text(beam[0]) in expanded and ranked[0].comparison.agreed == len(few)):
            break
    chosen = {_text(each.entry): each.entry for each in ranked[:BEAM]}
    for key in keys:
        others = [each for each in ranked if value_of(each.entry, key) != value_of(beam[0], key)]
        worse = [each for each in others if each.distance > _limit(ranked[:1])]
        chosen |= {_text(each.entry): each.entry for each in (*others[:1], *worse[:1])}
    whole = [_candidate(entry, keys, known, ask) for entry in chosen.values()]
    return _decided(start, keys, asked, [each for each in whole if each is not None])


def _decided(start: Entry, keys: Collection[str], asked: Collection[str], whole: Sequence[Candidate]) -> FoundInputs:
    explaining = [each for each in whole if each.comparison.is_proof]
    if not explaining:
        return FoundInputs()
    near = [each for each in explaining if each.distance <= _limit(explaining)]
    best = min(
        near, key=lambda each: (_changes(start, each.entry, keys), round(each.distance, 6), len(_text(each.entry)))
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
        return is_asked and not another.keys() - own.keys() <= DETAILS
    return is_asked or own != value_of(start, key)


def _few(start: Entry, known: Sequence[KnownAnswer], ask: Ask) -> list[KnownAnswer]:
    """Images of every label, those first on which the entry differs most."""
    asked = ask(start, known)
    if asked is None:
        return list(known[:FEW])
    rows = sorted(compare(asked.expert, known, asked.predictions).rows, key=lambda row: -row.distance)
    seen: Counter[str | None] = Counter()
    turns: list[tuple[int, int, KnownAnswer]] = []
    for row in rows:
        turns.append((seen[row.label], len(turns), row.known))
        seen[row.label] += 1
    return [each for _, _, each in sorted(turns, key=lambda turn: turn[:2])[:FEW]]


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
    """Which label each label would be, if the answers tell another order; else None."""
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
    elif prediction.outputs and answer.scores:
        for output in prediction.outputs:
            yield output.label, min(answer.scores, key=lambda pair: abs(pair[1] - output.score))[0]
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
        yield {"mean": list(known.mean), "std": list(known.std), "channels": "bgr"}
    for numbers in MEANS:
        yield numbers
        yield {**numbers, "channels": "bgr"}


def _fits(entry: Entry) -> Iterator[Any]:
    """Stretched; cut from a scaled image; and the present one with another choice of each of its keys."""
    present = entry["input"].get("fit")
    present = present if isinstance(present, dict) else {}
    yield "stretched"
    for share in CROPS:
        yield _fit(present, "resize", math.floor(min(entry["input"]["size"]) / share + 1e-6))
    if isinstance(near := present.get("resize"), int):
        yield from (_fit(present, "resize", near + step) for step in STEPS)
    for name, info in FitSection.model_fields.items():
        for value in (*_choices(info.annotation), *NUMBERS.get(name, ())):
            yield _fit(present, name, value)


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
