"""Int4 weights: each number within half a step, every way of multiplying alike, and no other CPU's bytes misread."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experts.expert import Expert, Precision
from experts.llm import quant
from experts.llm.kernels import four_bits
from experts.llm.kernels.four_bits import GROUP, LANES, has_int4_kernel, quantise_to_four_bits
from experts.llm.model import LanguageModel
from experts.llm.quant import Int4Tensors, project
from tests.experts.llm.conftest import WHOLE_BLOCKS, logits_of
from tests.experts.llm.test_packed_blocks import packed_in
from tests.experts.llm.test_quant import DTYPES, draw, relative_error

BOTH_SIDES = [1, 3, quant.FEW_INT4_ROWS, quant.FEW_INT4_ROWS + 1, 100]


def dequantise(matrix):
    """One number after the other, as the class says where it lies."""
    out_size, in_size, half = matrix.out_size, matrix.in_size, matrix.lanes // 2
    found = torch.empty(out_size, in_size)
    for row in range(out_size):
        block, lane = divmod(row, matrix.lanes)
        held = matrix.values[block, :, lane % half].int()
        step, middle = matrix.scale[:, row].float().repeat_interleave(GROUP, dim=0).unbind(dim=-1)
        found[row] = ((held >> 4 if lane >= half else held & 15) - 8) * step + middle
    return found


@pytest.fixture
def torch_alone(monkeypatch):
    monkeypatch.setattr(quant, "takes_product", lambda *_: False)


@pytest.fixture
def trials_again():
    caches = four_bits.has_int4_kernel, four_bits.lanes_here
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@given(
    st.integers(1, 2), st.integers(1, 3), st.integers(0, 50), st.floats(1e-3, 1e3), st.floats(-3, 3),
    st.sampled_from(LANES),
)  # fmt: skip
def test_each_number_is_within_half_a_step(blocks, groups, seed, size, shift, lanes):
    matrix = (draw(64 * blocks, GROUP * groups, seed=seed) + shift) * size
    found = quantise_to_four_bits(matrix, lanes)
    groups = matrix.view(len(matrix), -1, GROUP)
    step, largest = (groups.amax(dim=-1) - groups.amin(dim=-1)) / 15, groups.abs().amax(dim=-1)
    room = (step / 2 + largest * 2**-7).repeat_interleave(GROUP, dim=-1)  # bf16 rounds steps and middles
    assert ((dequantise(found) - matrix).abs() <= room).all()


@given(st.integers(0, 50), st.booleans())
def test_numbers_that_had_four_bits_before_keep_them(seed, has_middles):
    generator = torch.Generator().manual_seed(seed)
    levels = torch.randint(-8, 6, (64, 2, GROUP), generator=generator).float()  # 7 is not used
    levels[..., 0] = -8
    step = draw(64, 2, 1, seed=seed).bfloat16().float()
    matrix = levels * step
    if has_middles:
        levels[..., 1] = 7
        matrix = levels * step + 3 * step
    found = dequantise(quantise_to_four_bits(matrix.view(64, 2 * GROUP)))
    torch.testing.assert_close(found, matrix.view(64, 2 * GROUP), rtol=2**-7, atol=float(step.abs().max()) / 16)


@given(st.integers(0, 50), st.integers(3, 12))
def test_numbers_of_four_bits_in_larger_groups_keep_them(seed, used):
    generator = torch.Generator().manual_seed(seed)
    levels = torch.randint(0, used, (64, 4 * GROUP), generator=generator) - 5.0  # as few as a part of a group has
    step = draw(64, 1, seed=seed).half().float()
    found = dequantise(quantise_to_four_bits(levels * step))
    assert ((found - levels * step).abs() <= step.abs() / 8).all()  # half a step without


def test_group_of_one_number_keeps_it():
    matrix = draw(64, 2 * GROUP)
    matrix[5, GROUP:] = 0.75
    assert dequantise(quantise_to_four_bits(matrix))[5, GROUP:].eq(0.75).all()


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", BOTH_SIDES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_few_rows_and_many_give_the_quantised_product(rows, dtype, has_bias, lanes, torch_alone):
    matrix = quantise_to_four_bits(draw(192, 96, seed=1) / 10, lanes)
    tokens, bias = draw(96, rows, seed=2, dtype=dtype).T, draw(192, seed=3, dtype=dtype) if has_bias else None
    expected = tokens.float() @ dequantise(matrix).T + (0 if bias is None else bias.float())
    found = project(tokens, matrix, bias)
    assert found.dtype is dtype
    tolerance = 1e-5 if dtype is torch.float32 and rows > quant.FEW_INT4_ROWS else 3e-2
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)


def test_many_rows_take_one_block_of_a_matrix_at_a_time(monkeypatch, torch_alone):
    matrix, tokens = quantise_to_four_bits(draw(320, 64, seed=1), 32), draw(100, 64, seed=2)
    expected = tokens @ dequantise(matrix).T
    monkeypatch.setattr(quant, "BLOCK_BYTES", 3 * 32 * 64 * 4)
    made = []
    monkeypatch.setattr(quant, "linear", lambda rows, block: made.append(block.nbytes) or rows @ block.T)
    torch.testing.assert_close(project(tokens, matrix), expected, rtol=1e-5, atol=1e-4)
    assert made == [quant.BLOCK_BYTES] * 3 + [quant.BLOCK_BYTES // 3]


@pytest.mark.parametrize("rows", [1, 100])
def test_stacked_matrix_gives_its_own_product(rows):
    stacked, tokens = draw(3, 64, 64, seed=1), draw(rows, 64, seed=2)
    found = quantise_to_four_bits(stacked)
    for number in range(3):
        alone = project(tokens, quantise_to_four_bits(stacked[number]))
        torch.testing.assert_close(project(tokens, found[number]), alone, rtol=0, atol=0)


def test_kernel_that_deviates_is_not_used(monkeypatch, trials_again, torch_alone):
    matrix, tokens = quantise_to_four_bits(draw(64, 64), 32), draw(2, 64, seed=1)
    monkeypatch.setattr(four_bits.Int4Matrix, "few_rows_product", lambda own, rows: rows.new_ones(len(rows), 128))
    assert not has_int4_kernel("cpu", 32, 64)
    assert four_bits.lanes_here() == 64
    torch.testing.assert_close(project(tokens, matrix), tokens @ dequantise(matrix).T, rtol=1e-5, atol=1e-5)


def test_torch_s_own_packing_is_that_of_the_lanes_here():
    matrix = quantise_to_four_bits(draw(128, 64))
    if not has_int4_kernel("cpu", matrix.lanes, 64):
        pytest.skip("torch has no kernel of four bits for this CPU")
    low, high = matrix.values & 15, matrix.values >> 4
    levels = torch.cat((low, high), dim=-1).transpose(1, 2).reshape(128, 64).int()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1)
    assert torch.equal(packed.flatten(), matrix.values.flatten())


class TestModels:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe"])
    def test_int4_output_is_close_to_fp32(self, model_files, family, dtype):
        spec, tensors = model_files.read(family, **WHOLE_BLOCKS)
        held = dict(Int4Tensors(tensors, dtype))
        texts = [list(range(1, 40)), list(range(90, 60, -1))]
        exact, found = (logits_of(LanguageModel(spec, one), *texts).float() for one in (tensors, held))
        assert 0 < relative_error(exact, found) < 0.4
        assert 0 < (exact.softmax(-1) * (exact.log_softmax(-1) - found.log_softmax(-1))).sum(-1).mean() < 0.1
        assert sum(one.nbytes for one in held.values()) < sum(one.nbytes for one in tensors.values()) / 4

    def test_heads_and_odd_widths_stay_in_int8(self, model_files):
        _, tensors = model_files.read("llama", hidden_size=64, intermediate_size=80)
        held = dict(Int4Tensors(tensors))
        kinds = {name: type(quant.matrix_of(held, name)) for name in tensors if quant.is_quantised(name)}
        assert kinds.pop("head") is quant.Int8Matrix
        in_four = {name for name, kind in kinds.items() if kind is four_bits.Int4Matrix}
        assert in_four == {name for name in kinds if name.endswith((".qkv", ".output"))}


def test_bytes_that_another_cpu_s_kernel_reads_are_packed_again(model_files, store, monkeypatch):
    directory = model_files.write(model_files.config("llama", **WHOLE_BLOCKS))
    expert = Expert("llm/a", "llm", directory, (), None)

    def packed_by(lanes):
        monkeypatch.setattr(four_bits, "lanes_here", lambda: lanes)
        (packed,) = packed_in(store, [expert], Precision.INT4)
        return packed

    ours, theirs = (packed_by(lanes) for lanes in LANES)
    assert {one.sha256 for one in ours.segments} != {one.sha256 for one in theirs.segments}
    assert packed_by(LANES[1]) == theirs
