"""Threads that carry out what is due first first."""

import gc
import threading
import weakref

import pytest

from agent.runtime.images.due_threads import LEAST_LISTED, DueThreads

PATIENCE_S = 30.0


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


def test_due_tasks_run_by_deadline_and_then_in_order_of_arrival(busy):
    tasks = [busy.submit(name, due_s) for name, due_s in (("c", 3.0), ("a", 1.0), ("b", 2.0), ("a2", 1.0))]
    busy.let_go()
    assert [task.future.result(PATIENCE_S) for task in tasks] == ["c", "a", "b", "a2"]
    assert busy.done == ["a", "a2", "b", "c"]


def test_hurried_task_runs_before_all_others_and_once(busy):
    tasks = [busy.submit(name, due_s) for name, due_s in (("a", 1.0), ("b", 2.0), ("c", 3.0))]
    busy.threads.prioritise(tasks[2])
    busy.threads.prioritise(tasks[2])
    busy.threads.prioritise(busy.holding)
    busy.let_go()
    assert [task.future.result(PATIENCE_S) for task in tasks] == ["a", "b", "c"]
    assert busy.done == ["c", "a", "b"]


def test_task_may_go_on_after_its_answer(busy, caplog):
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


def test_stop_cancels_tasks_that_were_not_begun(busy):
    waiting = busy.submit("a", 1.0)
    assert not busy.threads.stop(0.0)
    assert waiting.future.cancelled()
    busy.let_go()
    assert busy.threads.stop(PATIENCE_S)
    with pytest.raises(RuntimeError, match="stopped"):
        busy.submit("b", 1.0)


def test_blocked_threads_keep_nothing_of_finished_tasks():
    threads, results = DueThreads(1, "test"), []
    threads.allow(0)
    listed = []
    for number in range(2000):
        task = threads.submit(lambda answer: answer(threading.Event()), float(number))
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
