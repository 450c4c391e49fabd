"""fp32, bf16, fp16: torch's modules and language models as torch runs them. int8, int4: language models' matrices."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from experts.backends.base import Packable
from experts.backends.forms.base import Form
from experts.errors import WeightsMismatch
from experts.expert import Precision

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor

    from experts.backends.base import Skeleton
    from experts.backends.forms.base import Modules
    from experts.expert import Expert

_INSTRUCTIONS = {  # torch's names: of Intel and AMD, then of ARM
    Precision.BF16: ("avx512_bf16", "amx_bf16", "bf16"),
    Precision.FP16: ("avx512_fp16", "amx_fp16", "fp16_arith"),
}


class PlainForm(Form):
    @property
    def text_recipe(self) -> str:
        """Recipe in manifests of language models."""
        return ""

    def why_absent(self) -> str | None:
        return _torch_fault(self.dtype)

    def is_emulated(self) -> bool:
        return self.name in _INSTRUCTIONS and not is_multiplied(self.name)

    def pack(self, modules: Modules, expert: Expert) -> Packable:
        return Packable(modules.weights(expert, self), modules.unseen_structure(expert))

    def template(self, modules: Modules, expert: Expert, program: bytes, device: str) -> object:
        return modules.prototype(expert)

    def skeleton(self, modules: Modules, expert: Expert, program: bytes, device: str) -> Skeleton:
        if device.startswith("cuda"):
            refuse_tf32()
        return modules.plain_skeleton(expert, self.dtype, device)

    def text_tensor(self, expert: str, name: str, stored: Tensor) -> Tensor:
        """A language model's tensor in this form. Raises WeightsMismatch where a value leaves its range."""
        from experts.backends.state_dict import cast

        return stored if stored.dtype == self.dtype else cast(expert, name, stored, self)

    def text_tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """A language model's tensors as they are packed; each is read at its use."""
        return tensors


def refuse_tf32() -> None:
    """Let CUDA compute fp32 as fp32: convolutions round their factors to TF32's ten bits by default.

    Both flags belong to the process, so TF32 cannot be the form of one expert beside fp32 of another.
    """
    import torch

    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def is_multiplied(name: Precision) -> bool:
    """True where the CPU multiplies these 16 bits and oneDNN may use it; oneDNN alone would answer yes for AVX-512."""
    import torch

    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    if not any(capabilities.get(each) for each in _INSTRUCTIONS[name]):
        return False
    operators = torch.ops.mkldnn
    is_bf16 = name is Precision.BF16
    return bool(operators._is_mkldnn_bf16_supported() if is_bf16 else operators._is_mkldnn_fp16_supported())


@cache
def _torch_fault(dtype: torch.dtype) -> str | None:
    import torch
    from torch.nn.functional import linear

    from experts.backends.onednn.operators import on_threads

    images = torch.ones((1, 16, 4, 4), dtype=dtype)
    try:
        convolved = on_threads(1, lambda: torch.conv2d(images, torch.ones((8, 16, 3, 3), dtype=dtype)))
        found = on_threads(1, lambda: linear(convolved.flatten(1), torch.ones((4, 32), dtype=dtype)))
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return None if found.eq(144 * 32).all() else f"torch answers {found[0, 0]:g} for {144 * 32}"


class Int8Matrices(PlainForm):
    packs_modules = False
    is_automatic = False

    @property
    def name_here(self) -> str:
        """With what multiplies: compiled products of this CPU, or torch, which is several times slower."""
        from experts.llm.kernels.products import kernel

        return f"{self.name} by {kernel() or 'torch'}"

    @property
    def dtype(self) -> torch.dtype:
        """bf16 where the CPU has instructions for it: emulated, it computes an eighth of fp32."""
        import torch

        return torch.bfloat16 if is_multiplied(Precision.BF16) else torch.float32

    @property
    def text_recipe(self) -> str:
        return ", embeddings that are heads in int8" + ("" if self.dtype.itemsize == 2 else ", computed in fp32")

    def pack(self, modules: Modules, expert: Expert) -> Packable:
        raise WeightsMismatch(
            expert.id, f"{self.name} does not run on this CPU: it is a form of language models; choose auto or fp32"
        )

    def text_tensor(self, expert: str, name: str, stored: Tensor) -> Tensor:
        return stored

    def text_tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        from experts.llm.quant import Int8Tensors

        return Int8Tensors(tensors, self.dtype)


class Int4Matrices(Int8Matrices):
    @property
    def text_recipe(self) -> str:
        """A CPU whose kernel has other blocks packs again."""
        from experts.llm.kernels.four_bits import lanes_here

        return f", four bits in blocks of {lanes_here()} rows{super().text_recipe}"

    def text_tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        from experts.llm.quant import Int4Tensors

        return Int4Tensors(tensors, self.dtype)
