"""Whether a form runs on this CPU: tried, whatever torch or oneDNN say of the CPU's instructions."""

import json
import os
import platform
import subprocess
import sys
from functools import cache

import pytest
import torch

from experts.backends.forms import FORMS, runs_as
from experts.backends.forms.plain import is_multiplied
from experts.backends.onednn import operators
from experts.expert import Precision

ASKED = """
import json
from experts.backends.forms import FORMS, executable_forms
from experts.backends.onednn.operators import identity, weight_highest
reasons = {name: form.why_absent() for name, form in FORMS.items()}
print(json.dumps({"reasons": reasons, "executable": sorted(executable_forms()), "identity": identity(),
    "greatest": weight_highest(), "named": FORMS["onednn-int8"].name_here, "recipe": FORMS["onednn-int8"].recipe()}))
"""
HAS_VNNI = "vnni" in operators._cpu().get("flags", "") and "ONEDNN_MAX_CPU_ISA" not in os.environ
on_x86 = pytest.mark.skipif(
    platform.machine() not in {"x86_64", "AMD64"}, reason="oneDNN's sets of instructions of x86"
)


@cache
def asked(**environment):
    done = subprocess.run(
        [sys.executable, "-c", ASKED], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@on_x86
@pytest.mark.parametrize("told", [{}, {"ATEN_CPU_CAPABILITY": "avx2"}], ids=["oneDNN told", "torch told as well"])
def test_cpu_without_avx512_lacks_bf16_only(told):
    found = asked(ONEDNN_MAX_CPU_ISA="AVX2", **told)
    lacking = {form: reason for form, reason in found["reasons"].items() if reason is not None}
    assert lacking.keys() == {"onednn-bf16"}
    assert "avx512bw" in lacking["onednn-bf16"]
    forms = {"bf16", "fp16", "fp32", "onednn-fp32", "onednn-int8", "onnxruntime", "onnxruntime-int8"}
    assert set(found["executable"]) == forms


@on_x86
@pytest.mark.parametrize("told", ["AVX2", "AVX512_CORE"])
def test_weights_have_seven_bits_without_vnni_and_names_say_so(told):
    found = asked(ONEDNN_MAX_CPU_ISA=told)
    assert found["greatest"] == operators.NARROW
    assert found["named"] == "onednn-int8 (weights up to 63)"
    assert found["recipe"] == f"{found['identity']}, weights up to 63"


@pytest.mark.skipif(not HAS_VNNI, reason="this CPU has no VNNI")
def test_weights_have_eight_bits_with_vnni_and_names_of_earlier_files():
    found = asked()
    assert (found["greatest"], found["named"]) == (operators.WIDE, "onednn-int8")
    assert found["recipe"] == found["identity"]


def test_eight_bits_that_are_wrong_in_seven_bits_too_are_refused(monkeypatch):
    right = torch.ops.onednn.qlinear_pointwise
    monkeypatch.setattr(torch.ops.onednn, "qlinear_pointwise", lambda *given: right(*given) * 0.9)
    monkeypatch.setattr(operators, "weight_highest", operators.weight_highest.__wrapped__)
    assert operators.why_absent.__wrapped__(torch.int8) == "oneDNN's sums are off by 10% of the largest"


@on_x86
def test_forms_packed_for_other_instructions_have_another_identity():
    found = asked(ONEDNN_MAX_CPU_ISA="AVX2")["identity"]
    assert found != asked(ONEDNN_MAX_CPU_ISA="SSE41")["identity"]
    assert found == asked(ONEDNN_MAX_CPU_ISA="AVX2", ATEN_CPU_CAPABILITY="avx2")["identity"]  # another process


@pytest.mark.parametrize("factor", [0.9, float("nan")])
@pytest.mark.parametrize("name", ["_linear_pointwise", "_convolution_pointwise"])
def test_wrong_or_missing_operator_is_detected(monkeypatch, name, factor):
    right = getattr(torch.ops.mkldnn, name)
    monkeypatch.setattr(torch.ops.mkldnn, name, lambda *given: right(*given) * factor)
    off = "nan%" if factor != factor else "10%"
    assert operators.why_absent.__wrapped__(torch.float32) == f"oneDNN's sums are off by {off} of the largest"

    def refused(*_):
        raise RuntimeError("bf16 path needs avx512bw\nat convolution.cpp:12")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_convolution_weight", refused)
    assert operators.why_absent.__wrapped__(torch.float32) == "bf16 path needs avx512bw"


def test_form_that_does_not_run_is_replaced_by_the_next(monkeypatch):
    assert FORMS.keys() == set(Precision)
    monkeypatch.setattr(operators, "why_absent", lambda dtype: "sums are off")
    assert {runs_as(form) for form in Precision} == set(Precision) - {
        Precision.ONEDNN_FP32, Precision.ONEDNN_BF16, Precision.ONEDNN_INT8
    }  # fmt: skip
    assert (runs_as(Precision.ONEDNN_BF16), runs_as(Precision.ONEDNN_INT8)) == (Precision.BF16, Precision.FP32)


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16])
def test_cpu_that_emulates_16_bits_does_not_count_as_multiplying_them(monkeypatch, precision):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(["avx512_bw", "avx512_dq"], True))
    assert not is_multiplied(precision)
