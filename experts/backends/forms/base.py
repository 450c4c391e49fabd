"""The contract of a form: one way in which an expert's weights are packed and executed.

A form's file knows its name, where it runs and what proves it, without a runtime: torch and ONNX Runtime are imported
inside its methods. ``modules`` is the backend whose torch modules a form executes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from experts.errors import WeightsMismatch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    import torch
    from torch import Tensor
    from torch.nn import Module

    from experts.backends.base import Packable, Prepared, Skeleton
    from experts.calibrations import CallRanges
    from experts.expert import Expert, Precision, Prediction

    Reader: TypeAlias = Callable[[Expert, Sequence[Tensor], Sequence[Prepared]], tuple[Prediction, ...]]


class Modules(ABC):
    """A family of torch modules. ``outputs``: entries of a module's mapping, in order, or its one output's name."""

    outputs: ClassVar[tuple[str, ...]]

    @abstractmethod
    def structure(self, expert: Expert) -> Hashable:
        """Key of the module beside its input size. Raises WeightsMismatch where there is none."""

    @abstractmethod
    def prototype(self, expert: Expert) -> object:
        """Template of the expert's module: while it is held, ``module`` makes none. Raises WeightsMismatch."""

    @abstractmethod
    def module(self, structure: Any) -> Module:  # noqa: ANN401  a family's own
        """The module as it is run: folded, on meta, and not to be changed."""

    @abstractmethod
    def sample(self, structure: Any) -> dict[str, Tensor]:  # noqa: ANN401
        """Weights that the module may have, float32; always the same."""

    @abstractmethod
    def weights(self, expert: Expert, form: Form) -> dict[str, Tensor]:
        """The expert's weights by their names in the module, in the form's dtype. Raises as ``Backend.pack``."""

    @abstractmethod
    def reader(self, expert: Expert) -> Reader:
        """Makes predictions of a module's outputs. Raises WeightsMismatch where there is no module."""

    @abstractmethod
    def plain_skeleton(self, expert: Expert, dtype: torch.dtype, device: str) -> Skeleton:
        """A module that torch runs in this dtype."""

    @abstractmethod
    def unseen_structure(self, expert: Expert) -> bytes:
        """Part of the module's structure that shows in no shape of a weight."""


class Form:
    """One form. ``plain``: the form of torch that runs in its place on another device, or where the form is absent.

    ``numbers``: dtype of its products, as torch names it. ``plain`` keeps the numbers, but for eight bits: fp32 then.
    """

    packs_modules: ClassVar[bool] = True  # False: a form of language models alone
    needs_calibration: ClassVar[bool] = False  # ranges observed on sample images; then others of them have to prove it
    is_of_the_box: ClassVar[bool] = False  # a profile holds only for boxes with the same forms of this kind
    is_automatic: ClassVar[bool] = True  # False: runs only where a line file names it

    def __init__(self, name: Precision, numbers: str = "float32", plain: Precision | None = None) -> None:
        self.name = name
        self.plain = plain or name
        self.numbers = numbers

    @property
    def is_cpu_only(self) -> bool:
        return self.plain is not self.name

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights before they are packed, and of values that no product of ``numbers`` makes."""
        import torch

        found: torch.dtype = torch.float32 if self.numbers == "int8" else getattr(torch, self.numbers)
        return found

    @property
    def steps_aside(self) -> bool:
        """True where ``auto`` need not try the form on this CPU, as a form of the same numbers is faster."""
        return False

    def why_absent(self) -> str | None:
        """Reason why this CPU lacks the form; None: its operators answered correctly on a tiny tensor, tried once."""
        raise NotImplementedError

    def recipe(self) -> str:
        """Versions and CPU that packed bytes depend on: a change packs all experts again."""
        return ""

    def pack(self, modules: Modules, expert: Expert) -> Packable:
        """Raises WeightsMismatch where the expert does not run in this form, and as ``Backend.pack``."""
        raise NotImplementedError

    def template(self, modules: Modules, expert: Expert, program: bytes, device: str) -> object:
        """Prototype of skeletons, see ``Backend.template``."""
        return self.skeleton(modules, expert, program, device)

    def skeleton(self, modules: Modules, expert: Expert, program: bytes, device: str) -> Skeleton:
        """Raises BackendUnavailable on a device that is not the form's, and for a program of another box."""
        raise NotImplementedError

    def observed(self, modules: Modules, expert: Expert, batches: Iterable[Tensor]) -> Mapping[str, CallRanges]:
        """Ranges of values on images, float32 (n, 3, height, width). Raises as ``pack``."""
        raise WeightsMismatch(expert.id, f"{self.name} takes no calibration")
