"""`coserve experts add --check DATA`: an expert is compared with its trainer's own answers before it is added.

Guarantees: what differs refuses the expert, with the key that would explain the answers, if any that is served does.
A key without a source is taken from the answers only if they decide it, and is written with this evidence.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from agent.commands.judged_images import GROUND, drawn, unjudged
from agent.faults.errors import WeightsUnclear
from agent.line_file.editing import rendered
from experts.backends import backend_for
from experts.catalog import expert_of
from experts.errors import ConfigError, ExpertError
from experts.images import decode_image
from experts.model_files.description import in_grey
from experts.proving.answers import read_answers
from experts.proving.comparing import LARGEST, AnswerComparison, compare, require_comparable
from experts.proving.judging import Judge
from experts.proving.search import (
    FUNCTION,
    AnsweredEntry,
    FoundInputs,
    Patience,
    assumed,
    explain,
    searchable_keys,
    telling_first,
    value_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from experts.expert import Expert, Prediction
    from experts.images import Decoded
    from experts.model_files.description import ModelDescription
    from experts.proving.answers import KnownAnswer
    from experts.proving.comparing import Compared

    Entry = dict[str, Any]

WORST = 6  # images in words and in the picture
HELD_PIXELS = 64_000_000  # of decoded images, for entries that are tried one after another
JUDGES = 2  # models in memory
PICTURE_COLUMNS, TILE_PX = 2, 1200
START: dict[str, Any] = {  # where the search begins
    "normalize": "imagenet", "fit": None, "task": "multiclass", "variant": "plain", FUNCTION: "bilinear",
}  # fmt: skip
EVERY_RULE = "every value of {} that is served was tried: is the file the model that gave the answers?"
SO_FAR = "{}, and none gives the answers: give by option what its trainer did"
USUALLY_TRIED = 100  # the end that progress shows, until more are
OWN_CODE = (
    "is the file the model that gave the answers? Images each by its own mean, padded to a square before they are "
    "scaled, or cut without scaling are not served"
)
OTHER_SCALE = (
    "all labels agree, and scores do not: if code behind the model changes its outputs (a temperature, another "
    "softmax, sigmoids), export it with that code inside"
)


@dataclass(frozen=True, slots=True)
class GivenAnswers:
    """Known answers for one expert. ``asked``: by key the questions that they must decide; ``advises``: where they do
    not agree, the keys that the file states are tried, too. ``patience``: for searches."""

    named: str
    known: tuple[KnownAnswer, ...]
    asked: Mapping[str, str] = field(default_factory=dict)
    advises: bool = True
    patience: Patience = field(default_factory=Patience)


@dataclass(frozen=True, slots=True)
class ComparedEntry:
    """An entry beside its answers. ``found``: evidence by key that the answers decided. ``refusal``: why it is not
    added; ``trusted``: who adds it all the same, and why."""

    named: str
    entry: Entry
    comparison: AnswerComparison
    found: Mapping[str, str] = field(default_factory=dict)
    refusal: str = ""
    trusted: tuple[str, str] | None = None

    @property
    def heading(self) -> str:
        return f"compared with {self.named}: {self.text}"

    @property
    def text(self) -> str:
        who = "" if self.trusted is None else f"; trusted by {self.trusted[0]}: {self.trusted[1]}"
        return f"{_counted(self.comparison)}{who}"

    def as_json(self) -> dict[str, Any]:
        rows = self.comparison.worst(WORST)
        return {
            "images": self.comparison.images,
            "agreed": self.comparison.agreed,
            "largest_difference": self.comparison.largest_difference,
            "found": dict(self.found),
            "trusted": None if self.trusted is None else {"by": self.trusted[0], "why": self.trusted[1]},
            "worst": [{"image": str(row.known.image), "why": row.why} for row in rows],
        }


def known_answers(
    data: Path, components: Collection[str], line_components: Collection[str], labels: Sequence[str] | None
) -> GivenAnswers:
    """Answers for an expert of these components; those of others are left out. Raises ConfigError."""
    known = read_answers(data, {*components, *line_components}, labels or ())
    own = tuple(each for each in known if each.component is None or each.component in components)
    if not own:
        raise ConfigError(f"{data}: has answers of other components alone - name theirs with --component")
    return GivenAnswers(data.name, own)


def opened(
    described: ModelDescription, given: Callable[[str], object], check: GivenAnswers
) -> tuple[ModelDescription, GivenAnswers]:
    """The description with a value to begin with for each missing fact that answers may decide."""
    names = sorted({name for each in check.known for name in _names(each)})
    start = START | ({"labels": tuple(names)} if names and described.label_count in {None, len(names)} else {})
    start |= {"normalize": in_grey("unit")} if described.is_grey else {}
    may_be_found = {*start, *searchable_keys()} - ({"labels", "detector"} - {*start})
    asked = {key: why for key, why in described.missing.items() if key in may_be_found}
    asked = {key: why for key, why in asked.items() if given(key) is None and (key in start or hasattr(described, key))}
    values = {key: start.get(key, getattr(described, key)) for key in asked}
    missing = {key: why for key, why in described.missing.items() if key not in asked}
    return replace(described, **values, missing=missing), replace(check, asked=asked)


def _names(answer: KnownAnswer) -> list[str]:
    if answer.boxes is not None:
        return [box.label for box in answer.boxes]
    return [*(name for name, _ in answer.scores), *filter(None, [answer.label])]


def checked(
    name: str, entry: Entry, evidence: Collection[str], check: GivenAnswers, progress: Callable[[str, int, int], None]
) -> ComparedEntry:
    """Compare an entry, whose ``weights`` are absolute. ``evidence``: keys that its file or an option states.

    Raises as packing does, ImageError, and WeightsUnclear for keys that the answers do not decide.
    """
    asker = _Asker(name, progress)
    found = _checked(name, entry, evidence, check, asker)
    if found.refusal:
        return found
    details = assumed(found.entry, check.known, asker, check.patience)
    words = {key: f"assumed: no answer tells it from {', '.join(map(str, each))}" for key, each in details.items()}
    return replace(found, found={**found.found, **words})


def _checked(name: str, entry: Entry, evidence: Collection[str], check: GivenAnswers, asker: _Asker) -> ComparedEntry:
    expert = expert_of(name, entry, Path())
    require_comparable(expert, check.known, check.named)
    failed = ""
    try:
        first = compare(expert, check.known, asker.answers(expert, entry, check.known))
    except ExpertError as error:
        if not check.asked:
            raise
        first, failed = AnswerComparison(()), error.message  # where the search begins is nobody's word
    if first.is_proof and not check.asked:
        return ComparedEntry(check.named, entry, first)
    keys = [key for key in (*searchable_keys(), FUNCTION) if key in check.asked]
    known = telling_first(check.known, first)
    found = explain(entry, keys, keys, known, asker, check.patience) if keys else FoundInputs()
    if found.best is None and check.advises and not failed and not found.unfinished:
        stated = {"task", "detector"} - {*check.asked, *entry}  # by the file itself; each other one is packed anew
        tried = [key for key in searchable_keys() if key not in stated]
        found = explain(entry, tried, keys, known, asker, check.patience)
    if found.best is None and check.asked:
        why = f"no value that is served explains {check.named}"
        why = SO_FAR.format(found.unfinished) if found.unfinished else why
        failed = failed or ("" if found.unfinished or any(each.boxes is not None for each in check.known) else OWN_CODE)
        raise WeightsUnclear(name, {**check.asked, "check": f"{why}: {failed}" if failed else why})
    open_keys = {*keys, "fit"} if FUNCTION in keys else {*keys}
    return _taken(name, entry, {*evidence} - open_keys, check, first, found)


def _taken(
    name: str, entry: Entry, evidence: Collection[str], check: GivenAnswers, first: AnswerComparison, found: FoundInputs
) -> ComparedEntry:
    if found.best is not None and found.alike is not None and (keys := {*found.open} & {*check.asked}):
        one, other = (_options(found.open, each.entry) for each in (found.best, found.alike))
        why = f"{check.named}: {_counted(found.best.comparison)} with {one}, and as well with {other}"
        ask = "add images that tell them apart, or give it"
        raise WeightsUnclear(name, {key: f"{why}; {ask}: {check.asked[key]}" for key in sorted(keys)})
    if "labels" in check.asked and found.best is not None and len(unseen := _unseen(check, found.best.entry)) > 1:
        why = f"no answer of {check.named} is {' or '.join(unseen)}, so their order is not shown: add images of them"
        raise WeightsUnclear(name, {"labels": f"{why}; {check.asked['labels']}"})
    changed = [] if found.best is None else _changed(entry, found.best.entry)
    if found.best is None or {*evidence} & {*changed} or found.open:
        return ComparedEntry(check.named, entry, first, refusal=_refusal(check, first, found, changed))
    evidence = {key: _evidence(found, key) for key in {*changed, *check.asked}}
    return ComparedEntry(check.named, found.best.entry, found.best.comparison, evidence)


def _unseen(check: GivenAnswers, entry: Entry) -> list[str]:
    """Labels of which no image is known; the last one left is known, too."""
    seen = {box.label for each in check.known for box in each.boxes or ()}
    for each in check.known:
        likeliest = max(each.scores, key=lambda pair: pair[1], default=("", 0.0))[0]
        is_each_compared = entry.get("task") == "multilabel"
        seen |= {name for name, _ in each.scores} if is_each_compared else {each.label or likeliest}
    return [label for label in entry["labels"] if label not in seen]


def _changed(entry: Entry, other: Entry) -> list[str]:
    return [key for key in searchable_keys() if value_of(entry, key) != value_of(other, key)]


def _evidence(found: FoundInputs, key: str) -> str:
    assert found.best is not None, "evidence is of what was found"
    text = f"found by --check: {_counted(found.best.comparison)}{_within(found.best.comparison)}"
    text += f", though {found.unfinished}" if found.unfinished else ""
    rival = found.rivals.get(key)
    if rival is None:
        return text
    others = rival.comparison
    nearest = f"{text}; next best {_shown(value_of(rival.entry, key))}, {others.agreed} of {others.images}"
    if others.agreed < others.images:
        return nearest
    return f"{nearest}, with a mean difference of {rival.distance:.1g} instead of {found.best.distance:.1g}"


def _refusal(check: GivenAnswers, first: AnswerComparison, found: FoundInputs, changed: Sequence[str]) -> str:
    lines = [f"{check.named}: {_counted(first)}", *table_lines(first)]
    if first.blind:
        lines.append(f"the model is blind: {first.blind}")
    if (picture := draw_worst(first.worst(WORST))) is not None:
        lines.append(f"the worst of them are drawn in {picture}")
    if found.best is None:
        every = EVERY_RULE.format(", ".join(key for key in searchable_keys() if key != "task"))
        lines.append(SO_FAR.format(found.unfinished) if found.unfinished else every)
        is_scaled = 2 * first.agreed < first.images and all(row.distance < LARGEST for row in first.rows)
        lines += [OTHER_SCALE] if is_scaled and all(row.known.boxes is None for row in first.rows) else []
    elif found.alike is not None:
        ways = (_options({*changed, *found.open}, each.entry) for each in (found.best, found.alike))
        within = _within(found.best.comparison)
        lines.append(f"all answers agree{within} with {' and as well with '.join(ways)}: give what the trainer did")
    else:
        way = _options(changed, found.best.entry)
        lines.append(f"give {way}: {_evidence(found, changed[0]).removeprefix('found by --check: ')}")
    return "\n  ".join([*lines, "--anyway REASON adds it all the same, and records who did and why"])


def _options(keys: Collection[str], entry: Entry) -> str:
    return " ".join(as_option(key, value_of(entry, key)) for key in (*searchable_keys(), FUNCTION) if key in keys)


def as_option(key: str, value: object) -> str:
    if isinstance(value, list) and key == "labels":
        return f"--labels {','.join(value)}"
    shown = _shown(value)
    return f"--{key} {shown}" if " " not in shown else f"--{key} '{shown}'"


def _shown(value: object) -> str:
    return "plain" if value is None else rendered(value)  # type: ignore[arg-type]


def _counted(comparison: AnswerComparison) -> str:
    agree = "answers agree" if comparison.images != 1 else "answer agrees"
    return f"{comparison.agreed} of {comparison.images} {agree}"


def _within(comparison: AnswerComparison) -> str:
    far = comparison.largest_difference
    return f", within {far:.1g}" if far > 0 else ""


def table_lines(comparison: AnswerComparison) -> list[str]:
    """Images by label, and the worst of those that differ."""
    images, agreed = (
        Counter(row.label or "-" for row in comparison.rows if row.agrees or every) for every in (True, False)
    )
    width = max(len(label) for label in images)
    lines = [f"{label:<{width}} {agreed[label]:>5} of {count}" for label, count in sorted(images.items())]
    lines.append(f"largest difference of a score, where labels agree: {comparison.largest_difference:.4f}")
    return lines + [f"{row.known.image.name}: {row.why}" for row in comparison.worst(WORST)]


def draw_worst(rows: Sequence[Compared], file: Path | None = None) -> Path | None:
    """One picture of these images and what differs; of none, None. ``file``: default in a new temporary folder."""
    images = ((row.known.image, row) for row in rows)
    pictures = (drawn(image, unjudged(image, row.why, row.prediction.boxes)) for image, row in images)
    tiles = [tile for tile in pictures if tile is not None]
    if not tiles:
        return None
    for tile in tiles:
        tile.thumbnail((TILE_PX, TILE_PX))
    width = max(tile.width for tile in tiles)
    height = max(tile.height for tile in tiles)
    columns = min(PICTURE_COLUMNS, len(tiles))
    sheet = Image.new("RGB", (columns * width, -(-len(tiles) // columns) * height), GROUND)
    for number, tile in enumerate(tiles):
        sheet.paste(tile, (number % columns * width, number // columns * height))
    file = file or Path(tempfile.mkdtemp(prefix="coserve-check-")) / "worst.png"
    sheet.save(file)
    return file


class _Asker:
    """Answers of entries: models of the latest ones and decoded images are held."""

    def __init__(self, name: str, progress: Callable[[str, int, int], None]) -> None:
        self._name = name
        self._progress = progress
        self._judges: dict[str, Judge] = {}
        self._answers: dict[tuple[str, Path], Prediction] = {}
        self._images: dict[Path, Decoded] = {}
        self._held_pixels = 0
        self._tried = 0

    def __call__(self, entry: Entry, known: Sequence[KnownAnswer]) -> AnsweredEntry | None:
        try:
            expert = expert_of(self._name, entry, Path())
            return AnsweredEntry(expert, self.answers(expert, entry, known))
        except (ValueError, RuntimeError, ExpertError):  # RuntimeError: a runtime refuses such an input
            return None

    def answers(self, expert: Expert, entry: Entry, known: Sequence[KnownAnswer]) -> tuple[Prediction, ...]:
        """Raises as packing does, and ImageError."""
        judge, text = self._judge(expert, entry), rendered(entry)
        self._tried += 1
        self._progress("compare with answers", self._tried, max(self._tried + 1, USUALLY_TRIED))
        for path in (each.image for each in known):
            if (text, path) not in self._answers:
                found = judge.answer_known(path, expert, self._image(path))
                anomaly = found.anomaly and replace(found.anomaly, map=None)
                self._answers[text, path] = replace(found, anomaly=anomaly)
        return tuple(self._answers[text, each.image] for each in known)

    def _judge(self, expert: Expert, entry: Entry) -> Judge:
        inner = rendered({key: value for key, value in entry.items() if key not in {"input", "labels"}})
        if inner not in self._judges:
            while len(self._judges) >= JUDGES:
                del self._judges[next(iter(self._judges))]
            backend_for(expert.architecture).check(expert)  # within milliseconds, which packing is not
            self._judges[inner] = Judge(expert)
        return self._judges[inner]

    def _image(self, path: Path) -> Decoded:
        if path in self._images:
            return self._images[path]
        image = decode_image(path, str(path))
        if self._held_pixels + image.pixels.size <= HELD_PIXELS * 3:
            self._images[path] = image
            self._held_pixels += image.pixels.size
        return image
