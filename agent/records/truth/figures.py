"""Experts' answers beside people's verdicts: precision, recall, escapes and false calls. Pure.

An answer counts for an expert only where a person's verdict says what that expert should have said (``right_answer``).
Shares have their 95 % interval (E. B. Wilson, Journal of the American Statistical Association 22, 1927), so that few
reviews look like few.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experts.expert import Verdict

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

Z_95 = 1.959963984540054  # of the normal distribution, two-sided


def verdict_by(expert: str, experts: Sequence[str], verdict: Verdict) -> Verdict | None:
    """Answer of an expert to an image: OK where it let the image pass to another; None if it was not asked.

    ``experts``: experts that judged the image, in the order of its route; ``verdict``: the image's.
    """
    if expert not in experts:
        return None
    return verdict if expert == experts[-1] else Verdict.OK


def right_answer(
    expert: str,
    experts: Sequence[str],
    verdict: Verdict,
    truth: tuple[Verdict, str | None],
    labels: Mapping[str, Collection[str]],
) -> Verdict | None:
    """Right answer of an expert to an image; None where its review does not tell. ``experts``, ``verdict``: as the
    person saw them; ``truth``: the person's verdict and label; ``labels``: those of each expert.

    A good part is OK for all. A defect is NG for the experts that have its label. A defect without a label, or with one
    that no expert of the route has, is NG for the expert that found it, or else for all that missed it.
    """
    person, label = truth
    if person is Verdict.OK:
        return Verdict.OK
    if label in labels.get(expert, ()):
        return Verdict.NG
    if any(label in labels.get(other, ()) for other in experts):
        return None
    is_found = verdict is Verdict.NG and experts
    return Verdict.NG if not is_found or experts[-1] == expert else None


@dataclass(frozen=True, slots=True)
class Rate:
    """``count`` among ``of`` images."""

    count: int
    of: int

    @property
    def share(self) -> float | None:
        return self.count / self.of if self.of else None

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the share; 0 to 1 without an image."""
        if not self.of:
            return 0.0, 1.0
        share, spread = self.count / self.of, Z_95**2 / self.of
        middle = share + spread / 2
        margin = Z_95 * math.sqrt(share * (1 - share) / self.of + spread / (4 * self.of))
        low, high = (middle - margin) / (1 + spread), (middle + margin) / (1 + spread)
        return (max(low, 0.0) if self.count else 0.0), (min(high, 1.0) if self.count < self.of else 1.0)

    def as_json(self) -> dict[str, float | int | None]:
        low, high = self.interval
        return {"count": self.count, "of": self.of, "share": self.share, "low": low, "high": high}


def figures_of(pairs: Iterable[tuple[Verdict, Verdict]]) -> dict[str, Any]:
    """Rates of one expert as JSON. ``pairs``: for each image the expert's answer, and the right one (OK or NG)."""
    counts = Counter(pairs)
    caught, escaped = counts[Verdict.NG, Verdict.NG], counts[Verdict.OK, Verdict.NG]
    called, passed = counts[Verdict.NG, Verdict.OK], counts[Verdict.OK, Verdict.OK]
    rates = {
        "precision": Rate(caught, caught + called),
        "recall": Rate(caught, caught + escaped),
        "escapes": Rate(escaped, caught + escaped),
        "false_calls": Rate(called, called + passed),
    }
    unknown = counts.total() - caught - escaped - called - passed
    return {"images": counts.total(), "unknown": unknown} | {name: rate.as_json() for name, rate in rates.items()}
