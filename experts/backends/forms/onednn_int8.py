"""onednn-int8: calibrated experts in eight bits by eight, fused, by oneDNN's own operators; on the CPU only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from experts.backends.forms.onednn import OnednnForm

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from experts.backends.forms.base import Modules
    from experts.backends.onednn.quantised_weights import Ranges
    from experts.expert import Expert


class OnednnInt8(OnednnForm):
    needs_calibration = True

    def observed(self, modules: Modules, expert: Expert, batches: Iterable[Tensor]) -> Ranges:
        from experts.backends.onednn.execution import observed_ranges

        return observed_ranges(self, modules, expert, batches)
