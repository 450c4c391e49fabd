"""Contract of a form: one way to pack and execute an expert's weights.

The module of a form states its name, its devices and its proof. Methods import torch and ONNX Runtime.
``modules`` is the backend whose torch modules the form executes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

from experts.backends.base import RefusedModule
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

Made = TypeVar("Made")


class Modules(ABC):
    """A family of torch modules. ``outputs``: entries of a module's mapping, in order, or its one output's name.

    ``is_replayable``: a module answers one tensor, and keeps none of its own that depends on the batch.
    """

    outputs: ClassVar[tuple[str, ...]]
    is_replayable: ClassVar[bool] = False

    @abstractmethod
    def structure(self, expert: Expert) -> Hashable:
        """Key of the module, in addition to its input size. Raises WeightsMismatch without a module."""

    @abstractmethod
    def prototype(self, expert: Expert) -> object:
        """Template of the expert's module: while it lives, ``module`` makes none. Raises WeightsMismatch."""

    @abstractmethod
    def module(self, structure: Any) -> Module:  # noqa: ANN401  a family's own
        """The module as it runs: folded, on meta. Callers do not change it."""

    @abstractmethod
    def sample(self, structure: Any) -> dict[str, Tensor]:  # noqa: ANN401
        """Synthetic weights of the module, float32; equal at each call."""

    @abstractmethod
    def weights(self, expert: Expert, form: Form) -> dict[str, Tensor]:
        """The expert's weights by their names in the module, in the form's dtype. Raises as ``Backend.pack``."""

    @abstractmethod
    def reader(self, expert: Expert) -> Reader:
        """Function from a module's outputs to predictions. Raises WeightsMismatch without a module."""

    def condensed(self, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Smaller outputs with the reader's answer unchanged; computed on a device, before they are copied to the host.

        Asks for no value.
        """
        return outputs

    @abstractmethod
    def plain_skeleton(self, expert: Expert, dtype: torch.dtype, device: str) -> Skeleton:
        """Skeleton of a module that torch runs in this dtype."""

    @abstractmethod
    def unseen_structure(self, expert: Expert) -> bytes:
        """Part of the module's structure that shows in no shape of a weight."""


class Form:
    """One form. ``plain``: torch's form that replaces it on another device, or where the form is absent.

    ``numbers``: dtype of its products, as torch names it. ``plain`` has the same numbers; for eight bits it is fp32.
    """

    packs_modules: ClassVar[bool] = True  # False: a form of language models alone
    needs_calibration: ClassVar[bool] = False  # on sample images; further samples have to prove the form
    is_of_the_box: ClassVar[bool] = False  # a profile holds only for boxes with the same forms of this kind
    is_automatic: ClassVar[bool] = True  # False: runs only where a line file names it

    def __init__(self, name: Precision, numbers: str = "float32", plain: Precision | None = None) -> None:
        self.name = name
        self.plain = plain or name
        self.numbers = numbers

    @property
    def name_here(self) -> str:
        """Name with a restriction of this CPU: of the form's ranges in a calibration, and in reports."""
        return str(self.name)

    @property
    def is_cpu_only(self) -> bool:
        return self.plain is not self.name

    @property
    def has_numbers_of_fp32(self) -> bool:
        """True if only the order of sums differs from torch's fp32, so that outputs prove the form."""
        return self.numbers == "float32" and self.is_cpu_only and not self.needs_calibration

    def is_emulated(self) -> bool:
        """True where the CPU lacks instructions for its numbers, and is slower in it than in fp32."""
        return False

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights before packing, and of values other than products of ``numbers``."""
        import torch

        found: torch.dtype = torch.float32 if self.numbers == "int8" else getattr(torch, self.numbers)
        return found

    @property
    def steps_aside(self) -> bool:
        """True if ``auto`` skips the form on this CPU, as a form of equal numbers is faster."""
        return False

    def why_absent(self) -> str | None:
        """Reason why the form does not run on this CPU; None: its operators computed a tiny tensor correctly."""
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

    def accepted(self, expert: Expert, made: Made | RefusedModule) -> Made:
        """Raises WeightsMismatch, with the reason and a remedy, where the expert's module is refused."""
        if isinstance(made, RefusedModule):
            reason = f"{expert.architecture} does not run in {self.name}: {made.reason}; choose {self.plain}"
            raise WeightsMismatch(expert.id, reason)
        return made
