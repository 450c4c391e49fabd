"""What was found in a model's file, and what was not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

Kind: TypeAlias = Literal["classifier", "detector", "anomaly"]
KINDS: tuple[Kind, ...] = ("classifier", "detector", "anomaly")


@dataclass(frozen=True, slots=True)
class Inspected:
    """One model's file. What is None is not known, and ``missing`` says why, and which option gives it.

    ``size``: (height, width). ``sure``: what is known, by its key of the line file, and what says so. ``label_count``:
    how many labels it tells apart, where that is known without their names. ``tensors``: its weights, of a file that
    is not served as it is; ``is_scattered``: of a graph that is not, as its weights lie in other files. ``said``: what
    else whoever adds it should know.
    """

    file: Path
    kind: Kind | None
    architecture: str | None
    labels: tuple[str, ...] | None = None
    size: tuple[int, int] | None = None
    normalize: str | None = None
    stem: str | None = None
    label_count: int | None = None
    tensors: Mapping[str, Tensor] | None = None
    is_scattered: bool = False
    sure: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    said: tuple[str, ...] = ()

    @property
    def is_served_as_it_is(self) -> bool:
        return self.tensors is None and not self.is_scattered
