"""What tokens cost: from times to what an agent predicts by, and times of a real model."""

from __future__ import annotations

import pytest
import torch

from agent.runtime.measuring.text_times import AT_ONCE, TextTimer, TextTimes, on_executor_thread
from experts.errors import LoadError
from experts.llm.model import load_model
from tests.experts.llm.conftest import ModelFiles


def line(fixed_s, token_s, rows=(1, 2, 4, 8, 16)):
    return {size: (fixed_s + token_s * size,) for size in rows}


class TestFromTimes:
    def test_a_prompt_s_token_is_what_longer_ones_take_more(self):
        times = TextTimes(line(0.5, 0.01, (16, 128)), line(0.5, 0.1))
        assert times.per_prompt_token_s == pytest.approx(0.01)

    def test_a_written_token_is_its_part_of_an_iteration_of_a_few_texts(self):
        times = TextTimes(line(0.5, 0.01, (16, 128)), line(0.4, 0.1))
        assert times.per_output_token_s == pytest.approx((0.4 + AT_ONCE * 0.1) / AT_ONCE)
        assert times.fixed_s == pytest.approx(0.5 - times.per_output_token_s)

    def test_what_an_engine_does_beside_the_model_is_in_it(self):
        times = TextTimes(line(0.5, 0.01, (16, 128)), line(0.4, 0.1), overhead_s=0.2)
        assert times.per_output_token_s == pytest.approx((0.6 + AT_ONCE * 0.1) / AT_ONCE)

    def test_a_middle_time_counts(self):
        times = TextTimes({16: (0.0, 0.0), 128: (9.0, 1.12, 1.0)}, {1: (0.1, 0.3), 2: (0.1,), 4: (0.4, 0.4)})
        assert times.per_prompt_token_s == pytest.approx(0.01)
        assert times.per_output_token_s == pytest.approx(0.1)

    def test_texts_run_together_until_that_gains_nothing(self):
        assert TextTimes({1: (1.0,)}, line(1.0, 0.0)).max_batch == 16
        assert TextTimes({1: (1.0,)}, line(0.0, 1.0)).max_batch == AT_ONCE
        assert TextTimes({1: (1.0,)}, {1: (1.0,), 2: (1.1,), 4: (1.2,), 8: (1.6,), 16: (3.2,)}).max_batch == 8

    def test_noise_makes_no_token_free(self):
        times = TextTimes({16: (0.2,), 128: (0.1,)}, {1: (0.1,), 2: (0.1,), 4: (0.1,)})
        assert min(times.per_prompt_token_s, times.per_output_token_s, times.fixed_s) > 0

    def test_a_context_of_a_single_length(self):
        assert TextTimes({16: (0.16,)}, {1: (0.1,)}).per_prompt_token_s == pytest.approx(0.01)


class TestOfAModel:
    @pytest.fixture
    def model(self, tmp_path):
        files = ModelFiles(tmp_path)
        return load_model(files.write(files.config("qwen3_moe")), "llm/a")

    def test_iterations_are_timed_on_a_thread_like_an_executor_s(self, model):
        timer = TextTimer("llm/a", model, limit_s=60.0)
        times = on_executor_thread(lambda: timer.times(2), "cpu", 1)
        assert times.read_s.keys() == {16, 128}
        assert times.write_s.keys() == {1, 2, 4, 8, 16}
        assert {len(seconds) for seconds in (*times.read_s.values(), *times.write_s.values())} == {2}
        assert times.overhead_s > 0

    def test_where_little_time_is_left_few_texts_are_run_once(self, model):
        times = TextTimer("llm/a", model, limit_s=0.0).times(5)
        assert times.write_s.keys() == {1, 2, 4}
        assert {len(seconds) for seconds in times.write_s.values()} == {1}

    @pytest.mark.parametrize("positions", [2, 16, 20])
    def test_a_short_context(self, tmp_path, positions):
        files = ModelFiles(tmp_path)
        model = load_model(files.write(files.config("llama", max_position_embeddings=positions)), "llm/a")
        times = TextTimer("llm/a", model, limit_s=0.0).times(1)
        assert max(times.read_s) == positions
        assert TextTimer("llm/a", model, limit_s=0.0).full_iteration(2) > 0

    def test_the_largest_iteration_tells_its_keys_and_values(self, model):
        token_bytes = model.spec.kv_bytes(4)
        assert TextTimer("llm/a", model, limit_s=0.0).full_iteration(3) >= (128 + 3 * 65) * token_bytes

    def test_answers_that_are_no_numbers_are_not_timed(self, tmp_path):
        files = ModelFiles(tmp_path)
        values = files.config("llama")
        tensors = files.tensors(values)
        tensors["model.norm.weight"][:] = float("inf")
        model = load_model(files.write(values, tensors), "llm/a")
        for run in (lambda timer: timer.read_s(4), lambda timer: timer.write_s(1), lambda timer: timer.overhead_s()):
            with pytest.raises(LoadError, match=r"not a number|NaN or infinity") as caught:
                run(TextTimer("llm/a", model, limit_s=0.0))
            assert caught.value.expert == "llm/a"


def test_an_error_on_the_thread_is_the_caller_s():
    def fail():
        raise torch.OutOfMemoryError("none left")

    with pytest.raises(torch.OutOfMemoryError):
        on_executor_thread(fail, "cpu", 1)


def test_where_more_texts_still_gained_when_the_time_was_over_as_many_as_were_to_be_tried_are_assumed():
    gains = {1: (1.0,), 2: (1.1,), 4: (1.2,)}
    assert TextTimes({1: (1.0,)}, gains, most_rows=16).max_batch == 16
    assert TextTimes({1: (1.0,)}, {1: (1.0,), 2: (2.0,), 4: (4.0,)}, most_rows=16).max_batch == AT_ONCE
