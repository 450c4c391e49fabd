"""Which forms torch's architectures can be executed in here."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from importlib.util import find_spec

from experts.errors import WeightsMismatch
from experts.expert import Expert, Precision

RUNTIME_PACKAGES = ("onnx", "onnxruntime", "onnxscript")
TORCH_FORMS = frozenset({Precision.FP32, Precision.BF16, Precision.FP16})


@cache
def executable_forms() -> frozenset[Precision]:
    """Those that torch executes, and ONNX Runtime's where the packages that it takes are installed."""
    return TORCH_FORMS if _absent_packages() else TORCH_FORMS | {Precision.ONNXRUNTIME}


def require_executable(expert: Expert, precision: Precision) -> None:
    """Raises WeightsMismatch, naming what is absent, for a form that is not among them."""
    if precision not in executable_forms():
        absent = ", ".join(_absent_packages())
        raise WeightsMismatch(expert.id, f"{precision} takes {absent}: install that, or choose fp32 or bf16")


def runtime_recipe(precision: Precision) -> str:
    """What decides on the bytes of ONNX Runtime's form beside the expert; once it changes, all are packed again."""
    if precision not in executable_forms() - TORCH_FORMS:
        return ""
    from experts.backends.onnx.layout import runtime_identity

    return f"{runtime_identity()}, torch {version('torch')}, onnxscript {version('onnxscript')}"


def _absent_packages() -> list[str]:
    return [name for name in RUNTIME_PACKAGES if find_spec(name) is None]
