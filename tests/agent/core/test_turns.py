"""Requests that count in tokens beside images: quanta, turns, requests that join, begin, end and are preempted."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core import events
from agent.core.effects import Assigned, Complete, Fail, LeasesChanged, Preempt, StartBatch, StartLoad
from agent.core.engine import Engine
from agent.core.performance import (
    SSD,
    ExecutorSpec,
    ExpertProfile,
    Footprint,
    Limits,
    Performance,
    PerformanceMatrix,
    PoolSpec,
    PreparedForm,
)
from agent.core.policy import PRESETS
from agent.core.request import IMAGE, Rejected, Work
from experts.expert import Prediction
from experts.graph import ExpertGraph, RouteStep
from tests.agent.core.worlds import played

PASS = Prediction("ok", 1.0)
QUANTUM_S, LONE_QUANTUM_S, BOUND_S, SHARE = 4.0, 9.0, 100.0, 20
PICTURES = Performance(K_s=1.0, B_s=1.0, max_batch=4, workspace_bytes=1)
TEXTS = Performance(0.0, 1.0, 3, 1, K_prompt_s=0.5, K_output_s=2.0, lease_bytes=1)
ASK = Work(prompt=2, output=3, most=6)
LEFT = Work(prompt=0, output=2, most=6, held=3)


class Line:
    """An Engine whose memory holds ``room`` of the experts: images of a and b, texts of t and u; one executor."""

    def __init__(
        self, policy="coserve", room=4, executors=1, bound_s=BOUND_S, share=SHARE, texts=TEXTS, family=None, budget=0
    ):
        form = PreparedForm("small", 1)
        rows = {
            name: ExpertProfile(name, texts, Footprint(1), {SSD: 1.0}, family)
            if name in "tu"
            else ExpertProfile(name, PICTURES, Footprint(1), {SSD: 1.0}, prepared=form)
            for name in "abtu"
        }
        matrix = PerformanceMatrix({"cpu": rows}, dict.fromkeys("abtu", 0.25))
        routes = {"sorted": (RouteStep("a", frozenset({"ok"})), RouteStep("t", frozenset({"ok"})))}
        workspace_bytes = executors * max(PICTURES.workspace_for(4), texts.workspace_for(4))
        pool = PoolSpec("host", room, workspace_bytes, lease_bytes=share)
        limits = Limits((pool,), bound_s, quantum_s=QUANTUM_S, lone_quantum_s=LONE_QUANTUM_S, loads_in_flight=4,
                        prepared_bytes=budget)  # fmt: skip
        specs = [ExecutorSpec(number, "cpu", "host") for number in range(executors)]
        self.graph, self.matrix = ExpertGraph("abtu", routes), matrix
        self.engine = Engine(self.graph, matrix, specs, PRESETS[policy], limits)
        self.now = 0.0
        self.effects = []
        self.running = {}
        self.tell(events.Started())
        while loads := [each.load for each in self.effects if isinstance(each, StartLoad)]:
            for load in loads:
                self.tell(events.Loaded(load))

    def tell(self, event):
        self.effects = self.engine.handle(event, self.now)
        self.engine.check_invariants()
        for effect in self.effects:
            if isinstance(effect, StartBatch):
                self.running[effect.batch.executor] = effect.batch
        return [
            (each.batch.expert, each.batch.requests) if isinstance(each, StartBatch) else (type(each), each.request)
            for each in self.effects
            if isinstance(each, StartBatch | Complete | Fail)
        ]

    def ask(self, request, expert, work=None):
        text = ASK if work is None else work
        return self.tell(events.Arrived(request, expert=expert, work=text if expert in "tu" else IMAGE))

    def quantum_ends(self, finished=(), executor=0, left=LEFT):
        """Each request of the batch that is not finished has ``left``."""
        batch = self.running.pop(executor)
        ended = tuple((request, PASS) for request in batch.requests if request in finished)
        others = tuple((request, left) for request in batch.requests if request not in finished)
        return self.tell(events.Progressed(batch.id, ended, others))

    def images_end(self, executor=0):
        batch = self.running.pop(executor)
        return self.tell(events.Finished(batch.id, (PASS,) * len(batch.requests)))

    def breaks(self, *, out_of_memory=False):
        return self.tell(events.BatchFailed(self.running.pop(0).id, "broke", out_of_memory))

    def play(self, script):
        """Steps of a script, divided by semicolons; after `->`, what starts and ends because of the last one.

        `t0` asks t for request 0, `t0/2.3.6` with this work. `quantum 0 1`: a quantum is over, and these requests are
        done. `images`: a batch of images is over. `t:0,1 u:2` starts, `done 0` ends well, `failed 0` does not.
        """
        for step in script.split(";"):
            did, _, wanted = (part.strip() for part in step.partition("->"))
            verb, *args = did.split()
            if re.match(r"[a-u]\d", verb):
                for each in (verb, *args):
                    number, _, work = each[1:].partition("/")
                    told = self.ask(int(number), each[0], Work(*map(int, work.split("."))) if work else None)
            elif verb == "quantum":
                told = self.quantum_ends(tuple(map(int, args)))
            elif verb == "left":  # prompt, output, most, lease and held of each that is not done; before it one that is
                done, work = ([int(args[0])], args[1:]) if len(args) > 5 else ([], args)
                told = self.quantum_ends(done, left=Work(*map(int, work)))
            elif verb in ("leased", "length_s"):
                assert getattr(self, verb) == float(*args), step
            elif verb == "preempts":
                assert self.preempted == [(int(each), 0) for each in args], step
            elif verb == "because":
                assert self.reason == " ".join(args)
            elif verb == "loads":
                assert [each.expert for each in self.effects if isinstance(each, StartLoad)] == args, step
            elif verb == "loaded":
                (load,) = [each.load for each in self.effects if isinstance(each, StartLoad)]
                told = self.tell(events.Loaded(load))
            elif verb in SAID:
                told = self.tell(SAID[verb](*args))
            else:
                told = {"images": self.images_end, "breaks": self.breaks, "waits": self.wait}[verb](*map(float, args))
            assert not wanted or (wanted == "nothing" and not told) or wanted == " ".join(map(self.word, told)), step

    def word(self, told):
        what, who = told
        if not isinstance(what, str):
            return f"{'done' if what is Complete else 'failed'} {who}"
        (batch,) = [each for each in self.running.values() if each.requests == who]
        return " ".join(f"{each.expert}:{','.join(map(str, each.requests))}" for each in batch.all_portions)

    def wait(self, until_s):
        self.now = until_s
        self.tell(events.Tick())

    @property
    def preempted(self):
        return [(each.request, each.executor) for each in self.effects if isinstance(each, Preempt)]

    @property
    def assigned(self):
        (assigned,) = [each for each in self.effects if isinstance(each, Assigned)]
        return assigned

    @property
    def changes(self):
        return [
            (each.pool, each.before_bytes, each.after_bytes) for each in self.effects if isinstance(each, LeasesChanged)
        ]

    @property
    def leased(self):
        return self.engine.statistics().pools[0].lease_used_bytes

    @property
    def length_s(self):
        return self.engine.statistics().queues[0].length_s

    @property
    def reason(self):
        (reason,) = [effect.outcome.reason for effect in self.effects if isinstance(effect, Fail)]
        return reason


SAID = {
    "cancelled": lambda request: events.Cancelled(int(request)),
    "preempted": lambda request, *work: events.Preempted(int(request), Work(*map(int, work)) if work else None),
    "quarantined": lambda expert: events.Quarantined(expert, "bad"),
    "unwanted": events.Unwanted,
}

# Each case: a line, and what is played on it.
CASES = """
a request that is not done goes on, one that is done ends, and all may be done with a quantum | Line() |
    t0 t1; quantum -> t:0,1; quantum 0 -> done 0 t:1; images -> done 1; leased 0
requests that came meanwhile join the next quantum behind those that have begun | Line() |
    t0; t1 t2 t3 -> nothing; quantum -> t:0,1,2; quantum 1 -> done 1 t:0,2,3
images have no quantum to go on after | Line() |
    a0; quantum -> failed 0; because a: 1 of 1 images are not done, and images have no quantum
progress without an unfinished request is as good as finished | Line() |
    a0; quantum 0 -> done 0
# turns
ongoing groups take turns and images wait for one of them at a time | Line() |
    # after the first of u, t is due, and was passed
    t0 u1; quantum -> u:1; b2 b3 b4 b5 b6 b7 b8 b9 b10; quantum -> b:2,3,4,5;
    images -> done 2 done 3 done 4 done 5 t:0; quantum -> b:6,7,8,9; images -> done 6 done 7 done 8 done 9 u:1
images that came behind many texts wait for one quantum and these begin between them | Line(share=100) |
    t0 t1 t2 t3 t4 t5 a10 a11 a12 a13 a14; quantum 0 -> done 0 a:10,11,12,13;
    images -> done 10 done 11 done 12 done 13 t:1,2,3; quantum 1 -> done 1 a:14; images -> done 14 t:2,3,4
an executor of the paper's waits for the load of an image that is next | Line("paper", room=1) |
    t0; loaded; a1; quantum -> nothing; loads a; loaded -> a:1; images -> done 1; loaded -> t:0
an executor of Samba-CoE's waits for the load of an image that is next | Line("samba", room=1) |
    t0; loaded; a1; quantum -> nothing; loads a; loaded -> a:1; images -> done 1; loaded -> t:0
an ongoing group whose expert had to leave asks for it | Line(room=1, bound_s=10.0) |
    t0; loaded; a1; waits 10; quantum -> nothing; loads a; loaded -> a:1; images -> done 1; loads t; loaded -> t:0;
    leased 6
no batch of images is queued ahead of texts that wait for their turn | Line(budget=9) |
    a9; a1 a2 a3 a4; images; a5 a6 t0 a7; a8 -> nothing
a full batch of images is queued ahead where no texts wait | Line(budget=9) |
    a9; a1 a2 a3 a4; images; a5 a6 a7; a8 -> a:5,6,7,8
requests of one expert begin together whatever stands between them | Line("em") |
    a9; t0 u1 t2; images -> done 9 t:0,2
# leases
a request that waits for a lease asks for no load meanwhile | Line(room=1, share=10) |
    t0; loaded; u1; waits 200; quantum -> t:0; loads; quantum 0 -> done 0; loads u
a request that no longer needs a lease leaves it to the next one which asks for its load then | Line(room=2, share=10) |
    t0; loaded; u1; a2; loaded; quantum; loads; preempted 0; loads u
a small lease leaves what a larger one has waited for beyond the bound | Line(share=10) |
    t0; u1; waits 200; t3/0.1.3; quantum -> t:0
without a bound a small lease passes a larger one | Line("paper", share=10) |
    t0; u1; waits 200; t3/0.1.3; quantum -> t:0,3
no request has a larger lease than the most that it may hold | Line(share=6) |
    t0; left 0 2 6 50 3; leased 6
a request without room for a larger lease gives it back and waits for that one | Line(share=10) |
    t0/2.3.6.3; u1/2.3.6; left 0 2 6 3 3 -> u:1; leased 9; quantum -> t:0; leased 9; left 0 2 6 5 3 -> u:1; preempts 0;
    leased 6; quantum 1 -> done 1 t:0; leased 5; length_s 6.5
requests that end make room for the larger leases of their batch, the oldest first | Line(share=9) |
    waits 1; t0/2.3.6.3; waits 2; t1/2.3.6.3; waits 3; t2/2.3.6.3; left 0 2 6 3 3 -> t:0,1,2; left 1 0 2 6 5 3;
    preempts 2; leased 5
# lengths: B 1 s, 0.5 s a token read, 2 s a token written
a quantum counts for as long as it may last, and work that is left after it counts too | Line() |
    t0; length_s 8; waits 3; length_s 5; waits 9; length_s 4; t1/2.0.2; length_s 6; quantum; length_s 6; quantum 1;
    quantum 0; length_s 0
# requests that end, and those that lose their memory
a request that is cancelled between two quanta ends at once | Line() |
    t0 a1; quantum -> a:1; length_s 7; cancelled 0 -> failed 0; because cancelled; leased 0; images -> done 1
a preempted request begins anew behind those that wait, and reads again what it held | Line(share=12) |
    t0; a1; u2/0.1.8; quantum; preempted 0 -> nothing; leased 0; images -> done 1 u:2; quantum 2 -> done 2 t:0;
    length_s 6.5
the shell says what a preempted request has to do and needs | Line() |
    t0/2.3.6.3; a1; quantum; preempted 0 4 1 6 5; leased 0; images; leased 5; length_s 5
requests whose batch failed begin anew and alone, and one that fails alone is the only one to blame | Line() |
    a9; t0/0.3.4 t1/0.3.4 t2/0.3.4; images; left 0 2 4; breaks -> t:0; leased 4; length_s 13; left 0 2 4 -> t:1;
    left 0 2 4 -> t:0; left 0 2 4 -> t:2; left 0 2 4 -> t:1; left 0 2 4 -> t:0; leased 12; breaks -> failed 0 t:2;
    leased 8
requests that have begun with an expert in quarantine end when their quantum is over | Line() |
    t0; quarantined t -> nothing; quantum -> failed 0; because t is in quarantine: bad; leased 0
requests that have begun with an expert in quarantine end between two quanta | Line() |
    t0 a1; quantum; quarantined t -> failed 0; because t is in quarantine: bad; leased 0
no expert that a request goes on with leaves when it is unwanted | Line() |
    t0 a1; quantum; unwanted t; images -> done 1 t:0
# families
experts of a family begin and go on in the same quanta | Line(family="f") |
    a9 t0 u1; images -> done 9 t:0 u:1; quantum -> t:0 u:1; quantum 1 -> done 1 t:0
without a family each expert has a quantum of its own | Line() |
    t0 u1; quantum -> u:1; quantum -> t:0; quantum -> u:1
an ongoing group rides along with all of its requests or not at all | Line(family="f", share=40) |
    # 3 are a batch: at first the other of u has no place
    a9 t0 t1 u2 u3; images -> done 9 t:0,1 u:2; quantum -> t:0,1 u:2; quantum 0 -> done 0 t:1 u:2,3;
    quantum -> t:1 u:2,3; a5; quantum -> a:5; images -> done 5 t:1 u:2,3
a request that can begin has every other quantum's place before groups that ride along | Line(family="f", share=60) |
    a9 t0 u2 u3; images -> done 9 t:0 u:2,3; t4; quantum -> t:0,4; quantum -> u:2,3; quantum -> t:0,4
of a family the first that came begin first, and those of one group stand together | Line(family="f", share=60) |
    a9 u0 t1 t2 u3; images -> done 9 u:0,3 t:1
"""


@played(CASES)
def test_texts_and_images_take_turns(made, script):
    eval(made).play(script)


# -- quanta --


def test_quanta_are_longer_where_no_images_may_come():
    line = Line()
    line.tell(events.LineChanged(ExpertGraph("abtu", {}), line.matrix, frozenset(), frozenset("ab")))
    line.ask(0, "t")
    assert line.running[0].quantum_s == LONE_QUANTUM_S
    line.quantum_ends(finished=[0])
    line.tell(events.LineChanged(line.graph, line.matrix, frozenset(), frozenset()))
    line.ask(1, "t")
    assert line.running[0].quantum_s == QUANTUM_S


def test_a_request_is_assigned_by_its_work():
    line = Line(executors=2)
    line.ask(0, "t", Work(0, 20, 20))
    assert line.ask(1, "a") == [("a", (1,))]
    assert [each.queue_s for each in line.assigned.candidates] == [41.0, 0.0]
    line.ask(2, "u", Work(4, 1, 5))
    assert [each.addition_s for each in line.assigned.candidates] == [1.0 + 2.0 + 2.0] * 2


@pytest.mark.parametrize("told", [[], [0], [0, 1, 1], [0, 1, 2], [0, 2]])
def test_progress_of_other_requests_than_the_batchs_is_a_failure(told):
    line = Line()
    line.ask(9, "a")
    line.ask(0, "t")
    line.ask(1, "t")
    line.images_end()
    batch = line.running.pop(0)
    assert batch.requests == (0, 1)
    line.tell(events.Progressed(batch.id, (), tuple((request, LEFT) for request in told)))
    assert line.running[0].requests == (0,)  # alone, from the start
    assert line.leased == ASK.most


def test_a_request_that_no_expert_can_be_asked_about_ends_and_the_others_go_on():
    line = Line()
    line.ask(0, "t")
    line.ask(1, "t")
    line.quantum_ends()
    batch = line.running[0]
    rejected = ((0, Rejected("no text")),)
    assert line.tell(events.Progressed(batch.id, rejected, ((1, LEFT),))) == [(Fail, 0), ("t", (1,))]


# -- leases --


@pytest.mark.parametrize("expert", ["t", "u"])
def test_what_can_never_be_leased_ends_with_a_reason(expert):
    line = Line()
    assert line.ask(0, expert, Work(1, 20, 21)) == [(Fail, 0)]
    assert line.reason == (
        f"{expert}: 21 tokens need more memory than any that it could run from has for texts (the largest share is 20 "
        "bytes) - ask for fewer tokens"
    )
    assert line.ask(1, expert, Work(1, 19, 20)) == [(expert, (1,))]


# -- what ends, and what is lost --


def test_whoever_is_preempted_stays_with_the_executor_that_has_what_it_wrote():
    line = Line(executors=2)
    line.play("t0; t1/0.0.6")
    executors = {}
    for request in range(2, 20):
        line.ask(request, "a")
        executors[request] = line.assigned.executor
    for request in (request for request, executor in executors.items() if executor == 1):
        line.tell(events.Cancelled(request))  # request 0 would be sooner there
    line.quantum_ends(executor=0)
    assert line.running[0].quantum_s is None
    line.tell(events.Preempted(0))
    assert line.assigned.executor == 0


def three_texts_of_which_the_last_lacks_memory(share=18, by_bytes=8):
    """All three run alone after a batch of them ran short; two of them have begun."""
    line = Line(room=1, share=share, texts=replace(TEXTS, workspace_bytes=by_bytes))
    line.ask(0, "t")
    for load in [each.load for each in line.effects if isinstance(each, StartLoad)]:
        line.tell(events.Loaded(load))
    line.now = 1.0
    line.ask(1, "t")
    line.ask(2, "t")
    line.quantum_ends()
    line.breaks(out_of_memory=True)
    while line.leased < 18:
        line.quantum_ends()
    assert line.running[0].requests == (2,)
    line.breaks(out_of_memory=True)
    return line


def test_a_memory_that_has_less_than_was_planned_takes_it_from_the_youngest_that_has_begun():
    line = three_texts_of_which_the_last_lacks_memory()
    assert line.preempted == [(2, 0), (1, 0)]
    assert line.changes == [("host", 18, 10)]
    ended = set()
    while line.running:
        told = line.quantum_ends(finished=line.running[0].requests)
        ended |= {request for what, request in told if what is Complete}
        assert line.leased <= 10
    assert ended == {0, 1, 2}


def test_what_a_memory_leases_comes_back_after_a_while_without_shortage():
    line = three_texts_of_which_the_last_lacks_memory()
    while line.running:
        line.quantum_ends(finished=line.running[0].requests)
    for change in (("host", 10, 14), ("host", 14, 16), ("host", 16, 18)):
        line.wait(line.engine.next_wakeup_s())
        assert line.changes == [change]
    line.wait(line.engine.next_wakeup_s())
    assert line.engine.next_wakeup_s() is None


def test_no_less_is_leased_than_what_anybody_may_need_who_was_taken_and_nobody_is_taken_who_needs_more():
    line = three_texts_of_which_the_last_lacks_memory(by_bytes=17)
    assert line.changes == [("host", 18, 6)]
    line.ask(3, "t", Work(1, 3, 7))
    assert "ask for fewer tokens" in line.reason
    assert line.preempted == []


# -- families --


def test_when_a_batch_of_a_family_breaks_its_requests_run_alone_and_only_the_guilty_expert_is_blamed():
    line = Line(family="f")
    line.play(
        "a9; t0; u1; images; quantum; breaks -> t:0; preempts 0 1; quantum 0 -> done 0 u:1; breaks; because u: broke"
    )
    assert line.engine.statistics().on_probation == {}
    line.play("u2; breaks; u3; breaks; t4 -> t:4")
    assert list(line.engine.statistics().on_probation) == ["u"]


@given(st.integers(2, 4), st.integers(1, 12), st.integers(1, 9))
def test_whoever_waits_begins_within_the_bound_however_many_have_begun_and_go_on(places, begun, coming):
    line = Line(texts=replace(TEXTS, max_batch=places), share=10**6)
    for request in range(begun):
        line.ask(request, "t")
    for _ in range(4 * begun):
        line.quantum_ends()
    for place in range(coming):
        line.ask(100 + place, "t")
    ran = []
    for _ in range(2 * -(-coming // (places // 2)) + 4 * (begun + coming)):
        line.quantum_ends()
        ran.append(line.running[0].requests)
    first = {
        request: next(n for n, batch in enumerate(ran, 1) if request in batch) for request in range(100, 100 + coming)
    }
    assert all(n <= 2 * -(-(request - 99) // (places // 2)) for request, n in first.items())
    window = 2 * -(-(begun + coming) // (places - places // 2))
    for end in range(window, len(ran) + 1):
        assert set().union(*ran[end - window : end]) >= set(range(begun)), "whoever has begun has turns, too"


def test_a_step_of_a_route_leases_what_its_expert_may_hold_whatever_other_experts_may():
    line = Line(share=20)
    router = Work(prompt=2, most=3)
    line.tell(events.Arrived(0, expert="t", work=replace(router, steps=(("t", router), ("u", Work(2, 3, 18))))))
    assert line.leased == 3
    line.quantum_ends(finished=[0])
    line.tell(events.Arrived(1, "sorted", work=replace(router, steps=(("t", Work(2, 3, 18)),))))
    line.images_end()
    assert line.leased == 18
