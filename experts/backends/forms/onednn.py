"""onednn-fp32, onednn-bf16: oneDNN's own operators, fused, from weights in its own layout; on the CPU only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from experts.backends.forms.base import Form

if TYPE_CHECKING:
    from experts.backends.base import Packable, Skeleton
    from experts.backends.forms.base import Modules
    from experts.expert import Expert


class OnednnForm(Form):
    is_of_the_box = True

    def why_absent(self) -> str | None:
        import torch

        from experts.backends.onednn import operators

        return operators.why_absent(getattr(torch, self.numbers))

    def recipe(self) -> str:
        from experts.backends.onednn.operators import identity

        return identity() if self.why_absent() is None else ""

    def pack(self, modules: Modules, expert: Expert) -> Packable:
        from experts.backends.onednn.execution import packed

        return packed(self, modules, expert)

    def template(self, modules: Modules, expert: Expert, program: bytes, device: str) -> object:
        from experts.backends.onednn.execution import proven

        return modules.prototype(expert), proven(self, modules, expert, program)

    def skeleton(self, modules: Modules, expert: Expert, program: bytes, device: str) -> Skeleton:
        from experts.backends.onednn.execution import skeleton

        return skeleton(self, modules, expert, program, device)
