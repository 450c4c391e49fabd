"""Prompts that are read for their own sake, beside transformers; prompts that several texts begin with."""

from types import SimpleNamespace

import pytest
import torch

from experts.llm.arenas.extents import ExtentArena
from experts.llm.serving.iteration import IterationLimits
from experts.llm.serving.pooling import Pooling
from experts.llm.serving.readings import POSITIONS_AT_ONCE, PooledPrompt, PromptScores
from tests.experts.llm.oracle import Pair
from tests.experts.llm.serving.conftest import CountingModel, Desk, Notes


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return Pair("qwen3 with yarn positions", tmp_path_factory.mktemp("model"))


def read_by(pair, readings, *, tokens=512, preempts=False):
    desk = Desk(pair.ours, ExtentArena(16 * 2**20), IterationLimits(tokens=tokens))
    for request, (prompt, reading) in enumerate(zip(pair.prompts(), readings, strict=True)):
        desk.ask(request, prompt, 0, weights="w", reading=reading)
    while desk.texts:
        desk.quantum(0)
        for request in desk.texts if preempts else ():
            if readings[request].read % 2:  # so that each text ends at last
                desk.engine.preempt(request)
                preempts = False
    assert {result.label for result in desk.finished.values()} == {"length"}
    assert desk.arena.promised_bytes == 0
    return desk


@pytest.mark.parametrize(("tokens", "preempts"), [(512, False), (7, True)])
def test_scores_of_a_prompt_equal_transformers_also_in_chunks_and_after_a_preemption(pair, tokens, preempts):
    told = [[] for _ in pair.prompts()]
    readings = [PromptScores(2, own.extend) for own in told]
    read_by(pair, readings, tokens=tokens, preempts=preempts)
    for prompt, own in zip(pair.prompts(), told, strict=True):
        with torch.no_grad():
            logprobs = pair.oracle(torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
        assert [token.id for token in own] == prompt, "each once"
        assert (own[0].logprob, own[0].alternatives) == (None, ())
        for token, row in zip(own[1:], logprobs, strict=False):
            assert abs(token.logprob - row[token.id].item()) < 1e-4
            assert [other.id for other in token.alternatives] == row.topk(2).indices.tolist()


@pytest.mark.parametrize("is_mean", [True, False])
@pytest.mark.parametrize(("tokens", "preempts"), [(512, False), (7, True)])
def test_vector_of_a_prompt_equals_transformers_pooled_states(pair, is_mean, tokens, preempts):
    told = []
    readings = [PooledPrompt(Pooling(is_mean, True), told.append) for _ in pair.prompts()]
    read_by(pair, readings, tokens=tokens, preempts=preempts)
    vectors = {tuple(round(number, 4) for number in vector) for vector in told}
    for prompt in pair.prompts():
        with torch.no_grad():
            states = pair.oracle.model(torch.tensor([prompt])).last_hidden_state[0]
        wanted = torch.nn.functional.normalize(states.mean(0) if is_mean else states[-1], dim=0)
        assert min((torch.tensor(vector) - wanted).abs().max() for vector in vectors) < 2e-4


def test_logits_of_a_prompt_come_a_few_positions_at_a_time(pair, monkeypatch):
    rows, logits = [], pair.ours.logits
    monkeypatch.setattr(pair.ours, "logits", lambda hidden: rows.append(len(hidden)) or logits(hidden))
    read_by(pair, [PromptScores(0, lambda _: None) for _ in pair.prompts()])
    assert (max(rows), sum(rows)) == (POSITIONS_AT_ONCE, sum(len(prompt) - 1 for prompt in pair.prompts()))


def test_scores_of_a_long_pass_give_way_to_a_request_and_are_told_once():
    desk, told, came_s = Desk(token_s=0.001, arena=ExtentArena(4 * 2**20)), [], []

    def slow(hidden):
        desk.clock.now_s += 0.05
        if len(told) > 70 and not came_s:
            came_s.append(desk.clock.now_s)
            desk.engine.end_quantum()
        return CountingModel.logits(desk.model, hidden)

    desk.model.logits = slow
    desk.ask(0, range(200), 0, reading=PromptScores(0, lambda _: None)).finish()  # shows what it costs
    desk.ask(1, range(200), 0, reading=PromptScores(0, told.extend))
    while not came_s:
        desk.quantum(0.1, 2.0)
    assert desk.clock.now_s - came_s[0] <= 0.15
    desk.finish()
    assert [token.id for token in told] == list(range(200))


def test_reading_with_nan_is_refused_and_tells_nothing(desk):
    desk.model._broken_after = 5
    told = []
    desk.ask(1, [3, 4, 5, 6], 2, reading=PromptScores(0, told.append)).ask(2, [3], 2).finish()
    assert "NaN or infinity" in desk.finished[1].reason
    assert (told, desk.notes[1].tokens) == ([], [])


class TestCommonBeginning:
    prompt = tuple(range(100, 160))

    def test_prompt_of_several_texts_is_read_once(self, desk):
        for request in range(4):
            desk.ask(request, self.prompt, 3, weights="w")
        desk.ask(4, (*self.prompt, 7, 8), 2, weights="w").ask(5, self.prompt, 2, weights="other")
        told = desk.finish()
        assert list(told.values()) == [[160, 161, 162]] * 4 + [[9, 10], [160, 161]]
        assert desk.engine.statistics().read_tokens == 60 + 60 + 2

    def test_text_whose_beginning_another_one_read_before_takes_it_over(self, desk):
        desk.ask(1, self.prompt, 9, weights="w").quantum(0)
        desk.quantum(0)
        desk.ask(2, self.prompt, 2, weights="w").finish()
        assert desk.notes[2].tokens == [160, 161]
        assert desk.engine.statistics().read_tokens == 60

    @pytest.mark.parametrize("leaves", ["forget", "preempt"])
    def test_text_reads_for_itself_once_the_one_that_read_leaves(self, leaves):
        desk = Desk(limits=IterationLimits(tokens=20))
        desk.ask(1, self.prompt, 3, weights="w").ask(2, self.prompt, 2, weights="w", notes=Notes())
        desk.quantum(0)
        getattr(desk.engine, leaves)(1)
        assert desk.finish()[2] == [160, 161]


class MadeUp(list):
    """Results, of which a device that is not there gives ones."""

    def add(self, part):
        self.append(part if part.device.type == "cpu" else torch.ones(part.shape))
        return len(self) - 1


def test_vector_of_a_prompt_that_goes_on_at_another_device_counts_what_the_first_one_read():
    told, model = [], SimpleNamespace(normed=lambda states: states)
    pooled = PooledPrompt(Pooling(is_mean=True, is_normalised=False), told.append)
    states = [torch.ones(2, 3, device="meta"), torch.full((2, 3), 3.0)]
    for first, own in zip((0, 2), states, strict=True):
        assert pooled.take((1, 2, 3, 4), first, own, own, model, MadeUp())()
    assert told == [(7 / 4,) * 3]
