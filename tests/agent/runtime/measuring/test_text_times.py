"""What tokens cost: from times to what an agent predicts by, and times of a real model."""

import pytest

from agent.runtime.measuring.text_times import AT_ONCE, TextTimer, TextTimes, on_executor_thread
from experts.errors import LoadError
from experts.llm.model import load_model
from tests.experts.llm.conftest import ModelFiles


class TestFits:
    def test_noise_makes_no_token_free(self):
        times = TextTimes({16: (0.2,), 128: (0.1,)}, {1: (0.1,), 2: (0.1,), 4: (0.1,)})
        assert min(times.per_prompt_token_s, times.per_output_token_s, times.fixed_s) > 0

    def test_context_of_a_single_length_can_be_fitted(self):
        assert TextTimes({16: (0.16,)}, {1: (0.1,)}).per_prompt_token_s == pytest.approx(0.01)


class TestModels:
    @pytest.fixture
    def model(self, tmp_path):
        files = ModelFiles(tmp_path)
        return load_model(files.write(files.config("qwen3_moe")), "llm/a")

    def test_iterations_are_timed_on_a_thread_like_an_executor_s(self, model):
        timer = TextTimer("llm/a", model, limit_s=60.0)
        times = on_executor_thread(lambda: timer.times(2), "cpu", 1)
        assert (times.read_s.keys(), times.write_s.keys()) == ({16, 128}, {1, 2, 4, 8, 16})
        assert {len(seconds) for seconds in (*times.read_s.values(), *times.write_s.values())} == {2}
        assert times.overhead_s > 0

    def test_short_time_limit_runs_few_texts_and_tokens_once(self, model):
        tokens, run = [], model.hidden
        model.hidden = lambda batch, key_values: tokens.append(len(batch.token_ids)) or run(batch, key_values)
        times = TextTimer("llm/a", model, limit_s=0.0).times(5)
        assert (times.write_s.keys(), {len(seconds) for seconds in times.write_s.values()}) == ({1, 2, 4}, {1})
        assert times.read_s.keys() == {16, 32}
        assert sum(tokens) <= 16 + 32 + (1 + 2 + 4) + 2, "each size once, without prompts of the texts that write"

    def test_largest_iteration_includes_its_keys_and_values(self, model):
        token_bytes = model.spec.kv_bytes(4)
        assert TextTimer("llm/a", model, limit_s=0.0).full_iteration(3) >= (128 + 3 * 65) * token_bytes

    def test_model_that_answers_nan_is_not_timed(self, tmp_path):
        files = ModelFiles(tmp_path)
        values = files.config("llama")
        tensors = files.tensors(values)
        tensors["model.norm.weight"][:] = float("inf")
        model = load_model(files.write(values, tensors), "llm/a")
        for run in (lambda timer: timer.read_s(4), lambda timer: timer.write_s(1), lambda timer: timer.overhead_s()):
            with pytest.raises(LoadError, match=r"not a number|NaN or infinity") as caught:
                run(TextTimer("llm/a", model, limit_s=0.0))
            assert caught.value.expert == "llm/a"


def test_unfinished_search_for_the_most_texts_assumes_the_largest_wish():
    gains = {1: (1.0,), 2: (1.1,), 4: (1.2,)}
    assert TextTimes({1: (1.0,)}, gains, most_rows=16).max_batch == 16
    assert TextTimes({1: (1.0,)}, {1: (1.0,), 2: (2.0,), 4: (4.0,)}, most_rows=16).max_batch == AT_ONCE
