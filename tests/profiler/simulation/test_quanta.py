"""Requests that count in tokens under virtual time, alone and beside images."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.effects import Preempt
from agent.core.performance import Performance, PoolSpec
from agent.core.request import IMAGE, Work
from experts.expert import Verdict
from profiler.simulation.quanta import run_quantum
from profiler.workload.traces import TracedArrival
from tests.profiler.lines import IMAGES, TEXTS, row, setup_of, simulator
from tests.profiler.lines import batches as batches_of

QUANTUM_S, BOUND_S = 0.05, 100.0
NOISE_S = 1e-9  # of rounding
BATCH_S = IMAGES.latency_s(IMAGES.max_batch)


def build(images=1, texts=1, lease_bytes=400, family=None, **physics):
    """One executor, all experts in memory from the start."""
    rows = {f"image{n}": row(f"image{n}", IMAGES) for n in range(images)}
    rows |= {f"text{n}": row(f"text{n}", TEXTS, family=family) for n in range(texts)}
    pools = (PoolSpec("host", len(rows), 0, lease_bytes=lease_bytes),)
    usage = dict.fromkeys(rows, 0.5)
    return simulator(setup_of(rows, room=pools, usage=usage, max_overtake_s=BOUND_S, quantum_s=QUANTUM_S), **physics)


def batches(simulation, prefix=""):
    """(start, expert, requests) of each batch whose expert's name begins so, in seconds since the trace's start."""
    found = batches_of(simulation)
    return [(now, each.expert, each.requests) for now, each in found if each.expert.startswith(prefix)]


def run(left, quantum_s):
    """One quantum of one expert's requests."""
    return run_quantum(left, dict.fromkeys(left, TEXTS), quantum_s)


def test_quantum_reads_before_it_writes():
    """0.005 s are B and K; of the rest 20 tokens are read in 0.01 s, and 11 written in 0.033 s."""
    quantum = run({7: Work(20, 100, 120)}, QUANTUM_S)
    assert quantum.unfinished == {7: Work(0, 89, 120, held=31)}
    assert quantum.seconds == pytest.approx(0.005 + 0.01 + 0.033)


def test_quantum_ends_when_all_texts_are_done():
    quantum = run({1: Work(2, 1, 3), 2: IMAGE}, QUANTUM_S)
    assert quantum.unfinished == {}
    assert quantum.seconds == pytest.approx(0.004 + 2 * 0.001 + 2 * 0.0005 + 0.003)


@pytest.mark.parametrize("work", [Work(5, 1, 6), Work(0, 5, 6)])
def test_shortest_quantum_gives_each_text_a_token(work):
    left = run({1: work, 2: work}, 0.0).unfinished
    assert [each.prompt + each.output for each in left.values()] == [work.prompt + work.output - 1] * 2


def test_quantum_ends_at_the_lease_and_asks_for_twice_as_much():
    quantum = run({1: Work(6, 40, 46, lease=8), 2: Work(9, 1, 10, lease=4)}, QUANTUM_S)
    assert quantum.unfinished == {1: Work(0, 38, 46, lease=16, held=8), 2: Work(5, 1, 10, lease=8, held=4)}


def test_text_is_written_in_as_many_quanta_as_it_takes():
    """(0.05 - 0.005) / 0.003 = 15 tokens a quantum; 40 take 15, 15 and 10."""
    simulation = build().run([TracedArrival(0.0, expert="text0", work=Work(0, 40, 40))])
    assert [start_s for start_s, _, _ in batches(simulation)] == pytest.approx([0.0, 0.05, 0.1])
    assert simulation.seconds == pytest.approx(3 * 0.005 + 40 * 0.003)


def test_tokens_of_an_expert_without_leases_count_in_its_batches():
    setup = setup_of({"e": row("e", Performance(0.01, 0.02, 4, 0, K_prompt_s=0.1))}, room=1)
    simulation = simulator(setup).run([TracedArrival(0.0, "e", work=Work(3, 0, 3))])
    assert simulation.seconds == pytest.approx(0.03 + 0.3)


def test_text_that_loses_its_cache_reads_it_again_and_goes_on():
    """The first holds its 10 tokens when it needs 20, of 30 of which the other has 20."""
    works = (Work(0, 30, 30, lease=10), Work(0, 20, 20))
    trace = [TracedArrival(0.0, "image0"), *(TracedArrival(0.001, "text0", work=work) for work in works)]
    simulation = build(lease_bytes=30).run(trace)
    preempted = [effect.request for _, effect in simulation.effects if isinstance(effect, Preempt)]
    assert preempted == [1]
    assert all(outcome.verdict is Verdict.OK for outcome in simulation.outcomes.values())
    assert simulation.finished_s[2] < simulation.finished_s[1]


def test_each_request_of_a_quantum_takes_its_own_experts_time():
    slow = replace(TEXTS, B_s=0.01, K_s=0.002, K_output_s=0.006)
    quantum = run_quantum({1: Work(0, 2, 2), 2: Work(0, 50, 50)}, {1: slow, 2: TEXTS}, QUANTUM_S)
    assert quantum.unfinished == {2: Work(0, 42, 50, held=8)}  # of 0.05 - 0.01 - 0.003 - 2 * 0.006
    assert quantum.seconds == pytest.approx(0.013 + 0.012 + 8 * 0.003)


def test_texts_of_a_family_share_quanta():
    trace = [TracedArrival(0.0, "image0"), *(TracedArrival(0.001, f"text{n}", work=Work(0, 20, 20)) for n in (0, 1))]
    family, alone = (build(texts=2, family=name).run(trace) for name in ("f", None))
    assert [requests for _, _, requests in batches(family, "text")] == [(1, 2)] * 3
    assert [requests for _, _, requests in batches(alone, "text")] == [(1,), (2,), (1,), (2,)]
    assert {outcome.verdict for outcome in family.outcomes.values()} == {Verdict.OK}


@st.composite
def tight(draw):
    """Texts with leases that are too small at first, more of them than there is room for."""
    trace = []
    for _ in range(draw(st.integers(2, 14))):
        prompt, output = draw(st.integers(0, 30)), draw(st.integers(1, 60))
        lease = draw(st.one_of(st.none(), st.integers(0, prompt + output)))
        work = Work(prompt, output, prompt + output, lease)
        trace.append(TracedArrival(draw(st.floats(0.0, 1.0)), f"text{draw(st.integers(0, 1))}", work=work))
    return sorted(trace, key=lambda each: each.at_s)


@given(tight(), st.integers(90, 200), st.sampled_from([None, "f"]))
def test_all_texts_are_written_from_any_leases(trace, lease_bytes, family):
    simulation = build(1, 2, lease_bytes, family=family).run(trace)
    assert all(outcome.verdict is Verdict.OK for outcome in simulation.outcomes.values())
    assert len(simulation.outcomes) == len(trace)


@st.composite
def mixed(draw):
    """Bursts of images beside texts that are many more than one executor can write meanwhile."""
    images, texts = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    at_s, trace = 0.0, []
    for _ in range(draw(st.integers(1, 25))):
        at_s += draw(st.sampled_from([0.0, 0.013, 0.11, 0.4]))
        expert = f"image{draw(st.integers(0, images - 1))}"
        trace += [TracedArrival(at_s, expert, work=IMAGE) for _ in range(draw(st.integers(1, 3)))]
    for number in range(draw(st.integers(1, 12))):
        work = Work(draw(st.integers(0, 60)), draw(st.integers(1, 80)), 150, draw(st.sampled_from([None, 20, 90])))
        trace.append(TracedArrival(draw(st.floats(0.0, at_s)), f"text{number % texts}", work=work))
    return images, texts, sorted(trace, key=lambda each: each.at_s), draw(st.sampled_from([None, "f"]))


@given(mixed())
def test_image_waits_for_at_most_one_quantum_per_batch_before_it(drawn):
    """Those before it are the batches of images that start while it waits, and its own."""
    images, texts, trace, family = drawn
    simulation = build(images, texts, family=family).run(trace)
    assert all(outcome.verdict is Verdict.OK for outcome in simulation.outcomes.values())
    runs = batches(simulation)
    ends_s = [*(start_s for start_s, *_ in runs[1:]), simulation.seconds]
    for start_s, expert, requests in batches(simulation, "image"):
        for since_s in (trace[request].at_s for request in requests):
            quanta_s = [
                min(end_s, begin_s + QUANTUM_S) - max(begin_s, since_s)
                for (begin_s, other, _), end_s in zip(runs, ends_s, strict=True)
                if other.startswith("text") and since_s < end_s and begin_s < start_s
            ]
            before = sum(since_s - NOISE_S <= begin_s <= start_s for begin_s, *_ in batches(simulation, "image"))
            assert sum(quanta_s) <= QUANTUM_S * before + NOISE_S, (expert, requests)


@given(mixed())
def test_begun_text_is_passed_by_at_most_one_batch_of_images(drawn):
    images, texts, trace, family = drawn
    simulation = build(images, texts, family=family).run(trace)
    begun_s = {}
    for (start_s, expert, requests), (then_s, then, _) in pairwise(batches(simulation)):
        begun_s |= {each: start_s for each in requests if expert.startswith("text") and each not in begun_s}
        if expert.startswith("image") and then.startswith("image"):
            assert all(simulation.finished_s[each] <= start_s + NOISE_S for each in begun_s), (start_s, then_s)
