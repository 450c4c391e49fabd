"""New answers beside earlier ones: agreement of each component and expert, and the flips that are most certain."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from experts.expert import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from agent.commands.rejudging.archive import ArchivedImage

MOST_FLIPS = 500  # that a page shows
SAME, OTHER_LABEL, OK_TO_NG, NG_TO_OK, TO_UNKNOWN, FROM_UNKNOWN = (
    "agreeing", "other_label", "ok_to_ng", "ng_to_ok", "to_unknown", "from_unknown"
)  # fmt: skip
KINDS = (SAME, OTHER_LABEL, OK_TO_NG, NG_TO_OK, TO_UNKNOWN, FROM_UNKNOWN)


class Place(NamedTuple):
    """Component, and the expert that decided its new answer; "" for none."""

    component: str
    expert: str


@dataclass(slots=True)
class AnswersCompared:
    """Comparison of answers. ``kinds``: images by place and kind; ``alone``: images without an earlier answer.

    ``flips``: rows with another verdict, the most certain first, at most MOST_FLIPS of ``flips_in_all``.
    """

    images: int = 0
    alone: int = 0
    kinds: Mapping[Place, Counter[str]] = field(default_factory=dict)
    flips: Sequence[Mapping[str, Any]] = ()

    @property
    def total(self) -> Counter[str]:
        return sum(self.kinds.values(), Counter())

    @property
    def compared(self) -> int:
        return self.images - self.alone

    @property
    def flips_in_all(self) -> int:
        return self.compared - self.total[SAME] - self.total[OTHER_LABEL]

    def as_json(self) -> dict[str, Any]:
        total = self.total
        return {
            "images": self.images,
            "compared": self.compared,
            "agreement": total[SAME] / self.compared if self.compared else None,
            **_counts(total),
            "places": [
                place._asdict() | {"images": counts.total(), **_counts(counts)}
                for place, counts in self.least_agreeing()
            ],
        }

    def least_agreeing(self) -> list[tuple[Place, Counter[str]]]:
        """Places with their counts, the one with the most disagreeing images first."""
        return sorted(self.kinds.items(), key=lambda each: (each[1][SAME] - each[1].total(), each[0]))


def answer_row(image: ArchivedImage, answer: Mapping[str, Any], earlier: Mapping[str, Any] | None) -> dict[str, Any]:
    """Row of one image, with its new answer and an earlier one."""
    row = {name: getattr(image, name) for name in ("key", "path", "box", "component", "board", "ref")} | dict(answer)
    earlier = earlier or {}
    row |= {f"stored_{name}": earlier.get(name) for name in ("verdict", "label", "score")}
    return row | {"stored_at": earlier.get("finished_at"), "agrees": kind_of(row) == SAME if earlier else None}


def kind_of(row: Mapping[str, Any]) -> str:
    """Kind of a row with an earlier answer."""
    now, before = row["verdict"], row["stored_verdict"]
    if now == before:
        return SAME if row["label"] == row["stored_label"] else OTHER_LABEL
    if Verdict.UNKNOWN in (now, before):
        return TO_UNKNOWN if now == Verdict.UNKNOWN else FROM_UNKNOWN
    return OK_TO_NG if now == Verdict.NG else NG_TO_OK


def compare_answers(rows: Iterable[Mapping[str, Any]], most: int = MOST_FLIPS) -> AnswersCompared:
    """Comparison of rows, read once, of which the ``most`` certain flips are held."""
    found = AnswersCompared()
    kinds: defaultdict[Place, Counter[str]] = defaultdict(Counter)
    flips: list[tuple[float, int, Mapping[str, Any]]] = []
    number = itertools.count()
    for row in rows:
        found.images += 1
        if row["stored_verdict"] is None:
            found.alone += 1
            continue
        kind = kind_of(row)
        kinds[Place(row["component"] or "", row["experts"][-1] if row["experts"] else "")][kind] += 1
        if kind not in {SAME, OTHER_LABEL}:
            heapq.heappush(flips, (_certainty(row), -next(number), row))
            if len(flips) > most:
                heapq.heappop(flips)
    found.kinds = dict(kinds)
    found.flips = [row for *_, row in sorted(flips, key=lambda each: each[:2], reverse=True)]
    return found


def _certainty(row: Mapping[str, Any]) -> float:
    """Score of the less certain of both answers; 0 for none. Scores of anomalies are on no scale: 1 at most."""
    return min(1.0, *(row[name] or 0.0 for name in ("score", "stored_score")))


def _counts(counts: Counter[str]) -> dict[str, int]:
    return {kind: counts[kind] for kind in KINDS}
