"""int8: matrices of language models in a byte a number, computed with in bf16 (``experts.llm.quant``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from experts.backends.forms.plain import PlainForm
from experts.errors import WeightsMismatch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from experts.backends.base import Packable
    from experts.backends.forms.base import Modules
    from experts.expert import Expert


class Int8Matrices(PlainForm):
    packs_modules = False
    is_automatic = False
    text_recipe = ", embeddings that are heads in int8"

    def pack(self, modules: Modules, expert: Expert) -> Packable:
        raise WeightsMismatch(
            expert.id, f"{self.name} does not run on this CPU: it is a form of language models; choose auto or fp32"
        )

    def text_tensor(self, expert: str, name: str, stored: Tensor) -> Tensor:
        return stored

    def text_tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        from experts.llm.quant import Int8Tensors

        return Int8Tensors(tensors, self.dtype)
