"""Forms that run on this CPU, found by trying them, and forms that torch's architectures can be packed in.

Packing, profiling, serving, ``coserve doctor`` and the tests ask here, so all give the same answer.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from importlib.util import find_spec

import torch
from torch.nn.functional import linear

from experts.backends.onednn import operators as onednn
from experts.backends.onednn.backend_forms import ONEDNN_NUMBERS
from experts.backends.state_dict import DTYPES
from experts.errors import WeightsMismatch
from experts.expert import Expert, Precision

RUNTIME_PACKAGES = ("onnx", "onnxruntime", "onnxscript")
TORCH_FORMS = frozenset({Precision.FP32, Precision.BF16, Precision.FP16})
ONEDNN_FORMS = frozenset(ONEDNN_NUMBERS)
CPU_FORMS = ONEDNN_FORMS | {Precision.ONNXRUNTIME}
_INSTRUCTIONS = {  # as torch names them: of Intel and AMD, then of ARM
    Precision.BF16: ("avx512_bf16", "amx_bf16", "bf16"),
    Precision.FP16: ("avx512_fp16", "amx_fp16", "fp16_arith"),
}


def executable_forms() -> frozenset[Precision]:
    """torch's own forms, which another processor may run, and those that run on this CPU."""
    return TORCH_FORMS | {form for form in CPU_FORMS if why_absent(form) is None}


def forms_here() -> tuple[Precision, ...]:
    return tuple(form for form in Precision if why_absent(form) is None)


def why_absent(precision: Precision) -> str | None:
    """None where the form's operators answered rightly on a tiny tensor: each form is tried once in a process."""
    if precision in ONEDNN_FORMS:
        return onednn.why_absent(ONEDNN_NUMBERS[precision])
    if precision is Precision.ONNXRUNTIME:
        return _runtime_fault()
    return _torch_fault(DTYPES.get(precision, torch.bfloat16))  # int8 matrices are computed in bf16


def multiplies(precision: Precision) -> bool:
    """CPU has 16-bit products and oneDNN may use them. oneDNN alone says yes for bf16 wherever AVX-512 is."""
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    if not any(capabilities.get(name) for name in _INSTRUCTIONS[precision]):
        return False
    operators = torch.ops.mkldnn
    is_bf16 = precision is Precision.BF16
    return bool(operators._is_mkldnn_bf16_supported() if is_bf16 else operators._is_mkldnn_fp16_supported())


def runs_as(precision: Precision) -> Precision:
    """The form, or torch's form in its place where it does not run on this CPU."""
    return precision if precision not in CPU_FORMS or why_absent(precision) is None else precision.plain


def require_executable(expert: Expert, precision: Precision) -> None:
    """Raises WeightsMismatch with the reason and a remedy."""
    if precision in TORCH_FORMS:
        return
    reason = why_absent(precision) if precision in CPU_FORMS else "it is a form of language models"
    if reason is not None:
        raise WeightsMismatch(expert.id, f"{precision} does not run on this CPU: {reason}; choose auto or fp32")


def form_recipe(precision: Precision) -> str:
    """Versions and CPU that a form's bytes depend on: a change packs all experts again."""
    if precision not in CPU_FORMS or why_absent(precision) is not None:
        return ""
    if precision in ONEDNN_FORMS:
        return onednn.identity()
    from experts.backends.onnx.layout import runtime_identity

    return f"{runtime_identity()}, torch {version('torch')}, onnxscript {version('onnxscript')}"


@cache
def _runtime_fault() -> str | None:
    absent = [name for name in RUNTIME_PACKAGES if find_spec(name) is None]
    if absent:
        return f"{', '.join(absent)} is not installed"
    from experts.backends.onnx.session import REFUSALS, try_runtime

    try:
        try_runtime()
    except (ImportError, ArithmeticError, *REFUSALS) as error:
        return f"ONNX Runtime does not work: {error}"
    return None


@cache
def _torch_fault(dtype: torch.dtype) -> str | None:
    images = torch.ones((1, 16, 4, 4), dtype=dtype)
    try:
        convolved = onednn.on_threads(1, lambda: torch.conv2d(images, torch.ones((8, 16, 3, 3), dtype=dtype)))
        found = onednn.on_threads(1, lambda: linear(convolved.flatten(1), torch.ones((4, 32), dtype=dtype)))
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return None if found.eq(144 * 32).all() else f"torch answers {found[0, 0]:g} for {144 * 32}"
