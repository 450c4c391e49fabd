"""Work that torch has put on a CUDA stream, waited for where something else reads the outcome."""

from __future__ import annotations

import torch


def await_writes(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
