"""What moving weights and moving activations cost on this box, measured once for a form of moe_experts.

Each time is the least of a few: what other work adds belongs to no constant. Blocks are zeros meanwhile: what lies
in fresh memory may be numbers that a processor is slow with.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from experts.llm.dispatch import run_mlp
from experts.llm.quant import Int8Matrix
from experts.llm.tiers.predict import MoveCosts, RowsTime

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from experts.llm.config import Mlp
    from experts.llm.dispatch import MlpWeights
    from experts.llm.tiers.offload import BlockForm

REPEATS = 5
FEW_ROWS, MANY_ROWS = 1, 64
SHORT_BYTES = 4096  # a copy that takes as long as any copy does
LEAST_S = 1e-9


def measured_costs(
    form: BlockForm, kind: Mlp, host_block: Tensor, device_block: Tensor, copy: Callable[[int], None]
) -> MoveCosts:
    """Times of one block; overwrites both. ``copy``: so many bytes from host to device, done when it returns."""
    host_block.zero_()
    copy(form.size_bytes)
    on_host, on_device = form.weights(host_block, kind), form.weights(device_block, kind)
    short_s, whole_s = _least_s(lambda: copy(SHORT_BYTES)), _least_s(lambda: copy(form.size_bytes))
    bytes_per_s = form.size_bytes / max(whole_s - short_s, LEAST_S)
    row = _rows(on_host, 1, "cpu")
    device, cpu = _rows_time(on_device, str(device_block.device)), _rows_time(on_host, "cpu")
    return MoveCosts(bytes_per_s, short_s, row.nbytes, device, cpu)


def _rows_time(weights: MlpWeights, device: str) -> RowsTime:
    few_s, many_s = (_run_s(weights, _rows(weights, count, device)) for count in (FEW_ROWS, MANY_ROWS))
    per_row_s = max(many_s - few_s, 0.0) / (MANY_ROWS - FEW_ROWS)
    return RowsTime(per_row_s, max(few_s - per_row_s * FEW_ROWS, 0.0))


def _rows(weights: MlpWeights, count: int, device: str) -> Tensor:
    matrix = weights.down
    hidden = matrix.scale.shape[-1] if isinstance(matrix, Int8Matrix) else matrix.shape[-2]
    dtype = matrix.scale.dtype if isinstance(matrix, Int8Matrix) else matrix.dtype
    return torch.zeros((count, hidden), dtype=dtype, device=device)


def _run_s(weights: MlpWeights, rows: Tensor) -> float:
    def run() -> None:
        run_mlp(rows, weights)
        if rows.is_cuda:
            torch.cuda.synchronize()

    return _least_s(run)


def _least_s(act: Callable[[], None]) -> float:
    times = []
    with torch.inference_mode():
        for _ in range(REPEATS):
            began = time.perf_counter()
            act()
            times.append(time.perf_counter() - began)
    return min(times)
