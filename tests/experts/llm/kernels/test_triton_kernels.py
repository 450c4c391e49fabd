"""Triton's kernels without a device: interpreted they compute as torch does, compiled they fit each architecture.

The interpreter must be chosen before Triton is imported, so this module runs as a process of its own, too.
"""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from experts.llm import quant
from experts.llm.kernels import block_attention, device_products, trial
from experts.llm.kernels.block_attention import attend_blocks
from experts.llm.kernels.four_bits import Int4Matrix, quantise_to_four_bits
from experts.llm.quant import Int8Matrix, project
from tests.experts.llm.kernels.test_block_attention import arena_of

ROOT = Path(__file__).parents[4]
SHARED_BYTES = {80: 163 * 2**10, 86: 99 * 2**10, 87: 163 * 2**10, 90: 227 * 2**10}  # of a program, by architecture
FURTHER = ((80, torch.bfloat16), (90, torch.bfloat16), (86, torch.float32), (86, torch.float16))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BOUNDS = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 2e-3}
ATTENTIONS = {  # lengths, heads, kv heads, size, scale
    "one position": ((1,), 2, 2, 16, None),
    "odd lengths": ((33, 1, 16, 130), 12, 4, 96, 0.3),
    "one key head": ((17, 40), 5, 1, 80, None),
    "more queries than a tile": ((20,), 20, 1, 32, None),
    "large heads": ((100,), 8, 2, 256, 1.0),
    "several parts": ((530, 3), 4, 2, 64, None),
}
ODD = "sizes of no tile"  # which int4 does not have
PRODUCTS = {  # ends of the rows of each matrix, in, out
    "one row": ((1,), 64, 64),
    "several parts": ((5,), 544, 64),
    "all rows": ((16,), 96, 192),
    "matrices without rows": ((0, 3, 20, 20, 41, 41), 96, 64),
    "many rows": ((2, 90), 160, 64),
    ODD: ((3,), 81, 40),
}
FORMS = ("int8", "int4 of 64", "int4 of 32")
CASES = [
    *(f"attention, {name}, fp32" for name in ATTENTIONS),
    *(f"{form}, {name}, fp32" for form in FORMS for name in PRODUCTS if name != ODD or form == "int8"),
    *(f"{kind}, several parts, {dtype}" for kind in ("attention", *FORMS) for dtype in DTYPES if dtype != "fp32"),
    *(f"trial, {kind}, {dtype}" for kind in ("attention", "products") for dtype in DTYPES),
]
TRIALS = {"attention": block_attention.trial, "products": device_products.trial}
pytest.importorskip("triton", reason="torch brings no Triton for this machine")


def interpret():
    """Print the relative error of each case, as JSON."""
    from triton import language as tl
    from triton.runtime import interpreter

    dot = interpreter.InterpreterBuilder.create_dot

    def numbers_of(handle):  # the interpreter multiplies the bits of bf16 as integers
        if handle.dtype.scalar is not tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    interpreter.InterpreterBuilder.create_dot = lambda self, left, right, *others: dot(
        self, numbers_of(left), numbers_of(right), *others
    )
    with np.errstate(divide="ignore"):  # the logarithm of a part without positions
        json.dump({case: error_of(*case.split(", ")) for case in CASES}, sys.stdout)


def error_of(kind, name, form):
    dtype = DTYPES[form]
    if kind == "trial":
        found, exact = TRIALS[name](torch.device("cpu"), dtype)
    elif kind == "attention":
        found, exact = attention_results(*ATTENTIONS[name], dtype)
    else:
        found, exact = product_results(kind, *PRODUCTS[name], dtype)
    assert found.dtype is dtype
    return float((found.float() - exact.float()).norm() / exact.float().norm())


def attention_results(lengths, heads, kv_heads, size, scale, dtype):
    from experts.llm.kernels.triton_kernels import attend

    keys, values, tables, _ = arena_of(lengths, kv_heads, size, dtype)
    queries = torch.randn((len(lengths), 2 * heads, size), generator=torch.Generator().manual_seed(1)).to(dtype)
    queries = queries[:, :heads]
    inputs = tables, torch.tensor(lengths, dtype=torch.int32), max(lengths), scale or size**-0.5
    exact = attend_blocks(queries.float(), keys.float(), values.float(), *inputs)
    return attend(queries, keys, values, *inputs), exact


def product_results(form, ends, in_size, out_size, dtype):
    from experts.llm.kernels.triton_kernels import multiply

    exact = torch.randn((len(ends), out_size, in_size), generator=torch.Generator().manual_seed(out_size))
    rows = torch.randn((ends[-1], in_size), generator=torch.Generator().manual_seed(1)).to(dtype)
    packed = quant.quantise(exact, dtype) if form == "int8" else quantise_to_four_bits(exact, int(form[-2:]))
    one = packed[0] if len(ends) == 1 else packed
    found = multiply(rows, one.values, one.scale, torch.tensor(ends, dtype=torch.int32) if one is packed else None)
    own = rows.float().tensor_split(ends[:-1])
    return found, torch.cat(
        [packed[number : number + 1].stacked_product(each[None])[0] for number, each in enumerate(own)]
    )


@pytest.fixture(scope="module")
def errors():
    command, environment = [sys.executable, "-m", __name__], os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES)
def test_interpreted_kernels_compute_what_torch_does(case, errors):
    assert errors[case] <= BOUNDS[case[-4:]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("kernel", TRIALS)
def test_device_passes_the_trial_of_a_kernel(kernel, dtype):
    assert trial.is_right(TRIALS[kernel], torch.device("cuda"), dtype)


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="cuda")


def attention_inputs(dtype, size=128, longest=900):
    """Of three sequences in a layered arena; without the scale."""
    arena = empty(9, 2, 2, 4, 16, size, dtype=dtype)
    numbers = empty(3, 60, dtype=torch.int32), empty(3, dtype=torch.int32)
    return empty(3, 8, size, dtype=dtype), arena[:, 1, 0], arena[:, 1, 1], *numbers, longest


def packed_matrices(dtype, *stacked):
    yield Int8Matrix(empty(*stacked, 256, 128, dtype=torch.int8), empty(*stacked, 256, dtype=dtype))
    for half in (32, 16):
        yield Int4Matrix(empty(*stacked, 128 // half, 128, half, dtype=torch.uint8), empty(*stacked, 4, 256, 2))


class Compiling:
    """A kernel that is compiled, instead of launched, for fake tensors of a device."""

    def __init__(self, kernel, compiled):
        self.kernel, self.compiled = kernel, compiled

    def __getitem__(self, grid):
        def compile(*arguments, **options):
            self.compiled.append(self.kernel.warmup(*map(self.known, arguments), grid=grid, **options))

        return compile

    @staticmethod
    def known(argument):
        assert not isinstance(argument, torch.Tensor) or argument.is_cuda
        return getattr(argument, "dtype", argument)


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [(86, torch.bfloat16), (87, torch.bfloat16), *(pytest.param(*one, marks=pytest.mark.slow) for one in FURTHER)],
)
def test_launched_kernels_are_assembled_for_each_architecture(architecture, dtype, monkeypatch, tmp_path):
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from experts.llm.kernels import triton_kernels

    compiled, target = [], GPUTarget("cuda", architecture, 32)
    here = {"get_current_target": lambda: target, "get_current_device": lambda: architecture}
    monkeypatch.setattr(driver, "_active", SimpleNamespace(**here, get_current_stream=lambda _: 0))
    monkeypatch.setattr(torch.cuda, "device_of", lambda _: nullcontext())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for name in ("attended", "multiplied"):
        monkeypatch.setattr(triton_kernels, name, Compiling(getattr(triton_kernels, name), compiled))
    with FakeTensorMode():
        for inputs in (attention_inputs(dtype), attention_inputs(dtype, size=80, longest=40)):
            triton_kernels.attend(*inputs, 0.1)
        one = next(packed_matrices(dtype))
        triton_kernels.multiply(empty(5, 128, dtype=dtype), one.values, one.scale, None)
        for one in packed_matrices(dtype, 3):
            rows, ends = empty(400, 128, dtype=dtype), empty(3, dtype=torch.int32)
            triton_kernels.multiply(rows, one.values, one.scale, ends)
    assert len(compiled) == 6
    assert all({"ptx", "cubin"} <= one.asm.keys() for one in compiled)
    assert max(one.metadata.shared for one in compiled) <= SHARED_BYTES[architecture]


def test_fake_tensors_of_a_device_pass_without_a_synchronisation(monkeypatch):
    sizes, block = [], Int8Matrix.block
    monkeypatch.setattr(quant, "DEVICE_BLOCK_BYTES", 2**14)
    monkeypatch.setattr(Int8Matrix, "block", lambda *own: sizes.append(own[3].nbytes) or block(*own))
    with FakeTensorMode():
        inputs = attention_inputs(torch.bfloat16)
        attended = attend_blocks(*inputs)
        assert (attended.shape, attended.device, attended.dtype) == (inputs[0].shape, inputs[0].device, torch.bfloat16)
        for count in (3, 40):
            for matrix in packed_matrices(torch.bfloat16):
                projected = project(empty(count, 128), matrix, empty(256))
                assert (projected.shape, projected.device) == ((count, 256), attended.device)
    assert max(sizes) == 2**14  # bytes of a matrix that are numbers at once


@pytest.mark.parametrize(("found", "is_right"), [(1.001, True), (1.1, False), (float("nan"), False), (None, False)])
def test_kernel_that_deviates_in_its_trial_or_does_not_compile_is_not_used(found, is_right):
    def tried(*_):
        return torch.full((3,), found), torch.ones(3)  # without a number it raises

    assert trial.is_right(tried, torch.device("cpu"), torch.bfloat16) is is_right


if __name__ == "__main__":
    interpret()
