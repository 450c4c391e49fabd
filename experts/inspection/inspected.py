"""What was found in a model's file, and what was not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

Kind: TypeAlias = Literal["classifier", "detector", "anomaly"]
KINDS: tuple[Kind, ...] = ("classifier", "detector", "anomaly")
NORMALIZE_OPTIONS = (
    "--normalize imagenet (torchvision's mean and deviation), --normalize unit (pixels in [0, 1]), or numbers of its "
    "own: --normalize '{mean: [0.5, 0.5, 0.5], std: [0.5, 0.5, 0.5]}', with `scale: 255` if of pixels up to 255"
)
FIT_OPTIONS = (
    "--fit '{resize: 256, crop: 224, interpolation: bicubic}' (scaled, then cut from the middle) or --fit stretched"
)


def unserved_fit(evidence: str) -> str:
    """What to ask where a file tells of a fit that no line file can say."""
    return f"the file scales images in a way that is not served ({evidence}); the nearest that is: {FIT_OPTIONS}"


ONE_OUTPUT = "one output, which leaves a softmax nothing to choose from"


@dataclass(frozen=True, slots=True)
class Inspected:
    """One model's file. What is None is not known, and ``missing`` says why, and which option gives it.

    ``size``: (height, width). ``normalize`` and ``fit``: as a line file has them; without a fit images are stretched.
    ``task``: of classifiers, "multiclass" where one label is the answer (softmax), or "multilabel" (sigmoids).
    ``sure``: what is known, by its key of the line file, and what says so. ``label_count``:
    how many labels it tells apart, where that is known without their names. ``tensors``: its weights, of a file that
    is not served as it is; ``is_scattered``: of a graph that is not, as its weights lie in other files. ``said``: what
    else whoever adds it should know.
    """

    file: Path
    kind: Kind | None
    architecture: str | None
    labels: tuple[str, ...] | None = None
    size: tuple[int, int] | None = None
    normalize: str | dict[str, Any] | None = None
    fit: dict[str, Any] | None = None
    stem: str | None = None
    task: str | None = None
    label_count: int | None = None
    tensors: Mapping[str, Tensor] | None = None
    is_scattered: bool = False
    sure: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    said: tuple[str, ...] = ()

    @property
    def is_served_as_it_is(self) -> bool:
        return self.tensors is None and not self.is_scattered


def unknown_labels(what: str, count: int | None) -> str:
    """What to ask where ``what`` has no names for its outputs."""
    if count == 1:
        return f"{what} no name for the one output: --labels LABEL, of what a high value says"
    return f"{what} no names for the {count or ''} outputs: --labels first,second,... in their order".replace("  ", " ")


def unknown_task(what: str) -> str:
    """What to ask where ``what`` does not show how several outputs are meant."""
    return (
        f"{what} not show whether labels exclude one another: --task multiclass (trained with cross entropy: a "
        "softmax) or --task multilabel (with binary cross entropy: a sigmoid for each)"
    )
