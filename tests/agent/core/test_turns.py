"""Requests that count in tokens beside images: quanta, turns, requests that join, begin, end and are preempted."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core import events
from agent.core.effects import Complete, Fail, LeasesChanged, Preempt, StartBatch, StartLoad
from agent.core.performance import SSD, Performance, PoolSpec, PreparedForm
from agent.core.request import IMAGE, Work
from experts.expert import Rejected
from experts.graph import ExpertGraph
from tests.agent.core.script import played
from tests.agent.core.shell import PASS
from tests.agent.core.worlds import Line, of

QUANTUM_S, LONE_QUANTUM_S, BOUND_S, SHARE = 4.0, 9.0, 100.0, 20
PICTURES = Performance(K_s=1.0, B_s=1.0, max_batch=4, workspace_bytes=1)
TEXTS = Performance(0.0, 1.0, 3, 1, K_prompt_s=0.5, K_output_s=2.0, lease_bytes=1)
ASK = Work(prompt=2, output=3, most=6)
LEFT = Work(prompt=0, output=2, most=6, held=3)


class Turns(Line):
    """A line whose memory holds ``room`` of the experts: images of a and b, texts of t and u; executors are alike.

    Its scripts ask by a request's number and say what starts and ends alone: `t0` asks t for request 0, `t0/2.3.6` with
    this work; `t:0,1 u:2` starts, `done 0` ends well, `failed 0` does not. Without an expert, a verb is of executor 0.
    """

    divider = " "

    def __init__(
        self, policy="coserve", room=4, executors=1, bound_s=BOUND_S, share=SHARE, texts=TEXTS, family=None, budget=0
    ):
        workspace_bytes = executors * max(PICTURES.workspace_for(4), texts.workspace_for(4))
        super().__init__(
            (PoolSpec("host", room, workspace_bytes, lease_bytes=share),),
            {f"cpu{number}": ("abtu", "host") for number in range(executors)},
            policy,
            performances={name: texts if name in "tu" else PICTURES for name in "abtu"},
            prepared=dict.fromkeys("ab", PreparedForm("small", 1)),
            families=dict.fromkeys("tu", family),
            load_s={SSD: 1.0},
            usage=dict.fromkeys("abtu", 0.25),
            routes={"sorted": "at"},
            max_overtake_s=bound_s,
            quantum_s=QUANTUM_S,
            lone_quantum_s=LONE_QUANTUM_S,
            loads_in_flight=4,
            prepared_bytes=budget,
        )
        self.handle(events.Started())
        while self.loading:
            self.answer()

    def words(self, *, in_full=False):
        return [self.word(effect) for effect in of(StartBatch | Complete | Fail, self.effects)]

    def word(self, effect):
        if isinstance(effect, StartBatch):
            return " ".join(f"{each.expert}:{','.join(map(str, each.requests))}" for each in effect.batch.all_portions)
        return f"{'done' if isinstance(effect, Complete) else 'failed'} {effect.request}"

    def step(self, verb, words, **at):
        if not re.match(r"[a-u]\d", verb):
            super().step(verb, words, **at)
            return
        for each in (verb, *words):
            number, _, work = each[1:].partition("/")
            self.text(int(number), each[0], work_of(*work.split(".")) if work else None)

    def text(self, request, expert, work=None):
        text = ASK if work is None else work
        return self.handle(events.Arrived(request, expert=expert, work=text if expert in "tu" else IMAGE))

    def quantum_ends(self, finished=(), executor=0, left=LEFT):
        """Each request of the batch that is not finished has ``left``."""
        batch = self.on(executor)
        ended = tuple((request, PASS) for request in batch.requests if request in finished)
        others = tuple((request, left) for request in batch.requests if request not in finished)
        return self.handle(events.Progressed(batch.id, ended, others))

    # -- verbs of a script --

    def quantum(self, *done):
        """A quantum is over, and these requests are done."""
        self.quantum_ends(tuple(map(int, done)))

    def left(self, *words):
        """The same; prompt, output, most, lease and held of each that is not done; before them one that is."""
        done, work = ([int(words[0])], words[1:]) if len(words) > 5 else ([], words)
        self.quantum_ends(done, left=work_of(*work))

    def images(self):
        """A batch of images is over."""
        self.answer_batch(self.on(0).id)

    def breaks(self, *, out_of_memory=False):
        self.handle(events.BatchFailed(self.on(0).id, "broke", out_of_memory))

    def comes(self):
        """The only load is over."""
        (load,) = self.loading
        self.answer_load(load)

    def preempted(self, request, *work):
        self.handle(events.Preempted(int(request), work_of(*work) if work else None))

    def waits(self, until_s):
        self.handle(events.Tick(), float(until_s))

    def preempts(self, *requests):
        assert [(each.request, each.executor) for each in of(Preempt, self.effects)] == [(int(n), 0) for n in requests]

    def fetches(self, *experts):
        """Loads that start."""
        assert [load.expert for load in of(StartLoad, self.effects)] == list(experts)

    def leases(self, size):
        assert self.leased == float(size)

    def lasts(self, seconds):
        assert self.engine.statistics().queues[0].length_s == float(seconds)

    def because(self, *reason):
        assert [effect.outcome.reason for effect in of(Fail, self.effects)] == [" ".join(reason)]

    @property
    def changes(self):
        return [(each.pool, each.before_bytes, each.after_bytes) for each in of(LeasesChanged, self.effects)]

    @property
    def leased(self):
        return self.pools()[0].lease_used_bytes


def work_of(*numbers):
    return Work(*map(int, numbers))


# Each case: a line, and what is played on it.
CASES = """
a request that is not done goes on, one that is done ends, and all may be done with a quantum | Turns() |
    t0 t1; quantum -> t:0,1; quantum 0 -> done 0 t:1; images -> done 1; leases 0
requests that came meanwhile join the next quantum behind those that have begun | Turns() |
    t0; t1 t2 t3 -> nothing; quantum -> t:0,1,2; quantum 1 -> done 1 t:0,2,3
images have no quantum to go on after | Turns() |
    a0; quantum -> failed 0; because a: 1 of 1 images are not done, and images have no quantum
progress without an unfinished request is as good as finished | Turns() |
    a0; quantum 0 -> done 0
# turns
ongoing groups take turns and images wait for one of them at a time | Turns() |
    # after the first of u, t is due, and was passed
    t0 u1; quantum -> u:1; b2 b3 b4 b5 b6 b7 b8 b9 b10; quantum -> b:2,3,4,5;
    images -> done 2 done 3 done 4 done 5 t:0; quantum -> b:6,7,8,9; images -> done 6 done 7 done 8 done 9 u:1
images that came behind many texts wait for one quantum and these begin between them | Turns(share=100) |
    t0 t1 t2 t3 t4 t5 a10 a11 a12 a13 a14; quantum 0 -> done 0 a:10,11,12,13;
    images -> done 10 done 11 done 12 done 13 t:1,2,3; quantum 1 -> done 1 a:14; images -> done 14 t:2,3,4
an executor of the paper's waits for the load of an image that is next | Turns("paper", room=1) |
    t0; comes; a1; quantum -> nothing; fetches a; comes -> a:1; images -> done 1; comes -> t:0
an executor of Samba-CoE's waits for the load of an image that is next | Turns("samba", room=1) |
    t0; comes; a1; quantum -> nothing; fetches a; comes -> a:1; images -> done 1; comes -> t:0
an ongoing group whose expert had to leave asks for it | Turns(room=1, bound_s=10.0) |
    t0; comes; a1; waits 10; quantum -> nothing; fetches a; comes -> a:1; images -> done 1; fetches t; comes -> t:0;
    leases 6
no batch of images is queued ahead of texts that wait for their turn | Turns(budget=9) |
    a9; a1 a2 a3 a4; images; a5 a6 t0 a7; a8 -> nothing
a full batch of images is queued ahead where no texts wait | Turns(budget=9) |
    a9; a1 a2 a3 a4; images; a5 a6 a7; a8 -> a:5,6,7,8
requests of one expert begin together whatever stands between them | Turns("em") |
    a9; t0 u1 t2; images -> done 9 t:0,2
# leases
a request that waits for a lease asks for no load meanwhile | Turns(room=1, share=10) |
    t0; comes; u1; waits 200; quantum -> t:0; fetches; quantum 0 -> done 0; fetches u
a request that no longer needs a lease leaves it to the next one which asks for its load then |
    Turns(room=2, share=10) | t0; comes; u1; a2; comes; quantum; fetches; preempted 0; fetches u
a small lease leaves what a larger one has waited for beyond the bound | Turns(share=10) |
    t0; u1; waits 200; t3/0.1.3; quantum -> t:0
without a bound a small lease passes a larger one | Turns("paper", share=10) |
    t0; u1; waits 200; t3/0.1.3; quantum -> t:0,3
no request has a larger lease than the most that it may hold | Turns(share=6) |
    t0; left 0 2 6 50 3; leases 6
a request without room for a larger lease gives it back and waits for that one | Turns(share=10) |
    t0/2.3.6.3; u1/2.3.6; left 0 2 6 3 3 -> u:1; leases 9; quantum -> t:0; leases 9; left 0 2 6 5 3 -> u:1; preempts 0;
    leases 6; quantum 1 -> done 1 t:0; leases 5; lasts 6.5
requests that end make room for the larger leases of their batch, the oldest first | Turns(share=9) |
    waits 1; t0/2.3.6.3; waits 2; t1/2.3.6.3; waits 3; t2/2.3.6.3; left 0 2 6 3 3 -> t:0,1,2; left 1 0 2 6 5 3;
    preempts 2; leases 5
# lengths: B 1 s, 0.5 s a token read, 2 s a token written
a quantum counts for as long as it may last, and work that is left after it counts too | Turns() |
    t0; lasts 8; waits 3; lasts 5; waits 9; lasts 4; t1/2.0.2; lasts 6; quantum; lasts 6; quantum 1;
    quantum 0; lasts 0
# requests that end, and those that lose their memory
a request that is cancelled between two quanta ends at once | Turns() |
    t0 a1; quantum -> a:1; lasts 7; cancelled 0 -> failed 0; because cancelled; leases 0; images -> done 1
a preempted request begins anew behind those that wait, and reads again what it held | Turns(share=12) |
    t0; a1; u2/0.1.8; quantum; preempted 0 -> nothing; leases 0; images -> done 1 u:2; quantum 2 -> done 2 t:0;
    lasts 6.5
the shell says what a preempted request has to do and needs | Turns() |
    t0/2.3.6.3; a1; quantum; preempted 0 4 1 6 5; leases 0; images; leases 5; lasts 5
requests whose batch failed begin anew and alone, and one that fails alone is the only one to blame | Turns() |
    a9; t0/0.3.4 t1/0.3.4 t2/0.3.4; images; left 0 2 4; breaks -> t:0; leases 4; lasts 13; left 0 2 4 -> t:1;
    left 0 2 4 -> t:0; left 0 2 4 -> t:2; left 0 2 4 -> t:1; left 0 2 4 -> t:0; leases 12; breaks -> failed 0 t:2;
    leases 8
requests that have begun with an expert in quarantine end when their quantum is over | Turns() |
    t0; quarantined t -> nothing; quantum -> failed 0; because t is in quarantine: bad; leases 0
requests that have begun with an expert in quarantine end between two quanta | Turns() |
    t0 a1; quantum; quarantined t -> failed 0; because t is in quarantine: bad; leases 0
no expert that a request goes on with leaves when it is unwanted | Turns() |
    t0 a1; quantum; unwanted t; images -> done 1 t:0
# families
experts of a family begin and go on in the same quanta | Turns(family="f") |
    a9 t0 u1; images -> done 9 t:0 u:1; quantum -> t:0 u:1; quantum 1 -> done 1 t:0
without a family each expert has a quantum of its own | Turns() |
    t0 u1; quantum -> u:1; quantum -> t:0; quantum -> u:1
an ongoing group rides along with all of its requests or not at all | Turns(family="f", share=40) |
    # 3 are a batch: at first the other of u has no place
    a9 t0 t1 u2 u3; images -> done 9 t:0,1 u:2; quantum -> t:0,1 u:2; quantum 0 -> done 0 t:1 u:2,3;
    quantum -> t:1 u:2,3; a5; quantum -> a:5; images -> done 5 t:1 u:2,3
a request that can begin has every other quantum's place before groups that ride along | Turns(family="f", share=60) |
    a9 t0 u2 u3; images -> done 9 t:0 u:2,3; t4; quantum -> t:0,4; quantum -> u:2,3; quantum -> t:0,4
of a family the first that came begin first, and those of one group stand together | Turns(family="f", share=60) |
    a9 u0 t1 t2 u3; images -> done 9 u:0,3 t:1
"""


@played(CASES)
def test_texts_and_images_take_turns(made, script):
    eval(made).play(script)


# -- quanta --


def test_quanta_are_longer_where_no_images_may_come():
    line = Turns()
    line.handle(events.LineChanged(ExpertGraph("abtu", {}), line.matrix, frozenset(), frozenset("ab")))
    line.text(0, "t")
    assert line.on(0).quantum_s == LONE_QUANTUM_S
    line.quantum_ends(finished=[0])
    line.handle(events.LineChanged(line.graph, line.matrix, frozenset(), frozenset()))
    line.text(1, "t")
    assert line.on(0).quantum_s == QUANTUM_S


def test_quantum_is_longest_if_no_other_request_waits_for_its_executor():
    line = Turns()
    line.text(0, "t")
    assert line.on(0).undisturbed_s == 20 * QUANTUM_S
    line.text(1, "a")
    line.text(2, "t")
    line.quantum_ends()
    line.images()
    assert (line.on(0).requests, line.on(0).undisturbed_s) == ((0, 2), 20 * QUANTUM_S)
    line.text(3, "a")
    line.text(4, "u")
    line.quantum_ends()
    line.images()
    assert (line.on(0).expert, line.on(0).undisturbed_s) == ("u", None)


def test_text_is_assigned_by_its_work():
    line = Turns(executors=2)
    line.text(0, "t", Work(0, 20, 20))
    assert line.text(1, "a") == ["a:1"]
    assert [each.queue_s for each in line.assigned.candidates] == [41.0, 0.0]
    line.text(2, "u", Work(4, 1, 5))
    assert [each.addition_s for each in line.assigned.candidates] == [1.0 + 2.0 + 2.0] * 2


@pytest.mark.parametrize("told", [[], [0], [0, 1, 1], [0, 1, 2], [0, 2]])
def test_progress_of_other_requests_than_the_batchs_is_a_failure(told):
    line = Turns()
    line.text(9, "a")
    line.text(0, "t")
    line.text(1, "t")
    line.images()
    batch = line.on(0)
    assert batch.requests == (0, 1)
    line.handle(events.Progressed(batch.id, (), tuple((request, LEFT) for request in told)))
    assert line.on(0).requests == (0,)  # alone, from the start
    assert line.leased == ASK.most


def test_text_that_its_expert_rejects_ends_and_the_others_go_on():
    line = Turns()
    line.text(0, "t")
    line.text(1, "t")
    line.quantum_ends()
    batch = line.on(0)
    rejected = ((0, Rejected("no text")),)
    assert line.handle(events.Progressed(batch.id, rejected, ((1, LEFT),))) == ["failed 0", "t:1"]


# -- leases --


@pytest.mark.parametrize("expert", ["t", "u"])
def test_request_larger_than_any_lease_ends_with_a_reason(expert):
    line = Turns()
    assert line.text(0, expert, Work(1, 20, 21)) == ["failed 0"]
    line.because(
        f"{expert}: 21 tokens need more memory than any that it could run from has for texts (the largest share is 20 "
        "bytes) - ask for fewer tokens"
    )
    assert line.text(1, expert, Work(1, 19, 20)) == [f"{expert}:1"]


# -- what ends, and what is lost --


def test_preempted_text_stays_with_the_executor_that_holds_its_cache():
    line = Turns(executors=2)
    line.play("t0; t1/0.0.6")
    executors = {}
    for request in range(2, 20):
        line.text(request, "a")
        executors[request] = line.assigned.executor
    for request in (request for request, executor in executors.items() if executor == 1):
        line.handle(events.Cancelled(request))  # request 0 would be sooner there
    line.quantum_ends(executor=0)
    assert line.on(0).quantum_s is None
    line.handle(events.Preempted(0))
    assert line.assigned.executor == 0


def three_texts_of_which_the_last_lacks_memory(share=18, by_bytes=8):
    """All three run alone after a batch of them ran short; two of them have begun."""
    line = Turns(room=1, share=share, texts=replace(TEXTS, workspace_bytes=by_bytes))
    line.text(0, "t")
    line.comes()
    line.now = 1.0
    line.text(1, "t")
    line.text(2, "t")
    line.quantum_ends()
    line.breaks(out_of_memory=True)
    while line.leased < 18:
        line.quantum_ends()
    assert line.on(0).requests == (2,)
    line.breaks(out_of_memory=True)
    return line


def test_memory_below_plan_preempts_the_youngest_texts_first():
    line = three_texts_of_which_the_last_lacks_memory()
    line.preempts(2, 1)
    assert line.changes == [("host", 18, 10)]
    ended = set()
    while line.running:
        told = line.quantum_ends(finished=line.on(0).requests)
        ended |= {int(word.removeprefix("done ")) for word in told if word.startswith("done")}
        assert line.leased <= 10
    assert ended == {0, 1, 2}


def test_lowered_lease_budget_grows_back_without_shortage():
    line = three_texts_of_which_the_last_lacks_memory()
    while line.running:
        line.quantum_ends(finished=line.on(0).requests)
    for change in (("host", 10, 14), ("host", 14, 16), ("host", 16, 18)):
        line.waits(line.engine.next_wakeup_s())
        assert line.changes == [change]
    line.waits(line.engine.next_wakeup_s())
    assert line.engine.next_wakeup_s() is None


def test_lease_budget_never_falls_below_accepted_texts_and_larger_ones_are_refused():
    line = three_texts_of_which_the_last_lacks_memory(by_bytes=17)
    assert line.changes == [("host", 18, 6)]
    line.text(3, "t", Work(1, 3, 7))
    assert "ask for fewer tokens" in line.outcomes[3].reason
    line.preempts()


# -- families --


def test_broken_family_batch_is_rerun_one_by_one_blaming_the_faulty_expert():
    line = Turns(family="f")
    line.play(
        "a9; t0; u1; images; quantum; breaks -> t:0; preempts 0 1; quantum 0 -> done 0 u:1; breaks; because u: broke"
    )
    assert line.engine.statistics().on_probation == {}
    line.play("u2; breaks; u3; breaks; t4 -> t:4")
    assert list(line.engine.statistics().on_probation) == ["u"]


@given(st.integers(2, 4), st.integers(1, 12), st.integers(1, 9))
def test_waiting_text_begins_within_the_bound_despite_running_ones(places, begun, coming):
    line = Turns(texts=replace(TEXTS, max_batch=places), share=10**6)
    for request in range(begun):
        line.text(request, "t")
    for _ in range(4 * begun):
        line.quantum_ends()
    for place in range(coming):
        line.text(100 + place, "t")
    ran = []
    for _ in range(2 * -(-coming // (places // 2)) + 4 * (begun + coming)):
        line.quantum_ends()
        ran.append(line.on(0).requests)
    first = {
        request: next(n for n, batch in enumerate(ran, 1) if request in batch) for request in range(100, 100 + coming)
    }
    assert all(n <= 2 * -(-(request - 99) // (places // 2)) for request, n in first.items())
    window = 2 * -(-(begun + coming) // (places - places // 2))
    for end in range(window, len(ran) + 1):
        assert set().union(*ran[end - window : end]) >= set(range(begun)), "whoever has begun has turns, too"


def test_route_step_leases_by_the_limits_of_its_own_expert():
    line = Turns(share=20)
    router = Work(prompt=2, most=3)
    line.handle(events.Arrived(0, expert="t", work=replace(router, steps=(("t", router), ("u", Work(2, 3, 18))))))
    assert line.leased == 3
    line.quantum_ends(finished=[0])
    line.handle(events.Arrived(1, "sorted", work=replace(router, steps=(("t", Work(2, 3, 18)),))))
    line.images()
    assert line.leased == 18
