"""Which forms torch's architectures can be executed in here."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from importlib.util import find_spec

from experts.backends.onednn import operators as onednn
from experts.backends.onednn.backend_forms import ONEDNN_NUMBERS
from experts.errors import WeightsMismatch
from experts.expert import Expert, Precision

RUNTIME_PACKAGES = ("onnx", "onnxruntime", "onnxscript")
TORCH_FORMS = frozenset({Precision.FP32, Precision.BF16, Precision.FP16})
ONEDNN_FORMS = frozenset(ONEDNN_NUMBERS)


def executable_forms() -> frozenset[Precision]:
    """Those that torch executes, and those of ONNX Runtime and of oneDNN where what they take is there."""
    return frozenset(form for form in _ALL if why_absent(form) is None)


def why_absent(precision: Precision) -> str | None:
    """What a form takes that is not there; None where nothing is."""
    if precision is Precision.ONNXRUNTIME:
        return ", ".join(_absent_packages()) or None
    if precision in ONEDNN_FORMS:
        return onednn.why_absent(ONEDNN_NUMBERS[precision])
    return None if precision in TORCH_FORMS else "a language model"


def require_executable(expert: Expert, precision: Precision) -> None:
    """Raises WeightsMismatch, naming what is absent, for a form that is not among them."""
    absent = why_absent(precision)
    if absent is not None:
        raise WeightsMismatch(expert.id, f"{precision} takes {absent}, which is not here: choose fp32 or bf16")


def form_recipe(precision: Precision) -> str:
    """What decides on the bytes of a form beside the expert; once it changes, all are packed again."""
    if precision in TORCH_FORMS or why_absent(precision) is not None:
        return ""
    if precision in ONEDNN_FORMS:
        return onednn.identity()
    from experts.backends.onnx.layout import runtime_identity

    return f"{runtime_identity()}, torch {version('torch')}, onnxscript {version('onnxscript')}"


@cache
def _absent_packages() -> tuple[str, ...]:
    return tuple(name for name in RUNTIME_PACKAGES if find_spec(name) is None)


_ALL = TORCH_FORMS | ONEDNN_FORMS | {Precision.ONNXRUNTIME}
