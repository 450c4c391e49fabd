"""onednn-fp32, onednn-bf16, onednn-int8: oneDNN's own operators, fused, from weights in its layout; on the CPU only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from experts.backends.forms.base import Form

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from experts.backends.base import Packable, Skeleton
    from experts.backends.forms.base import Modules
    from experts.backends.onednn.quantised_weights import Ranges
    from experts.expert import Expert


class OnednnForm(Form):
    is_of_the_box = True

    def why_absent(self) -> str | None:
        import torch

        from experts.backends.onednn import operators

        return operators.why_absent(getattr(torch, self.numbers))

    def recipe(self) -> str:
        import torch

        from experts.backends.onednn.operators import made_for

        return made_for(getattr(torch, self.numbers)) if self.why_absent() is None else ""

    def pack(self, modules: Modules, expert: Expert) -> Packable:
        from experts.backends.onednn.execution import packed

        return packed(self, modules, expert)

    def template(self, modules: Modules, expert: Expert, program: bytes, device: str) -> object:
        from experts.backends.onednn.execution import proven

        return modules.prototype(expert), proven(self, modules, expert, program)

    def skeleton(self, modules: Modules, expert: Expert, program: bytes, device: str) -> Skeleton:
        from experts.backends.onednn.execution import skeleton

        return skeleton(self, modules, expert, program, device)


class OnednnInt8(OnednnForm):
    needs_calibration = True

    @property
    def name_here(self) -> str:
        """Name with the greatest weight, unless it is WIDE: a calibration's corrections hold for that weight alone."""
        from experts.backends.onednn.operators import WIDE, weight_highest

        is_narrow = self.why_absent() is None and weight_highest() < WIDE
        return f"{self.name} (weights up to {weight_highest()})" if is_narrow else str(self.name)

    def observed(self, modules: Modules, expert: Expert, batches: Iterable[Tensor]) -> Ranges:
        from experts.backends.onednn.execution import observed_ranges

        return observed_ranges(self, modules, expert, batches)
