"""Compiled products: torch's up to a bound, alike for any threads and rows, and not used where they deviate."""

import json
import platform
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

import pytest
import torch

from experts.llm import model, quant
from experts.llm.arenas import extents
from experts.llm.arenas.extents import ModelKeyValues
from experts.llm.files.config import RopeSpec
from experts.llm.kernels import products
from experts.llm.kernels.four_bits import LANES, quantise_to_four_bits
from experts.llm.token_batch import Chunk, TokenBatch

CPU_FLAGS = Path("/proc/cpuinfo").read_text("utf-8") if platform.system() == "Linux" else ""
NEEDS_KERNEL = pytest.mark.skipif(products.kernel() is None, reason="no compiled products for this CPU")
# relative, in fp32: rows rounded to sixteen bits for int8, to eight bits for int4; bf16 rounds results to eight bits
BOUNDS = {"int8": 1e-4, "int4 of 32": 0.01, "int4 of 64": 0.01}


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def matrix_in(form, out_size, in_size):
    exact = draw(out_size, in_size, seed=out_size) / in_size**0.5
    return quant.quantise(exact, torch.float32) if form == "int8" else quantise_to_four_bits(exact, int(form[-2:]))


def relative_error(found, exact):
    return float((found.double() - exact.double()).norm() / exact.double().norm())


@pytest.fixture
def torch_alone(monkeypatch):
    def run(*arguments, **options):
        with monkeypatch.context() as patch:
            patch.setattr(quant, "takes_product", lambda *_: False)
            return quant.project(*arguments, **options)

    return run


@pytest.mark.skipif(platform.machine() != "x86_64" or " avx2 " not in CPU_FLAGS, reason="compiled for AVX2 alone")
def test_installed_environment_has_products_of_this_cpu():
    told = [one.read_text("direct_url.json") for one in distributions(name="coserve")]
    if Path(__file__).parents[4].as_uri() not in [json.loads(one)["url"] for one in told if one]:
        pytest.skip("the environment is of another tree")
    assert products.kernel() in ({"avx512vnni"} if "avx512_vnni" in CPU_FLAGS else {"avxvnni", "avx2"})
    assert quant.has_product(is_int4=False)
    assert quant.has_product(is_int4=True)


@NEEDS_KERNEL
@pytest.mark.parametrize("form", BOUNDS)
@pytest.mark.parametrize(("out_size", "in_size"), [(64, 32), (128, 96), (192, 1056), (320, 2080)])
@pytest.mark.parametrize("rows", [1, 2, 7, 33])
def test_product_is_torch_s_within_its_bound(form, out_size, in_size, rows, torch_alone):
    matrix, tokens, bias = matrix_in(form, out_size, in_size), draw(rows, in_size), draw(out_size, seed=1)
    exact = torch_alone(tokens, matrix, bias) if rows > quant.FEW_INT4_ROWS else None
    if exact is None:  # torch's kernels of few rows round them to bf16
        many = tokens.repeat(quant.FEW_INT4_ROWS + 1, 1)
        exact = torch_alone(many, matrix, bias)[:rows]
    assert relative_error(quant.project(tokens, matrix, bias), exact) < BOUNDS[form]


@NEEDS_KERNEL
@pytest.mark.parametrize("form", BOUNDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_gate_before_a_matrix_are_torch_s(form, dtype, torch_alone):
    matrix = matrix_in(form, 128, 96)
    norm = quant.RootMeanSquare((1 + draw(96, seed=3) / 4).to(dtype), 1e-5)
    bound = BOUNDS[form] + (0.02 if dtype is torch.bfloat16 else 0)
    many = draw(quant.FEW_INT4_ROWS + 1, 96, seed=4).to(dtype) * 30
    for rows, options in ((many, {"norm": norm}), (torch.cat((many / 10, many / 30), dim=1), {"is_gated": True})):
        exact = torch_alone(rows.float(), matrix, **_in_fp32(options))
        assert relative_error(quant.project(rows[:5], matrix, **options), exact[:5]) < bound


def _in_fp32(options):
    return {
        name: quant.RootMeanSquare(one.weight.float(), one.epsilon) if name == "norm" else one
        for name, one in options.items()
    }


@NEEDS_KERNEL
@pytest.mark.parametrize("form", BOUNDS)
def test_result_does_not_depend_on_threads_neighbours_or_room(form, monkeypatch):
    matrix, tokens = matrix_in(form, 512, 512), draw(40, 512)
    together, before = quant.project(tokens, matrix), torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            alone = torch.cat([quant.project(row[None], matrix) for row in tokens])
            assert torch.equal(alone, together)
    finally:
        torch.set_num_threads(before)
    few = torch.empty(3 * (12 * 16 + 2 * 512), dtype=torch.uint8)  # three rows at once, or a few more
    monkeypatch.setattr(quant, "product_room", lambda: few)
    assert torch.equal(quant.project(tokens, matrix), together)


@NEEDS_KERNEL
@pytest.mark.parametrize("form", BOUNDS)
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_row_that_is_not_finite_gives_no_finite_number_and_its_neighbour_does(form, broken):
    tokens = draw(2, 128)
    tokens[0, 37] = broken
    found = quant.project(tokens, matrix_in(form, 64, 128))
    assert not found[0].isfinite().any()
    assert found[1].isfinite().all()


@NEEDS_KERNEL
@pytest.mark.parametrize("form", BOUNDS)
def test_bytes_of_another_kind_are_multiplied_by_torch_and_not_misread(form):
    matrix, tokens = matrix_in(form, 128, 96), draw(3, 96)
    bias, norm = draw(128, seed=1), quant.RootMeanSquare(draw(96, seed=2), 1e-5)
    exact = quant.project(tokens, matrix, bias, norm=norm)
    apart = torch.stack((bias, bias), dim=1)[:, 0]  # with a gap between its numbers
    assert relative_error(quant.project(tokens, matrix, apart, norm=norm), exact) < 0.02
    assert relative_error(quant.project(tokens, matrix, bias.double(), norm=norm), exact) < 0.02


@NEEDS_KERNEL
@pytest.mark.parametrize("form", BOUNDS)
def test_row_of_zeros_gives_zeros(form):
    assert not quant.project(torch.zeros(2, 64), matrix_in(form, 64, 64)).any()


@NEEDS_KERNEL
def test_packed_bytes_of_either_kernel_of_torch_are_read_alike():
    exact, tokens = draw(128, 64), draw(3, 64, seed=1)
    first, second = (quant.project(tokens, quantise_to_four_bits(exact, lanes)) for lanes in LANES)
    assert torch.equal(first, second)


@pytest.mark.parametrize("is_int4", [False, True])
def test_product_that_deviates_is_not_used(is_int4, monkeypatch):
    monkeypatch.setattr(quant, "product", lambda rows, matrix, room: rows.new_ones(len(rows), matrix.out_size))
    quant.has_product.cache_clear()
    try:
        assert not quant.has_product(is_int4=is_int4)
    finally:
        monkeypatch.undo()
        quant.has_product.cache_clear()


def test_without_the_library_torch_multiplies(monkeypatch, tmp_path):
    monkeypatch.setattr(products, "LIBRARY", tmp_path / "none.so")
    products.library.cache_clear()
    quant.has_product.cache_clear()
    try:
        assert products.kernel() is None
        matrix, tokens = matrix_in("int8", 64, 64), draw(100, 64)
        exact = tokens @ (matrix.values.float() * matrix.scale[:, None]).T
        torch.testing.assert_close(quant.project(tokens, matrix), exact, rtol=1e-5, atol=1e-5)
    finally:
        monkeypatch.undo()
        products.library.cache_clear()
        quant.has_product.cache_clear()


class TestAttention:
    @NEEDS_KERNEL
    @pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 16), (6, 2, 64), (8, 1, 96)])
    def test_single_tokens_attend_and_are_stored_as_by_torch(self, heads, kv_heads, size, monkeypatch):
        spec = _Spec(heads, kv_heads, size)
        found = self.written(spec)
        monkeypatch.setattr(extents, "takes_attention", lambda heads: False)
        for one, other in zip(found, self.written(spec), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)  # scores are up to a hundred

    def written(self, spec):
        """Attention of tokens behind prompts of several lengths, and all that is stored then."""
        key_values, generator = ModelKeyValues(spec, torch.float32), torch.Generator().manual_seed(0)
        lengths = [31, 32, 33, 100, 1]
        found = []
        for step in range(4):
            rows = enumerate(lengths)
            chunks = [Chunk(n, length + step - 1, (1,)) if step else Chunk(n, 0, (1,) * length) for n, length in rows]
            if step == 3:  # beside a prompt
                chunks.insert(0, Chunk(len(lengths), 0, (1,) * 7))
            batch = TokenBatch.of(chunks)
            with torch.inference_mode():
                reserved = key_values.reserve(batch)
                attention = model.Attention(batch, reserved)
                for layer in range(len(spec.layers)):
                    shapes = [
                        (len(batch.token_ids), n, spec.head_size) for n in (spec.heads, spec.kv_heads, spec.kv_heads)
                    ]
                    found.append(attention.run(layer, *(torch.randn(one, generator=generator) * 3 for one in shapes)))
                    stored = [reserved.prefill(layer, row) for row in range(len(chunks))]
                    found += [part.clone() for one in stored for part in (one.keys, one.values)]
        return found

    @NEEDS_KERNEL
    @pytest.mark.parametrize("size", [16, 64, 96])
    def test_heads_are_rotated_and_normalised_as_by_torch(self, size, monkeypatch):
        rotation = model.Rope(RopeSpec(1e4), size, torch.device("cpu")).at(torch.arange(90, 95), torch.float32)
        heads, weights = draw(5, 3, size) * 4, (draw(size, seed=1), draw(size, seed=2))
        norm = torch.stack((weights[0], weights[0], weights[1]))
        exact = torch.nn.functional.rms_norm(heads, (size,), None, 1e-5) * norm
        with torch.inference_mode():
            found = heads.clone()
            products.norm_heads(found, 2, weights, 1e-5)
            torch.testing.assert_close(found, exact)
            turned = rotation.turn(found.clone())
            monkeypatch.setattr(model, "takes_attention", lambda heads: False)
            torch.testing.assert_close(turned, rotation.turn(exact), rtol=1e-5, atol=1e-5)


@dataclass(frozen=True)
class _Spec:
    heads: int
    kv_heads: int
    head_size: int
    layers: tuple[None, ...] = (None, None)
    max_positions: int = 128
