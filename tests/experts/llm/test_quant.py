"""Int8 weights: each number within half a step, both ways of multiplying alike, and what a model's output loses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experts.llm import quant
from experts.llm.model import LanguageModel
from tests.experts.llm.conftest import logits_of

DTYPES = [torch.bfloat16, torch.float32]


@pytest.fixture
def torch_alone(monkeypatch):
    monkeypatch.setattr(quant, "takes_product", lambda *_: False)


def relative_error(exact, found):
    return (found - exact).square().sum().sqrt() / exact.square().sum().sqrt()


def dequantise(matrix):
    return matrix.values.float() * matrix.scale.float().unsqueeze(-1)


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 50), st.floats(1e-3, 1e3), st.sampled_from(DTYPES))
def test_each_quantised_number_is_within_half_a_step(outputs, inputs, seed, size, dtype):
    matrix = draw(outputs, inputs, seed=seed) * size
    quantised = quant.quantise(matrix, dtype)
    # where rounding made a scale smaller, the channel's largest is cut off: by as much as bf16 rounds, a 256th
    room = quantised.scale.float() / 2 + matrix.abs().amax(dim=-1) * (2**-8 if dtype is torch.bfloat16 else 1e-6)
    assert ((dequantise(quantised) - matrix).abs() <= room.unsqueeze(-1)).all()
    assert (quantised.values.dtype, quantised.scale.dtype) == (torch.int8, dtype)


def test_channel_of_zeros_stays_zeros():
    matrix = draw(3, 16)
    matrix[1] = 0
    quantised = quant.quantise(matrix, torch.bfloat16)
    assert not dequantise(quantised)[1].any()
    assert torch.isfinite(quant.project(draw(2, 16, dtype=torch.bfloat16), quantised)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, quant.FEW_ROWS, quant.FEW_ROWS + 1, 100])
@pytest.mark.parametrize("has_bias", [False, True])
def test_few_rows_and_many_give_the_quantised_product(rows, dtype, has_bias, torch_alone):
    quantised = quant.quantise(draw(48, 64, seed=1) / 8, torch.bfloat16)
    tokens, bias = draw(64, rows, seed=2, dtype=dtype).T, draw(48, seed=3, dtype=dtype) if has_bias else None
    expected = tokens.float() @ dequantise(quantised).T + (0 if bias is None else bias.float())
    found = quant.project(tokens, quantised, bias)
    assert found.dtype is dtype
    tolerance = 1e-5 if dtype is torch.float32 and rows > quant.FEW_ROWS else 2e-2
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", [1, 2, quant.FEW_FP32_ROWS, quant.FEW_FP32_ROWS + 1])
@pytest.mark.parametrize(("outputs", "step"), [(48, 1), (44, 1), (48, 2)])  # in blocks, in none that fit, with gaps
@pytest.mark.parametrize("has_bias", [False, True])
def test_few_rows_in_fp32_equal_many(rows, outputs, step, has_bias):
    matrix = draw(outputs, 64 * step, seed=1)[:, ::step] / 8
    tokens, bias = draw(rows, 64, seed=2), draw(outputs, seed=3) if has_bias else None
    expected = tokens.double() @ matrix.double().T + (0 if bias is None else bias.double())
    found = quant.project(tokens, matrix, bias)
    assert found.shape == (rows, outputs)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [4, 12, 20, 24, 40, 72])
@pytest.mark.parametrize("rows", [1, quant.FEW_ROWS])
def test_width_that_torch_s_kernel_reads_past_gives_the_product(width, rows, torch_alone):
    quantised, tokens = quant.quantise(draw(48, width, seed=1), torch.bfloat16), draw(rows, width, seed=2)
    expected = tokens @ dequantise(quantised).T
    assert relative_error(expected, quant.project(tokens.bfloat16(), quantised).float()) < 0.01


def test_many_rows_take_one_block_of_a_matrix_at_a_time(monkeypatch, torch_alone):
    quantised, tokens = quant.quantise(draw(100, 64, seed=1), torch.bfloat16), draw(50, 64, seed=2)
    expected = tokens @ dequantise(quantised).T
    monkeypatch.setattr(quant, "BLOCK_BYTES", 7 * 64 * 4)
    made = []
    monkeypatch.setattr(quant, "linear", lambda rows, block: made.append(block.nbytes) or rows @ block.T)
    torch.testing.assert_close(quant.project(tokens, quantised), expected, rtol=1e-5, atol=1e-4)
    assert max(made) <= quant.BLOCK_BYTES


def test_copy_multiplies_without_the_kernel(monkeypatch, torch_alone):
    quantised, tokens = quant.quantise(draw(8, 64), torch.float32), draw(2, 64, seed=1)
    expected = quant.project(tokens, quantised)
    monkeypatch.delattr(torch, "_weight_int8pack_mm", raising=False)
    quant.has_int8_kernel.cache_clear()
    try:
        assert not quant.has_int8_kernel("cpu")
        torch.testing.assert_close(quant.project(tokens, quantised), expected, rtol=2e-2, atol=2e-2)
    finally:
        quant.has_int8_kernel.cache_clear()


class TestModels:
    @pytest.mark.parametrize("family", ["llama", "qwen2", "qwen2_moe", "qwen3_moe", "pr_moe"])
    def test_int8_model_has_int8_matrices_and_all_else_unchanged(self, model_files, family):
        _, tensors = model_files.read(family)
        quantised = dict(quant.Int8Tensors(tensors))
        assert {name for name in quantised if not name.endswith(quant.SCALE)} == tensors.keys()
        for name, tensor in tensors.items():
            is_matrix = name.rpartition(".")[2] in {"qkv", "output", "up", "down", "head"}
            assert (quantised[name].dtype is torch.int8) == quant.is_quantised(name) == is_matrix
            if is_matrix:
                torch.testing.assert_close(dequantise(quant.matrix_of(quantised, name)), tensor, rtol=1e-2, atol=2e-2)
            else:
                torch.testing.assert_close(quantised[name], tensor.to(torch.bfloat16))

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe", "pr_moe"])
    def test_int8_output_is_close_to_fp32(self, model_files, family, dtype):
        spec, tensors = model_files.read(family)
        texts = [list(range(1, 40)), list(range(90, 60, -1))]
        models = LanguageModel(spec, tensors), LanguageModel(spec, dict(quant.Int8Tensors(tensors, dtype)))
        assert models[1].dtype is dtype
        exact, found = (logits_of(model, *texts).float() for model in models)
        assert 0 < relative_error(exact, found) < 0.15
        assert 0 < (exact.softmax(-1) * (exact.log_softmax(-1) - found.log_softmax(-1))).sum(-1).mean() < 0.02
        assert (exact.argmax(-1) == found.argmax(-1)).float().mean() > 0.8

    def test_tied_head_is_in_int8_too(self, model_files):
        spec, tensors = model_files.read("qwen2", tie_word_embeddings=True)
        packed = dict(quant.Int8Tensors(tensors))
        assert packed["embedding"].dtype is torch.int8
        assert sum(one.nbytes for one in packed.values()) < 0.6 * sum(one.nbytes / 2 for one in tensors.values())
        model = LanguageModel(spec, packed)
        assert model.dtype is torch.bfloat16  # of tokens, keys and values
        text = list(range(1, 40))
        assert 0 < relative_error(logits_of(LanguageModel(spec, tensors), text), logits_of(model, text).float()) < 0.15
