"""onnxruntime: fp32 by ONNX Runtime, from weights in its layout; on the CPU only. And its form in eight bits.

onnxruntime-int8 is for calibrated experts. ``auto`` tries it on CPUs with AVX2 and without VNNI: weights have seven
bits there, and it is faster than oneDNN's seven bits in some models.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING

from experts.backends.forms.base import Form

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from experts.backends.base import Packable, Skeleton
    from experts.backends.forms.base import Modules
    from experts.calibrations import CallRanges
    from experts.expert import Expert

RUNTIME_PACKAGES = ("onnx", "onnxruntime", "onnxscript")


class OnnxRuntimeForm(Form):
    def why_absent(self) -> str | None:
        return runtime_fault()

    def recipe(self) -> str:
        if self.why_absent() is not None:
            return ""
        from experts.backends.ort.layout import runtime_identity

        return f"{runtime_identity()}, torch {version('torch')}, onnxscript {version('onnxscript')}"

    def pack(self, modules: Modules, expert: Expert) -> Packable:
        from experts.backends.ort.execution import packed

        return packed(self, modules, expert)

    def skeleton(self, modules: Modules, expert: Expert, program: bytes, device: str) -> Skeleton:
        from experts.backends.ort.execution import RuntimeSkeleton

        return RuntimeSkeleton(f"{expert.architecture} in {self.name}", program, device, modules.reader(expert))


@cache
def runtime_fault() -> str | None:
    absent = [name for name in RUNTIME_PACKAGES if find_spec(name) is None]
    if absent:
        return f"{', '.join(absent)} is not installed"
    from experts.backends.ort.session import REFUSALS, try_runtime

    try:
        try_runtime()
    except (ImportError, ArithmeticError, *REFUSALS) as error:
        return f"ONNX Runtime does not work: {error}"
    return None


class OnnxRuntimeInt8(OnnxRuntimeForm):
    needs_calibration = True

    @property
    def steps_aside(self) -> bool:
        import torch

        from experts.backends.onednn.operators import WIDE, weight_highest, why_absent

        return why_absent(torch.int8) is None and weight_highest() == WIDE

    def why_absent(self) -> str | None:
        if (fault := runtime_fault()) is not None:
            return fault
        from experts.backends.ort.eight_bits import weight_highest
        from experts.backends.ort.session import REFUSALS

        try:
            return None if weight_highest() else "ONNX Runtime's sums of eight bits are wrong"
        except REFUSALS as error:
            return f"ONNX Runtime does not multiply eight bits: {error}"

    def recipe(self) -> str:
        if self.why_absent() is not None:
            return ""
        from experts.backends.ort.eight_bits import weight_highest

        return f"{super().recipe()}, weights up to {weight_highest()}"

    def pack(self, modules: Modules, expert: Expert) -> Packable:
        from experts.backends.ort.eight_bits import packed

        return packed(self, modules, expert)

    def observed(self, modules: Modules, expert: Expert, batches: Iterable[Tensor]) -> Mapping[str, CallRanges]:
        from experts.backends.ort.eight_bits import observed_ranges

        return observed_ranges(self, modules, expert, batches)
