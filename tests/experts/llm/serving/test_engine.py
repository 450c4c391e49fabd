"""Texts through the engine, under virtual time with a model that counts; greedy tokens are transformers'."""

import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experts.expert import Prediction, Rejected
from experts.llm.arenas.blocks import BlockArena
from experts.llm.arenas.extents import ExtentArena
from experts.llm.serving.generation import GREEDY, Sampling
from experts.llm.serving.iteration import IterationLimits
from experts.llm.text.constraints import Constraint
from tests.experts.llm.oracle import NEW_TOKENS, Pair
from tests.experts.llm.serving.conftest import ARENAS, VOCABULARY, CountingModel, Desk, Notes, byte_grammar

CHOICES = {"left": (11,), "right": (12,), "far": (13, 14)}
FAMILIES = (
    "qwen3 with yarn positions", "qwen2_moe", "gemma2", "gemma3",
    *(pytest.param(name, marks=pytest.mark.slow) for name in
      ("llama", "mixtral", "qwen3_moe", "olmoe", "mistral with a window", "gemma2 without caps")),
)  # fmt: skip


def at_second(act):
    return Notes(lambda count: count == 2 and act())


def fail():
    raise BrokenPipeError("nobody reads")


def counted(prompt, new):
    return [(prompt[-1] + 1 + n) % VOCABULARY for n in range(new)]


class TestIterations:
    def test_finished_text_leaves_at_once_and_a_new_one_joins_the_next_iteration(self, desk):
        desk.ask(1, [3], 2).ask(2, [7], 4)
        desk.quantum(0)
        desk.ask(3, [20], 2)
        desk.finish(quantum_s=0)
        one, two, three = ((request, 1) for request in (1, 2, 3))
        assert desk.model.batches == [[one, two], [one, two, three], [two, three], [two]]

    def test_quantum_ends_on_time(self):
        desk = Desk(base_s=0.004, token_s=0.001)
        for request in range(4):
            desk.ask(request, range(60), 30)
        took_s = []
        while desk.texts:
            began_s = desk.clock.now_s
            desk.quantum(0.05)
            took_s.append(desk.clock.now_s - began_s)
        assert max(took_s) <= 0.05 + 1e-9
        assert sum(took_s) / len(took_s) > 0.03, "and it is used"

    def test_every_text_advances_though_there_are_more_than_rows(self):
        desk = Desk(limits=IterationLimits(rows=3, tokens=16), base_s=1.0)
        for request in range(8):
            desk.ask(request, range(20), 6)
        waited = dict.fromkeys(range(8), 0)
        while desk.texts:
            desk.quantum(0.01)
            ran = {request for request, _ in desk.model.batches[-1]}
            waited = {request: 0 if request in ran else waited[request] + 1 for request in desk.texts}
            assert max(waited.values(), default=0) <= 20
        assert desk.notes[7].tokens == counted(range(20), 6)

    def test_two_models_take_turns(self):
        desk = Desk(base_s=1.0)
        other = CountingModel(desk.clock, base_s=1.0, step=2)
        desk.ask(1, [3], 3).ask(2, [3], 3, model=other)
        desk.finish(quantum_s=0)
        assert len(desk.model.batches) == len(other.batches) == 3
        assert (desk.notes[1].tokens, desk.notes[2].tokens) == ([4, 5, 6], [5, 7, 9])


class TestLongPasses:
    def read(self, desk, *, until=lambda: False):
        """Quanta until all is written, with nobody waiting at the beginning of any; the seconds that they took."""
        began_s = desk.clock.now_s
        while desk.texts and not until():
            desk.quantum(0.05, 1.0)
        return desk.clock.now_s - began_s

    def desk(self):
        return Desk(base_s=0.1, token_s=0.005, layers=20, arena=ExtentArena(4 * 2**20))

    def test_lone_prompt_is_read_in_few_passes_over_the_weights(self):
        desk = self.desk().ask(1, range(200), 1)
        assert self.read(desk) <= 1.6  # 1.1 in a single pass, 2.1 and more in passes of a quantum

    def test_request_that_comes_amid_a_long_pass_waits_no_longer_than_a_quantum(self):
        desk, came_s = self.desk().ask(1, range(240), 3), []

        def before_layer(layer):
            if layer == 3 and desk.model.batches[-1][0][1] > 50 and not came_s:
                came_s.append(desk.clock.now_s)
                desk.engine.end_quantum()

        desk.model.before_layer = before_layer
        self.read(desk, until=lambda: came_s)
        assert desk.clock.now_s - came_s[0] <= 0.05
        self.read(desk)
        assert desk.notes[1].tokens == counted(range(240), 3)

    def test_prompt_is_read_though_a_request_comes_amid_each_pass(self):
        desk = self.desk().ask(1, range(240), 2)
        desk.model.before_layer = lambda layer: layer == 3 and desk.engine.end_quantum()
        assert self.read(desk) <= 2 * 240 * (0.005 + 0.1 / 16)
        assert desk.notes[1].tokens == counted(range(240), 2)

    def test_prompt_beside_a_text_that_writes_is_read_in_passes_of_a_quantum(self):
        desk = self.desk().ask(1, [3], 40).ask(2, range(200), 1)
        self.read(desk)
        assert max(sum(count for _, count in batch) for batch in desk.model.batches) <= 33  # of 200

    def test_memory_of_an_abandoned_pass_is_wiped_with_its_text(self):
        desk = self.desk().ask(1, range(16), 1, weights="w")
        self.read(desk)
        desk.ask(2, range(100, 180), 1, weights="w")
        desk.model.before_layer = lambda layer: layer == 1 and desk.engine.end_quantum()
        held_bytes = desk.arena.idle_bytes + desk.arena.cached_bytes
        desk.quantum(0.001, 1.0)
        desk.engine.forget(2)
        assert (desk.arena.idle_bytes + desk.arena.cached_bytes, desk.arena.promised_bytes) == (held_bytes, 0)


class TestEndings:
    @pytest.mark.parametrize(
        ("options", "tokens", "ending"),
        [
            ({"new": 2}, [4, 5], "length"),
            ({"new": 9, "stop_tokens": frozenset({6})}, [4, 5], "stop"),  # which is not written
            ({"new": 9, "notes": Notes(lambda count: count == 3)}, [4, 5, 6], "stop"),
        ],
    )
    def test_text_ends_by_length_stop_token_or_writer(self, desk, options, tokens, ending):
        desk.ask(1, [3], **options).finish()
        assert (desk.notes[1].tokens, desk.finished) == (tokens, {1: Prediction(ending, 1.0)})

    @pytest.mark.parametrize(("left_s", "tokens"), [(2.5, [4, 5, 6]), (0.0, [])])
    def test_text_ends_at_its_deadline(self, left_s, tokens):
        desk = Desk(base_s=1.0)
        desk.ask(1, [3], 9, deadline_s=desk.clock.now_s + left_s).ask(2, [3], 5)
        desk.finish(quantum_s=1)
        assert desk.notes[1].tokens == tokens
        assert desk.finished == {1: Prediction("deadline", 1.0), 2: Prediction("length", 1.0)}


class TestForgetting:
    def test_text_forgotten_mid_quantum_leaves_at_the_next_iteration(self, desk):
        def leave():
            leaving = threading.Thread(target=desk.engine.forget, args=(1,))
            leaving.start()
            leaving.join()

        desk.ask(1, [3], 9, notes=at_second(leave)).ask(2, [3], 4).finish()
        assert desk.notes[1].tokens == [4, 5]
        assert isinstance(desk.finished[1], Rejected)
        assert (desk.notes[2].tokens, desk.arena.promised_bytes) == ([4, 5, 6, 7], 0)

    def test_forgotten_request_is_gone_at_once_and_may_come_again(self, desk):
        desk.ask(1, [3], 9).quantum(0)
        desk.engine.forget(1)
        assert desk.arena.promised_bytes == 0
        desk.engine.preempt(1)
        desk.ask(1, [3], 2).finish()
        assert desk.notes[1].tokens == [4, 5]

    def test_next_step_of_a_request_begins_without_earlier_state(self, desk):
        desk.ask(1, [3], 9).quantum(0)
        desk.ask(1, [30], 2, expert="next").finish()
        assert desk.notes[1].tokens == [31, 32]


class TestPreemption:
    def test_quantum_ends_after_the_iteration_in_which_a_request_arrives(self, desk):
        desk.ask(1, [3], 9, notes=at_second(desk.engine.end_quantum))
        desk.quantum()
        assert desk.notes[1].tokens == [4, 5]
        desk.quantum()  # and no other one
        assert len(desk.notes[1].tokens) == 9

    @pytest.mark.parametrize(("rows", "left"), [(64, 2), (3, 2), (2, 1)])
    def test_quantum_ends_with_a_text_whose_row_no_other_can_take(self, rows, left):
        desk = Desk(limits=IterationLimits(rows=rows))
        desk.ask(1, [3], 2).ask(2, [20], 9).ask(3, [30], 20)
        desk.quantum()
        assert 1 in desk.finished
        assert len(desk.texts) == left

    def test_preemption_mid_quantum_waits_for_the_next_quantum(self, desk):
        desk.ask(1, [3], 4, notes=at_second(lambda: desk.engine.preempt(1)))
        desk.quantum()
        assert (desk.texts[1].left_to_read, desk.texts[1].written, desk.texts[1].held) == (3, 2, 0)
        assert desk.finish() == {1: [4, 5, 6, 7]}


DRAWN = (
    {}, {"top_k": 7, "top_p": 0.9, "min_p": 0.05}, {"repetition_penalty": 1.8},
    {"presence_penalty": 0.9, "frequency_penalty": 0.4},
)  # fmt: skip
DIGITS = byte_grammar(Constraint.of_regex("regex", "[0-9]{40}"))
KINDS = (
    *({"sampling": Sampling(temperature=3.0, seed=7, **each)} for each in DRAWN), {"choices": CHOICES},
    {"sampling": Sampling(temperature=3.0, seed=7), "grammar": DIGITS},
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=["plain", "cut", "repetition", "presence", "router", "grammar"])
def test_text_moved_to_another_engine_ends_as_if_it_had_stayed(kind):
    stayed, left, came = Desk(), Desk(limits=IterationLimits(tokens=1)), Desk()
    stayed.ask(1, [9, 10], 8, **kind).finish()
    left.ask(1, [9, 10], 8, **kind).quantum(0)
    left.quantum(0)
    came.texts, came.models, came.notes = {1: left.texts[1].moved(None)}, {1: came.model}, left.notes
    left.engine.forget(1)
    assert came.finish() == {1: stayed.notes[1].tokens}
    assert (came.finished, left.arena.promised_bytes) == (stayed.finished, 0)


class TestMemoryForTexts:
    def test_text_without_room_waits_and_is_reported(self, made):
        desk = Desk(arena=made(64 * CountingModel.spec.kv_bytes(4) * 8))
        desk.ask(1, range(200), 50).ask(2, range(200), 50)
        assert desk.ask(3, range(10), 200).quantum(0) == [3]
        assert list(desk.texts) == [1, 2, 3]
        assert desk.finish()[3] == counted(range(10), 200)

    def test_text_is_refused_if_the_process_has_no_addresses_for_it(self, desk, monkeypatch):
        monkeypatch.setattr("mmap.mmap", Mock(side_effect=OSError("no addresses")))
        assert desk.ask(1, [3], 9).quantum() == []
        assert "may not map" in desk.finished[1].reason
        assert desk.arena.promised_bytes == 0

    def test_text_that_never_fits_is_refused(self, made):
        desk = Desk(arena=made(64 * CountingModel.spec.kv_bytes(4) * 2))
        desk.ask(1, range(100), 100).ask(2, [3], 2).finish()
        assert desk.finished[1] == Rejected("expert counting: 200 tokens are more than there is room for")
        assert desk.notes[2].tokens == [4, 5]


class TestFaults:
    def test_bad_prompt_fails_its_own_text_only(self, desk):
        desk.ask(1, [3, 250, 1], 5).ask(2, [3], 2).finish()
        assert "expert counting: prompt: has token 250 at 1, the model knows 0 to 249" in desk.finished[1].reason
        assert desk.notes[2].tokens == [4, 5]

    def test_failing_writer_fails_its_own_text_only(self, desk):
        desk.ask(1, [3], 9, notes=at_second(fail)).ask(2, [3], 4).finish()
        assert desk.finished[1] == Rejected("its reader failed: BrokenPipeError: nobody reads")
        assert (desk.notes[2].tokens, desk.arena.promised_bytes) == ([4, 5, 6, 7], 0)

    @pytest.mark.parametrize("sampling", [GREEDY, Sampling(seed=3)])
    def test_nan_logits_fail_their_own_text_only(self, sampling):
        desk = Desk(broken_after=5)
        desk.ask(1, [3], 9, sampling=sampling).ask(2, [20], 3).ask(3, [5], 0, choices=CHOICES).finish()
        assert "expert counting answered with NaN or infinity after 3 tokens" in desk.finished[1].reason
        assert (desk.notes[1].tokens, desk.notes[2].tokens) == ([4, 5], [21, 22, 23])
        assert "NaN or infinity" in desk.finished[3].reason

    def test_exception_of_a_model_passes_through_and_loses_no_text(self):
        desk = Desk(limits=IterationLimits(rows=2))  # so that the quantum goes on with the third when the first is done
        desk.ask(1, [3], 2).ask(2, [20], 6)
        desk.quantum(0)
        desk.ask(3, [30], 4, notes=at_second(lambda: setattr(desk.model, "raises", RuntimeError("no memory"))))
        with pytest.raises(RuntimeError, match="no memory"):
            desk.quantum()
        desk.model.raises = None
        desk.finish()
        assert (desk.notes[1].tokens, desk.notes[3].tokens) == ([4, 5], [31, 32, 33, 34])
        assert [desk.finished[request].label for request in (1, 2, 3)] == ["length"] * 3


class TestRouters:
    def test_router_answers_the_likeliest_label_and_its_share(self, desk):
        desk.ask(1, [9, 10], 0, choices=CHOICES).ask(2, [9, 11], 0, choices=CHOICES).finish()
        assert (desk.finished[1].label, desk.finished[2].label) == ("left", "right")
        # by the counting model: exp(8) for what follows, 1 for all others
        total = torch.tensor(8.0).exp() + VOCABULARY - 1
        shares = {"left": torch.tensor(8.0).exp() / total, "right": 1 / total}
        shares["far"] = 1 / total * shares["left"]
        assert desk.finished[1].score == pytest.approx(float(shares["left"] / sum(shares.values())))
        assert desk.notes[1].tokens == []

    def test_choices_of_several_tokens_are_weighed_whole(self, desk):
        choices = {"near": (11, 30), "wrong": (11, 13), "right": (11, 12, 13), "none": (4,)}
        desk.ask(1, range(11), 0, choices=choices).ask(2, [3], 4).finish(quantum_s=0)
        assert (desk.finished[1].label, desk.notes[2].tokens) == ("right", [4, 5, 6, 7])
        assert desk.arena.promised_bytes == 0


def test_time_in_tensors_is_measured_apart_from_overhead():
    desk = Desk(base_s=0.5)

    def take_long(_):
        desk.clock.now_s += 0.25

    desk.ask(1, [3], 4, notes=Notes(take_long)).finish()
    told = desk.engine.statistics()
    assert (told.tensor_s, told.busy_s, told.overhead_s, told.iterations) == (2.0, 3.0, 0.25, 4)


TEXT = st.tuples(st.integers(1, 60), st.integers(1, 12), st.sampled_from([None, "w"]))
DEEDS = st.lists(st.tuples(st.sampled_from(["run", "run", "run", "preempt", "preempt", "forget"]), st.integers(0, 9)))


@pytest.mark.parametrize("made", ARENAS)
@settings(deadline=None, max_examples=40)
@given(st.lists(TEXT, min_size=1, max_size=10), DEEDS, st.integers(1, 4), st.sampled_from([1, 7, 64]))
def test_each_text_is_what_it_is_alone_under_any_steps(made, texts, deeds, rows, tokens):
    desk = Desk(arena=made(2**18), limits=IterationLimits(rows=rows, tokens=tokens))
    forgotten = set()
    for request, (length, new, weights) in enumerate(texts):
        desk.ask(request, range(request, request + length), new, weights=weights)
    for deed, request in deeds:
        if deed == "run" and desk.texts:
            desk.quantum(0)
        elif deed == "preempt":
            desk.engine.preempt(request)
        elif deed == "forget" and request in desk.texts:
            desk.engine.forget(request)
            del desk.texts[request]
            forgotten.add(request)
    written = desk.finish(quantum_s=0)
    for request, (length, new, _) in enumerate(texts):
        expected = counted(range(request, request + length), new)
        assert written[request] == expected[: len(written[request])]
        assert request in forgotten or written[request] == expected
    assert desk.arena.promised_bytes == 0


def test_engines_of_one_arena_run_concurrently(made):
    arena, model, done = made(16 * 2**20), CountingModel(), {}

    def serve(first):
        desk = Desk(model, arena)
        for request in range(first, first + 20):
            desk.ask(request, [request % 40], 30)
        done.update(desk.finish())

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(serve, (0, 100)))
    assert done == {request: counted([request % 40], 30) for request in (*range(20), *range(100, 120))}
    assert arena.promised_bytes == 0


class Oracle(Pair):
    def __init__(self, name, directory):
        super().__init__(name, directory)
        self.texts = self.prompts()
        asked = zip(self.texts, NEW_TOKENS, strict=True)
        self.expected = {request: self.oracle_s_tokens(*each) for request, each in enumerate(asked)}

    def desk(self, made=ExtentArena, **limits):
        desk = Desk(self.ours, made(16 * 2**20), IterationLimits(**limits))
        for request, (prompt, count) in enumerate(zip(self.texts, NEW_TOKENS, strict=True)):
            desk.ask(request, prompt, count, weights="w")
        return desk


@pytest.fixture(scope="module", params=FAMILIES)
def oracle(request, tmp_path_factory):
    return Oracle(request.param, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(("made", "chunk"), [*((ExtentArena, chunk) for chunk in (1, 7, 32, 512)), (BlockArena, 7)])
def test_text_batched_and_in_chunks_equals_a_lone_one(oracle, made, chunk):
    assert oracle.desk(made, tokens=chunk).finish() == oracle.expected
    assert oracle.desk(made, rows=4, tokens=chunk).finish(quantum_s=0) == oracle.expected


@pytest.mark.parametrize(("made", "weights"), [(ExtentArena, None), (ExtentArena, "w"), (BlockArena, "w")])
def test_text_preempted_and_resumed_equals_a_lone_one(oracle, made, weights):
    desk = oracle.desk(made, tokens=16)
    for text in desk.texts.values():
        text.weights = weights
    preempted = set()
    while desk.texts:
        desk.quantum(0)
        for moment in {(request, len(desk.notes[request].tokens)) for request in desk.texts} - preempted:
            preempted.add(moment)  # once for each count of tokens, also before the first
            desk.engine.preempt(moment[0])
    assert len(preempted) > sum(NEW_TOKENS) / 2
    assert (desk.finish(), desk.arena.promised_bytes) == (oracle.expected, 0)


def test_text_with_a_reused_prefix_equals_a_lone_one(oracle, made):
    desk = oracle.desk(made)
    assert desk.finish() == oracle.expected
    for request, (prompt, count) in enumerate(zip(oracle.texts, NEW_TOKENS, strict=True)):
        desk.ask(request, prompt, count, weights="w")
    read = desk.engine.statistics().read_tokens
    assert desk.finish() == oracle.expected
    assert desk.engine.statistics().read_tokens < 1.5 * read
