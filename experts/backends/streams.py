"""Work that torch has put on a CUDA stream, waited for where something else reads the outcome."""

from __future__ import annotations

import torch


def await_writes(device: torch.device) -> None:
    """Wait until what torch writes on this thread's stream is written, for whoever reads it on another stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
