"""onnxruntime-int8: calibrated experts whose convolutions ONNX Runtime computes in eight bits; on the CPU only.

For CPUs with AVX2 and without VNNI, where oneDNN's eight bits saturate; weights have seven bits there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from experts.backends.forms.onnxruntime import OnnxRuntimeForm, runtime_fault

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from experts.backends.base import Packable
    from experts.backends.forms.base import Modules
    from experts.calibrations import CallRanges
    from experts.expert import Expert


class OnnxRuntimeInt8(OnnxRuntimeForm):
    needs_calibration = True

    @property
    def steps_aside(self) -> bool:
        import torch

        from experts.backends.onednn.operators import why_absent

        return why_absent(torch.int8) is None

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
