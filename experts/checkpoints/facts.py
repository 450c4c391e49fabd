"""Records of a checkpoint: one set of weights, its place in the file, and the facts in the file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a model in its file; None: not stated.

    ``task``: as its trainer names it (detect, classify, segment, ...). ``problem``: "multiclass" or "multilabel", by
    loss or last activation. ``size``: (height, width). ``normalize`` and ``fit``: as a line file has them.
    ``builder``: library whose script saved the file, and built the model by the name of its architecture. ``layers``:
    of a whole module, see experts.checkpoints.modules; ``wrapper``: class of unknown code around it.
    ``evidence``: place of each fact in the file, also of a ``fit`` that is not served.
    """

    framework: str | None = None
    labels: tuple[str, ...] | None = None
    task: str | None = None
    size: tuple[int, int] | None = None
    architecture: str | None = None
    normalize: str | dict[str, Any] | None = None
    fit: dict[str, Any] | None = None
    problem: str | None = None
    builder: str | None = None
    layers: Mapping[str, Mapping[str, Any]] | None = None
    wrapper: str | None = None
    evidence: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ConvertedCheckpoint:
    """Report on weights that were taken out of a checkpoint.

    ``where``: path of keys to the weights. ``remarks``: on decisions, a phrase each.
    """

    where: str
    facts: Facts
    remarks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CheckpointWeights(ConvertedCheckpoint):
    """``weights``: by their names without what wrappers put before them."""

    weights: Mapping[str, Tensor]
