"""The registry of forms, in the order in which they are tried, for packing, profiling, serving and doctor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from experts.backends.forms.onednn import OnednnForm, OnednnInt8
from experts.backends.forms.onnxruntime import OnnxRuntimeForm, OnnxRuntimeInt8
from experts.backends.forms.plain import Int4Matrices, Int8Matrices, PlainForm
from experts.errors import WeightsMismatch
from experts.expert import Precision

if TYPE_CHECKING:
    from experts.backends.forms.base import Form
    from experts.expert import Expert

FORMS: dict[Precision, Form] = {
    form.name: form
    for form in (
        PlainForm(Precision.FP32, "float32"),
        PlainForm(Precision.BF16, "bfloat16"),
        PlainForm(Precision.FP16, "float16"),
        OnnxRuntimeForm(Precision.ONNXRUNTIME, "float32", Precision.FP32),
        OnednnForm(Precision.ONEDNN_FP32, "float32", Precision.FP32),
        OnednnForm(Precision.ONEDNN_BF16, "bfloat16", Precision.BF16),
        OnednnInt8(Precision.ONEDNN_INT8, "int8", Precision.FP32),
        OnnxRuntimeInt8(Precision.ONNXRUNTIME_INT8, "int8", Precision.FP32),
        Int8Matrices(Precision.INT8, "bfloat16"),
        Int4Matrices(Precision.INT4, "bfloat16"),
    )
}


def form_of(name: str) -> Form:
    return FORMS[Precision(name)]


def forms_here() -> tuple[Precision, ...]:
    return tuple(name for name, form in FORMS.items() if form.why_absent() is None)


def executable_forms() -> frozenset[Precision]:
    """Forms of torch's architectures: torch's own, for any processor, and others that run on this CPU."""
    packing = [form for form in FORMS.values() if form.packs_modules]
    return frozenset(form.name for form in packing if not form.is_cpu_only or form.why_absent() is None)


def runs_as(name: Precision) -> Precision:
    """The form, or its plain form where it does not run on this CPU."""
    form = form_of(name)
    return form.plain if form.is_cpu_only and form.why_absent() is not None else name


def executable_form(expert: Expert, name: Precision) -> Form:
    """Raises WeightsMismatch with the reason and a remedy where the form does not run on this CPU."""
    form = form_of(name)
    reason = form.why_absent() if form.is_cpu_only else None
    if reason is not None:
        raise WeightsMismatch(expert.id, f"{name} does not run on this CPU: {reason}; choose auto or fp32")
    return form
