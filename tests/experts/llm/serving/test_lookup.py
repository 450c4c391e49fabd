"""Drafts by prompt lookup: each text is the one without, and a draft is made where it saves (virtual) time."""

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experts.llm.serving.engine import LlmEngine
from experts.llm.serving.generation import Sampling
from experts.llm.serving.iteration import IterationTimes, drafts
from experts.llm.serving.lookup import MOST_DRAFTED, PromptLookup
from experts.llm.text.constraints import Constraint
from tests.experts.llm.conftest import greedy
from tests.experts.llm.serving.conftest import ARENAS, VOCABULARY, CountingModel, Desk, Notes, byte_grammar
from tests.experts.llm.serving.test_iteration import LAYOUT, PROMPT, model  # noqa: F401  a fixture

LOOP = [token % 9 for token in range(30)]
SURPRISES = [token for surprise in range(100, 160) for token in (1, 2, 3, surprise)]
SEEDED = Sampling(temperature=1.0, seed=7, logprobs=2)
KINDS = {
    "greedy": {}, "sampled": {"sampling": SEEDED}, "cut": {"sampling": Sampling(top_k=5, top_p=0.99, seed=3)},
    "penalties": {"sampling": Sampling(repetition_penalty=1.1, frequency_penalty=0.02, seed=5)},
    "stop token": {"sampling": Sampling(seed=6), "stop_tokens": frozenset(range(200, VOCABULARY))},
    "stop string": {"notes": lambda: Notes(lambda count: count == 41)},
    "grammar": {"grammar": byte_grammar(Constraint.of_regex("regex", "(abc[0-4]){20}"))},
    "sampled grammar": {"sampling": SEEDED, "grammar": byte_grammar(Constraint.of_regex("regex", "[a-d]{80}"))},
}  # fmt: skip


class LoopingModel(CountingModel):
    """After token n comes n + 1, up to 8, and 0 after all others."""

    def logits(self, hidden):
        last = hidden[:, 0].long()
        logits = torch.zeros(len(hidden), VOCABULARY)
        logits[torch.arange(len(hidden)), torch.where(last < 8, last + 1, 0)] = 8.0
        return logits


class Guessing:  # a lookup that drafts as it is told
    share = 0.9

    def __init__(self, guess):
        self._guess = guess

    def wrote(self, tokens):
        pass

    def draft(self, tokens, count):
        return self._guess(tokens)[:count]


def looped(kind, *, is_drafted, base_s=1.0, token_s=0.0):
    desk = Desk()
    desk.model = LoopingModel(desk.clock, base_s, token_s)
    desk.ask(1, LOOP, **{"new": 90} | kind | {"notes": kind.get("notes", Notes)()}).ask(2, [50], 9)
    for text in desk.texts.values():
        text.lookup = text.lookup if is_drafted else Guessing(lambda tokens: [])
    desk.finish(quantum_s=1e6)
    return desk


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_text_with_drafts_is_the_text_without(kind):
    drafted, plain = looped(kind, is_drafted=True), looped(kind, is_drafted=False)
    told, without = drafted.engine.statistics(), plain.engine.statistics()
    assert [notes.sampled for notes in drafted.notes.values()] == [notes.sampled for notes in plain.notes.values()]
    assert (drafted.finished, drafted.arena.promised_bytes) == (plain.finished, 0)
    assert told.drafted_tokens >= told.accepted_tokens > 0 == without.drafted_tokens
    assert (told.written_tokens, told.read_tokens) == (without.written_tokens, without.read_tokens)
    assert told.iterations < without.iterations


def times(base_s, token_s):
    known = IterationTimes()
    for tokens in (1, 16):
        known.ran(tokens, base_s + token_s * tokens)
    return known


def drafts_of(written):
    lookup, tokens, counts = PromptLookup(), [], []
    for token in written:
        tokens.append(token)
        lookup.wrote(tokens)
        counts.append(drafts(1, {1: (lookup.share, MOST_DRAFTED)}, times(0.9, 0.1), MOST_DRAFTED).get(1, 0))
    return counts


class TestWhereItPays:
    @pytest.mark.parametrize(("base_s", "token_s", "least"), [(0.9, 0.1, 2.5), (0.0, 1.0, 0.98)])
    def test_text_that_repeats_itself_takes_less_time_if_its_model_s_goes_by_passes(self, base_s, token_s, least):
        on, off = (looped({"new": 200}, is_drafted=each, base_s=base_s, token_s=token_s) for each in (True, False))
        assert off.clock.now_s - 100 > least * (on.clock.now_s - 100)
        assert on.engine.statistics().drafted_tokens > 0, "a draft is tried to learn its time"

    def test_text_that_goes_on_otherwise_than_before_drafts_nothing(self):
        assert sum(drafts_of(SURPRISES)) == 0

    def test_text_that_stops_repeating_soon_stops_drafting(self):
        drafted = drafts_of([1, 2, 3] * 20 + SURPRISES)
        assert (drafted[3], drafted[59], sum(drafted[200:])) == (0, MOST_DRAFTED, 0)

    @given(st.lists(st.floats(0, 0.99), min_size=1, max_size=9), st.floats(0, 1), st.floats(0, 1), st.integers(-3, 40))
    def test_drafts_fit_the_room_of_an_iteration(self, shares, base_s, token_s, room):
        picks = drafts(len(shares), {n: (share, 15) for n, share in enumerate(shares)}, times(base_s, token_s), room)
        assert sum(picks.values()) <= max(room, 0)


def test_draft_that_breaks_the_model_is_wiped_and_its_text_goes_on():
    desk = Desk(broken_after=99, base_s=1.0).ask(1, [3], 9)
    desk.texts[1].lookup = Guessing(lambda tokens: [tokens[-1] + 1, 99])
    desk.engine.run([desk.texts[1]], [desk.model], 0.0)
    desk.quantum(5.0)
    assert (desk.texts[1].held, desk.arena.promised_bytes, desk.arena.idle_bytes) == (0, 0, 0)
    assert desk.finish() == {1: list(range(4, 13))}


TEXTS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 30)), min_size=1, max_size=4)
DEEDS = st.lists(st.tuples(st.sampled_from(["run", "run", "run", "preempt"]), st.integers(0, 3)), max_size=30)


@pytest.mark.parametrize("made", ARENAS)
@settings(deadline=None, max_examples=20)
@given(TEXTS, DEEDS, st.integers(0, 10**6))
def test_texts_under_any_drafts_and_steps_are_those_alone(model, made, texts, deeds, seed):  # noqa: F811
    chance = random.Random(seed)
    expected = {n: greedy(model, [PROMPT[:length]], new)[0][0] for n, (length, new) in enumerate(texts)}

    def guess(tokens):
        of_text = next(n for n, text in desk.texts.items() if text.tokens is tokens)
        right = expected[of_text][desk.texts[of_text].written :][: chance.randrange(9)]
        return right + [chance.randrange(50) for _ in range(chance.randrange(4))]

    desk = Desk(model, made(4 * 128 * LAYOUT.token_bytes))
    desk.engine = LlmEngine(desk.arena, None, itertools.count().__next__)
    for request, (length, new) in enumerate(texts):
        desk.ask(request, PROMPT[:length], new, weights=chance.choice((None, "w")))
        desk.texts[request].lookup, desk.texts[request].lease = Guessing(guess), chance.randrange(1, 30)
    for deed, request in [*deeds, *[("run", 0)] * 2000]:
        if deed == "preempt":
            desk.engine.preempt(request)
        elif desk.texts:
            desk.quantum(chance.choice((0, 30, 200)))
        for text in desk.texts.values():
            text.lease += text.held >= text.leased
    assert {request: notes.tokens for request, notes in desk.notes.items()} == expected
    assert desk.arena.promised_bytes == 0
