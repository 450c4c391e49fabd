"""Threads that carry out what is due first first."""

from __future__ import annotations

import gc
import threading
import weakref
from queue import SimpleQueue

import pytest

from agent.runtime.due_threads import LEAST_LISTED, DueTask, DueThreads

PATIENCE_S = 30.0


class Result:
    """Something large, as it were."""


class Busy:
    """One thread, held until it is let go; ``done``: what was carried out, in order."""

    def __init__(self):
        self.threads = DueThreads(1, "test")
        self.done = []
        self._may_go = threading.Event()
        self._is_held = threading.Event()
        self.holding = self.threads.submit(self._hold, 0.0)
        assert self._is_held.wait(PATIENCE_S)

    def _hold(self, answer):
        self._is_held.set()
        self._may_go.wait(PATIENCE_S)
        answer(None)

    def submit(self, name, due_s):
        def call(answer):
            self.done.append(name)
            answer(name)

        return self.threads.submit(call, due_s)

    def let_go(self):
        self._may_go.set()


@pytest.fixture
def busy():
    busy = Busy()
    yield busy
    busy.let_go()
    busy.threads.stop()


def test_what_is_due_first_is_first_and_else_what_was_given_first(busy):
    tasks = [busy.submit(name, due_s) for name, due_s in (("c", 3.0), ("a", 1.0), ("b", 2.0), ("a2", 1.0))]
    busy.let_go()
    assert [task.future.result(PATIENCE_S) for task in tasks] == ["c", "a", "b", "a2"]
    assert busy.done == ["a", "a2", "b", "c"]


def test_whoever_is_waited_for_comes_before_all_others_and_once(busy):
    tasks = [busy.submit(name, due_s) for name, due_s in (("a", 1.0), ("b", 2.0), ("c", 3.0))]
    busy.threads.hurry(tasks[2])
    busy.threads.hurry(tasks[2])
    busy.threads.hurry(busy.holding)
    busy.let_go()
    assert [task.future.result(PATIENCE_S) for task in tasks] == ["a", "b", "c"]
    assert busy.done == ["c", "a", "b"]


def test_what_is_cancelled_is_not_carried_out(busy):
    first, second = busy.submit("a", 1.0), busy.submit("b", 2.0)
    first.cancel()
    busy.holding.cancel()  # it is begun
    assert (first.future.cancelled(), busy.holding.future.cancelled()) == (True, False)
    busy.let_go()
    assert second.future.result(PATIENCE_S) == "b"
    assert busy.done == ["b"]


def test_an_error_is_the_task_s_and_the_thread_lives(busy):
    def broken(answer):
        raise ValueError("broken")

    task, after = busy.threads.submit(broken, 1.0), busy.submit("a", 2.0)
    busy.let_go()
    with pytest.raises(ValueError, match="broken"):
        task.future.result(PATIENCE_S)
    assert after.future.result(PATIENCE_S) == "a"


def test_a_call_may_go_on_after_its_answer(busy, caplog):
    went_on = threading.Event()

    def call(answer):
        answer("early")
        went_on.set()
        raise ValueError("too late to matter")

    task = busy.threads.submit(call, 1.0)
    busy.let_go()
    assert task.future.result(PATIENCE_S) == "early"
    assert went_on.wait(PATIENCE_S)
    assert busy.submit("next", 2.0).future.result(PATIENCE_S) == "next"
    assert "due_task_broke" in caplog.text


def test_stopping_cancels_what_was_not_begun(busy):
    waiting = busy.submit("a", 1.0)
    assert not busy.threads.stop(0.0)
    assert waiting.future.cancelled()
    busy.let_go()
    assert busy.threads.stop(PATIENCE_S)
    with pytest.raises(RuntimeError, match="stopped"):
        busy.submit("b", 1.0)


def test_a_task_that_is_done_has_its_result():
    assert DueTask.done(3).future.result() == 3


def test_whoever_asks_carries_out_what_nobody_has_begun_and_nothing_else(busy):
    waiting = busy.submit("waiting", 1.0)
    waiting.begin()
    busy.holding.begin()  # the thread is at it
    assert (waiting.future.result(0.0), busy.holding.future.done()) == ("waiting", False)
    cancelled = busy.submit("cancelled", 2.0)
    cancelled.cancel()
    cancelled.begin()
    busy.let_go()
    assert busy.submit("last", 3.0).future.result(PATIENCE_S) == "last"
    assert busy.done == ["waiting", "last"]


def test_no_more_of_them_begin_than_are_allowed():
    threads, begun, may_go = DueThreads(3, "test"), SimpleQueue(), threading.Event()

    def call(answer):
        begun.put(None)
        assert may_go.wait(PATIENCE_S)
        answer(None)

    threads.allow(0)
    tasks = [threads.submit(call, 1.0) for _ in range(4)]
    for allowed in (1, 2):
        threads.allow(allowed)
        begun.get(timeout=PATIENCE_S)
        assert sum(task.is_open for task in tasks) == 4 - allowed
    threads.allow(0)
    may_go.set()
    for task in tasks:
        task.begin()
    assert [task.future.result(PATIENCE_S) for task in tasks] == [None] * 4
    threads.allow(3)
    assert threads.submit(call, 1.0).future.result(PATIENCE_S) is None
    assert threads.stop(PATIENCE_S)


def test_nothing_is_kept_of_what_others_did_while_no_thread_may_work():
    threads, results = DueThreads(1, "test"), []
    threads.allow(0)
    listed = []
    for number in range(2000):
        task = threads.submit(lambda answer: answer(Result()), float(number))
        listed.append(weakref.ref(task.work))
        if number % 2:
            task.begin()
            results.append(weakref.ref(task.future.result(0.0)))
        else:
            task.cancel()
    del task
    gc.collect()
    assert not any(result() for result in results)
    assert sum(each() is not None for each in listed) <= LEAST_LISTED
    last = threads.submit(lambda answer: answer("last"), 0.0)
    threads.allow(1)
    assert last.future.result(PATIENCE_S) == "last"
    assert threads.stop(PATIENCE_S)


def test_a_task_that_other_threads_hurry_is_begun_once(busy):
    waiting, others = busy.submit("waiting", 5.0), DueThreads(1, "others")
    others.hurry(waiting)
    assert waiting.future.result(PATIENCE_S) == "waiting"  # while the thread that it was given to is held
    busy.let_go()
    assert (others.stop(PATIENCE_S), busy.threads.stop(PATIENCE_S), busy.done) == (True, True, ["waiting"])
