"""Traces: arrivals from a file, one JSON object per line, or from the boards of a line.

Guarantees: a trace is complete and in the order of its times, or a ConfigError names file, line and key of every
mistake, up to MOST_PROBLEMS; times count from the first arrival, so an hour of a day starts at once; equal line and
seed give equal boards.

    {"t": 0.004, "component": "resistor-0402", "image": "crops/17.png"}    a component's route, on this image
    {"t": 0.008, "expert": "cls/resistor-0402"}                            one expert directly, on a synthetic image
    {"t": 0.010, "expert": "llm/manuals", "prompt": 120, "output": 60}     a text: tokens to read and to write
    {"t": 0.012, "component": "assistant", "prompt": 40, "output": 200}    a text that a route's router sends on

``t``: seconds since any moment before the first arrival, never less than the line before. ``image`` is relative to the
trace's folder, and may be left out. A trace has no texts: for a route of rules it names the expert itself. Empty lines
are ignored.
"""

from __future__ import annotations

import json
import math
import os
import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from agent.core.request import IMAGE, Work
from experts.document import suggestion
from experts.errors import ConfigError, FilePlace

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

    from agent.config import LineConfig
    from experts.catalog import Catalog

TOKENS = ("prompt", "output")
KEYS = ("t", "component", "expert", "image", *TOKENS)
MOST_TOKENS = 10**7  # of one text
MOST_PROBLEMS = 20  # named of one file; the rest is counted
LATEST_S = 1e9  # some thirty years
LONGEST_SHOWN = 40
MOST_DIGITS = 400  # of a whole number: no float is longer
IMAGE_INTERVAL_S = 0.004  # between two images of one board (CoServe, section 5.1)


@dataclass(frozen=True, slots=True)
class TracedArrival:
    """Request for a component's route or for one expert. ``at_s``: seconds since the trace's start."""

    at_s: float
    component: str | None = None
    expert: str | None = None
    image: Path | None = None
    work: Work = IMAGE


def read_trace(path: Path, catalog: Catalog, *, is_planned: bool = False) -> tuple[TracedArrival, ...]:
    """Arrivals of a trace file, for a line with these experts and routes, from time 0 on.

    ``is_planned``: texts are allowed; a plan takes them, a player does not. Raises ConfigError for a file that cannot
    be read, holds no arrival, or has mistakes.
    """
    reader = _Reader(path, catalog, is_planned)
    found = [reader.arrival(number, text) for number, text in _lines(path)]
    if len(reader.problems) > MOST_PROBLEMS:
        more = f"and {len(reader.problems) - MOST_PROBLEMS} mistakes more - correct these first"
        reader.problems[MOST_PROBLEMS:] = [ConfigError(f"{path}: {more}")]
    if reader.problems:
        raise ConfigError.of(reader.problems)
    arrivals = [arrival for arrival in found if arrival is not None]
    if not arrivals:
        raise ConfigError(
            f'{path}: an empty queue: no arrival in it - write lines such as {{"t": 0, "component": ...}}'
        )
    return tuple(replace(arrival, at_s=arrival.at_s - arrivals[0].at_s) for arrival in arrivals)


def board_trace(config: LineConfig, boards: int, seed: int) -> tuple[TracedArrival, ...]:
    """Arrivals of ``boards`` boards (at least 1) of a line, in the order of time.

    Each board's components come in a random order, IMAGE_INTERVAL_S apart; board types take turns. A board starts
    one takt after the start of the one before, so images of large boards may overlap. A line without boards has passes
    over all its routes, one image of each, without a pause.
    """
    rng = random.Random(seed)
    quantities = [board.quantities for board in config.boards.values()] or [dict.fromkeys(config.catalog.components, 1)]
    takts_s = [board.takt_s for board in config.boards.values()] or [len(quantities[0]) * IMAGE_INTERVAL_S]
    arrivals: list[TracedArrival] = []
    start_s = 0.0
    for number in range(boards):
        turn = number % len(quantities)
        components = [name for name, quantity in sorted(quantities[turn].items()) for _ in range(quantity)]
        rng.shuffle(components)
        arrivals += (TracedArrival(start_s + IMAGE_INTERVAL_S * n, name) for n, name in enumerate(components))
        start_s += takts_s[turn]
    return tuple(sorted(arrivals, key=lambda arrival: arrival.at_s))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}) - check the path and its permissions") from error
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            text = line.decode().strip()
        except UnicodeDecodeError as error:
            place = FilePlace(path, number, error.start + 1, "encoding")
            wrong = f"byte 0x{line[error.start]:02x} is not UTF-8 - save the file in the encoding UTF-8"
            raise ConfigError(wrong, place) from error
        if text:
            yield number, text


class _Mistake(Exception):
    """Mistake of a line: its key, and what to do."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


@dataclass(slots=True)
class _Reader:
    """Checks line after line, and collects problems."""

    path: Path
    catalog: Catalog
    takes_texts: bool
    problems: list[ConfigError] = field(default_factory=list)
    _latest_s: float = 0.0
    _latest_line: int = 0
    _images: dict[str, bool] = field(default_factory=dict)  # path as written -> True if the file exists

    def arrival(self, number: int, text: str) -> TracedArrival | None:
        """Arrival of a line; None for a line with mistakes, of which each becomes a problem."""
        before = len(self.problems)
        try:
            row = _parse(text)
        except _Mistake as mistake:
            self._note(number, text, mistake)
            return None
        checked: dict[str, Any] = {}
        for check in (self._keys, self._time, self._target, self._image, self._tokens):
            try:
                checked |= check(row, number)
            except _Mistake as mistake:
                self._note(number, text, mistake)
        return TracedArrival(**checked) if len(self.problems) == before else None

    def _note(self, number: int, text: str, mistake: _Mistake) -> None:
        column = max(text.find(json.dumps(mistake.key)), 0) + 1
        self.problems.append(ConfigError(str(mistake), FilePlace(self.path, number, column, mistake.key)))

    def _keys(self, row: Mapping[str, object], number: int) -> dict[str, object]:
        for key in row:
            if key not in KEYS:
                raise _Mistake(key, f"unknown key - {suggestion(key, KEYS)}")
        return {}

    def _time(self, row: Mapping[str, Any], number: int) -> dict[str, object]:
        if "t" not in row:
            raise _Mistake("t", "is missing - seconds since the start of the trace")
        at_s = row["t"]
        if isinstance(at_s, bool) or not isinstance(at_s, int | float) or not math.isfinite(at_s):
            raise _Mistake("t", f"{_shown(at_s)} is not a number - write seconds since the start, such as 0.004")
        if at_s < 0:
            raise _Mistake("t", f"{_shown(at_s)} is before the start - times begin at 0")
        if at_s > LATEST_S:
            raise _Mistake("t", f"{_shown(at_s)} is too large: no trace lasts over {LATEST_S:g} s - write seconds")
        if at_s < self._latest_s:
            earlier = f"{at_s} runs backwards, line {self._latest_line} has {self._latest_s}"
            raise _Mistake("t", f"{earlier} - sort the lines by t")
        self._latest_s, self._latest_line = float(at_s), number
        return {"at_s": float(at_s)}

    def _target(self, row: Mapping[str, object], number: int) -> dict[str, object]:
        given = [key for key in ("component", "expert") if key in row]
        if len(given) != 1:
            both = "both component and expert - a request goes through a route or to one expert, keep one"
            raise _Mistake("component", both if given else "neither component nor expert - name one of them")
        key, name = given[0], row[given[0]]
        known: Collection[str] = self.catalog.graph.routes if key == "component" else self.catalog.experts
        if not isinstance(name, str):
            raise _Mistake(key, f"{_shown(name)} is not a name - write it in quotes")
        if name not in known and name in self.catalog.texts:
            raise _Mistake(key, f"{name!r} is a route of rules, and a trace has no words - name an expert of it")
        if name not in known:
            missing = f"no route for {name!r}" if key == "component" else f"no expert {name!r} on this line"
            raise _Mistake(key, f"{missing} - {suggestion(name, known)}")
        return {key: name}

    def _image(self, row: Mapping[str, object], number: int) -> dict[str, object]:
        if "image" not in row:
            return {}
        name = row["image"]
        if not isinstance(name, str) or not name:
            raise _Mistake("image", f"{_shown(name)} is not a path - write one relative to the trace's folder")
        image = self.path.absolute().parent / name
        if name not in self._images:
            self._images[name] = os.path.isfile(image)  # unlike Path.is_file, also of a name no disk could hold
        if not self._images[name]:
            raise _Mistake("image", f"{image} is not there - copy it there, or correct the path")
        return {"image": image}

    def _tokens(self, row: Mapping[str, object], number: int) -> dict[str, object]:
        given = [key for key in TOKENS if key in row]
        name = row.get("component", row.get("expert"))
        if not isinstance(name, str):
            return {}
        if name not in self.catalog.experts and name not in self.catalog.graph.routes:
            return {}
        expert = self.catalog.experts.get(name)
        if not (name in self.catalog.texts if expert is None else expert.takes_texts):
            if given:
                raise _Mistake(given[0], f"{name} takes images, which have no tokens - leave it out")
            return {}
        if not self.takes_texts:
            raise _Mistake("t", f"{name} takes texts, which are planned with but not played - leave the line out")
        if "image" in row:
            raise _Mistake("image", f"{name} takes texts, not images - leave it out")
        counts = {key: self._count(row, key, least) for key, least in zip(TOKENS, (1, 0), strict=True)}
        return {"work": Work(counts["prompt"], counts["output"], counts["prompt"] + counts["output"])}

    def _count(self, row: Mapping[str, object], key: str, least: int) -> int:
        if key not in row:
            raise _Mistake(key, "is missing - tokens of the text")
        count = row[key]
        if isinstance(count, bool) or not isinstance(count, int) or not least <= count <= MOST_TOKENS:
            raise _Mistake(key, f"{_shown(count)} is no number of tokens - write a whole number, {least} or more")
        return count


def _parse(text: str) -> dict[str, object]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        row = dict(pairs)
        if len(row) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise _Mistake(twice, "is there twice - keep one")
        return row

    try:
        row = json.loads(text, object_pairs_hook=unique, parse_int=_whole)
    except (ValueError, RecursionError) as error:
        raise _Mistake("syntax", f"not JSON ({error}) - write one object a line") from error
    if not isinstance(row, dict):
        raise _Mistake("syntax", f'{_shown(row)} is not an object - write {{"t": 0.004, "component": "..."}}')
    return row


def _whole(digits: str) -> int:
    """Refuses numbers of thousands of digits with advice, which Python's own error does not give."""
    if len(digits) > MOST_DIGITS:
        wrong = f"{digits[:LONGEST_SHOWN]}... is a number of {len(digits.lstrip('-'))} digits"
        raise _Mistake("syntax", f"{wrong} - write seconds such as 0.004")
    return int(digits)


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."
