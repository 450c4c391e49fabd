"""What was found in a checkpoint: one set of weights, where it stood, and what the file tells about them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Facts:
    """What the file tells of its model, as it says it; None where it does not.

    ``task``: as its trainer names it (detect, classify, segment, ...). ``problem``: "multiclass" or "multilabel", by
    its loss or last activation. ``size``: height and width of its images. ``normalize`` and ``fit``: as a line file has
    them. ``evidence``: for each that is known, where in the file it stands; of a ``fit`` that is told but not served,
    with what it is.
    """

    framework: str | None = None
    labels: tuple[str, ...] | None = None
    task: str | None = None
    size: tuple[int, int] | None = None
    architecture: str | None = None
    normalize: str | dict[str, Any] | None = None
    fit: dict[str, Any] | None = None
    problem: str | None = None
    evidence: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Told:
    """What is said of weights that were taken out of a checkpoint.

    ``where``: the path of keys that they stood under. ``said``: what was decided on the way, a phrase each.
    """

    where: str
    facts: Facts
    said: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """The weights of a checkpoint, by their names without what wrappers put before them; the rest as in Told."""

    weights: Mapping[str, Tensor]
    where: str
    facts: Facts
    said: tuple[str, ...]
