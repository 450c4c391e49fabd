"""Trial of the runtimes on this box: mismatched libraries fail at their first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.runtime.machine.box import Box


def check_runtimes(box: Box) -> dict[str, str | None]:
    """Fault of each runtime; None: the runtime works."""
    from experts.backends.ort.session import try_runtime

    tried: dict[str, Callable[[], None]] = {"torchvision": _suppress_boxes, "onnxruntime": try_runtime}
    if "cuda" in box.processors:
        tried["cuda"] = lambda: _multiply("cuda")
    if "mps" in box.processors:
        tried["mps"] = lambda: _multiply("mps")
    tried["torch"] = lambda: _multiply("cpu")
    return {name: _fault(work) for name, work in sorted(tried.items())}


def _fault(work: Callable[[], None]) -> str | None:
    try:
        work()
    except Exception as error:  # noqa: BLE001  # the finding
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    return None


def _multiply(device: str) -> None:
    import torch

    square = torch.ones((64, 64), device=device)
    if float((square @ square).sum().cpu()) != 64.0**3:
        raise ArithmeticError(f"{device} does not multiply as it should")


def _suppress_boxes() -> None:
    """Call an operator that is missing if torch and torchvision do not match."""
    import torch
    from torchvision.ops import nms

    boxes = torch.tensor([[0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0]])
    if nms(boxes, torch.tensor([0.9, 0.8]), 0.5).tolist() != [0]:
        raise ArithmeticError("torchvision's nms does not suppress")
