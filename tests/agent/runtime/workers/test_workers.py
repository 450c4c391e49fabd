"""The contract of a worker, kept by this process, by another one, and by an actor; and what crosses to them."""

import errno
import os
import queue
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from agent.core import effects, events
from agent.core.engine import EngineSetup
from agent.core.performance import SSD, ExecutorSpec, ExpertProfile, Limits, Performance, PerformanceMatrix, PoolSpec
from agent.core.request import Batch, Portion
from agent.faults.errors import WorkerBroken
from agent.runtime.assembly import local_worker
from agent.runtime.expert_copy import prepared_form
from agent.runtime.loop import AgentPlan, LoopOptions
from agent.runtime.machine.detection import detect
from agent.runtime.worker import WorkerLost
from agent.runtime.workers.files import PIECE_BYTES, FileReceiver, PackedFile, files_of, piece_of
from agent.runtime.workers.host import WorkerHost
from agent.runtime.workers.messages import decode, encode
from agent.runtime.workers.processes import start_process
from agent.runtime.workers.remote import RemoteWorker
from experts.children.messages import VERSION
from experts.errors import CoServeError
from experts.expert import BoundingBox, Precision, Prediction, Rejected
from experts.graph import ExpertGraph
from experts.packed.weights import SegmentStore
from tests.agent.runtime.conftest import opened

PATIENCE_S = 60.0
BOX = replace(detect("cpu"), cores=1)
PERFORMANCE = Performance(K_s=0.004, B_s=0.002, max_batch=4, workspace_bytes=4 * 2**20)


@pytest.fixture(scope="module")
def line(packed_directory, predicted):
    """As for other tests of the runtime, but one for all of these."""
    yield from opened(packed_directory, predicted)


def plan_of(line):
    largest = max(copy.footprint.total_bytes for copy in line.copies.values())
    pool = PoolSpec("w1/host", 3 * largest, 64 * 2**20)
    rows = {
        copy.expert.id: ExpertProfile(
            copy.name, PERFORMANCE, copy.footprint, {SSD: 0.01}, None, prepared_form(copy.expert)
        )
        for copy in line.copies.values()
    }
    executors = (ExecutorSpec(0, "w1/cpu", "w1/host"),)
    matrix = PerformanceMatrix({"w1/cpu": rows})
    return AgentPlan(BOX, EngineSetup(ExpertGraph((), {}), "", executors, matrix, Limits((pool,))), line.copies)


@contextmanager
def in_this_process(line, post, _):
    worker = local_worker(plan_of(line), line.segments, post, LoopOptions())
    worker.start()
    yield worker
    assert worker.stop(PATIENCE_S)
    worker.close()


@contextmanager
def in_another(line, post, folder):
    with remote(line, post, start_process(folder / "packed")) as worker:
        yield worker


@contextmanager
def in_an_actor(line, post, folder):
    ray_cluster = pytest.importorskip("agent.cluster.ray_cluster", reason="coserve[cluster] is not installed")
    with ray_cluster.ray.init(
        address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
    ):
        actor = ray_cluster.WorkerActor.remote("w1", str(folder / "packed"), 30)
        with remote(line, post, ray_cluster.RayChannel(actor)) as worker:
            yield worker


@contextmanager
def remote(line, post, channel, *, has_files=True):
    plan = plan_of(line)
    worker = RemoteWorker("w1", channel, line.segments)
    setup = plan.setup
    worker.executors, worker.post = setup.executors, post
    if has_files:
        worker.give_files([copy.packed for copy in line.copies.values()])
    options = frozenset(), None
    assert worker.ask("assemble", BOX, setup.executors, setup.limits, plan.copies, setup.matrix, options) == {}
    worker.start()
    try:
        yield worker
    finally:
        worker.stop(PATIENCE_S)


@pytest.fixture(scope="module", params=[in_this_process, in_another, pytest.param(in_an_actor, marks=pytest.mark.slow)])
def working(request, line, tmp_path_factory):
    """One worker for all tests, of which the last one ends it."""
    answers = queue.SimpleQueue()
    with request.param(line, answers.put, tmp_path_factory.mktemp("worker")) as worker:
        yield worker, answers


def load_of(line, name, number=1):
    copy = line.copy(name)
    return effects.StartLoad(number, copy.expert.id, copy.name, SSD, "w1/host", copy.footprint.total_bytes)


def test_worker_loads_judges_evicts_and_loads_again(working, line):
    worker, answers = working
    copy = line.copy("own-0")
    images = [line.pixels(seed) for seed in range(3)]
    for turn in (1, 2):
        worker.start_load(load_of(line, "own-0", turn))
        assert answers.get(timeout=PATIENCE_S) == events.Loaded(turn)
        requests = tuple(10 * turn + seed for seed in range(3))
        worker.prepare(effects.Prepare(requests[0], copy.expert.id, (), 0, 0.0, 0), images[0])
        batch = Batch(turn, 0, copy.expert.id, copy.name, requests, 12 * 2**20)
        worker.start_batch(batch, images, is_next=True)
        worker.prioritise(batch)
        finished = answers.get(timeout=PATIENCE_S)
        assert [each.label for each in finished.results] == [line.predict("own-0", image).label for image in images]
        for request in requests:
            worker.forget(request)
            worker.end(request)
        worker.evict(copy.name, "w1/host")
    worker.set_budget("w1/host", 2**30)


def test_each_image_has_its_own_answer(working, line):
    worker, answers = working
    copy = line.copy("own-1")
    worker.start_load(load_of(line, "own-1"))
    assert answers.get(timeout=PATIENCE_S) == events.Loaded(1)
    images = [b"no image", line.pixels(1), np.zeros((0, 0, 3), np.uint8)]
    batch = Batch(1, 0, copy.expert.id, copy.name, (1, 2, 3), 12 * 2**20)
    worker.start_batch(batch, images, is_next=True)
    kinds = [type(each) for each in answers.get(timeout=PATIENCE_S).results]
    assert kinds == [Rejected, Prediction, Rejected]


def test_unknown_copy_is_answered_as_a_permanent_load_failure(working, line):
    worker, answers = working
    worker.start_load(effects.StartLoad(7, "cls/none", "cls/none@fp32", SSD, "w1/host", 1))
    failed = answers.get(timeout=PATIENCE_S)
    assert (type(failed), failed.load, failed.permanent) == (events.LoadFailed, 7, True)


def test_worker_that_is_given_up_is_lost_once(working):
    worker, answers = working
    assert worker.lose("it hangs") is isinstance(worker, RemoteWorker)  # this process gives itself up by no such call
    if isinstance(worker, RemoteWorker):
        assert answers.get(timeout=PATIENCE_S) == WorkerLost("w1", "it hangs")


def test_repeated_copies_keep_their_smaller_images_and_changed_ones_do_not(line, tmp_path):
    with in_this_process(line, lambda _: None, tmp_path) as worker:
        worker.preparation.scaled = frozenset({"cls/own-0"})
        _, (copies,) = decode(encode("know", line.copies))
        worker.know(copies, plan_of(line).setup.matrix)
        assert worker.preparation.scaled == {"cls/own-0"}
        other = replace(copies["cls/own-0@fp32"], expert=replace(copies["cls/own-0@fp32"].expert, labels=("a", "b")))
        worker.know(copies | {"cls/own-0@fp32": other}, plan_of(line).setup.matrix)
        assert worker.preparation.scaled == frozenset()


def test_worker_that_ends_before_it_works_is_reported(line, tmp_path):
    worker = RemoteWorker("w1", start_process(tmp_path / "packed"), line.segments)
    with pytest.raises(WorkerBroken, match="worker w1: BackendUnavailable: nothing: no such device"):
        worker.ask("detect", "nothing")


def test_unforeseen_error_in_a_worker_reaches_the_agent_with_its_type_and_text(line, tmp_path):
    answers = queue.SimpleQueue()
    with in_another(line, answers.put, tmp_path) as worker:
        worker.start_batch(Batch(1, 0, "cls/x", "cls/x@fp32", (1,), 0), [line.pixels(1)], is_next=True)
        assert answers.get(timeout=PATIENCE_S) == WorkerLost("w1", "KeyError: 'cls/x@fp32'")


class QueueChannel:
    """One end of a channel of two queues; ``on_send`` is called with the name of each message after it was sent."""

    def __init__(self, inbox, outbox, on_send=lambda _: None):
        self.inbox, self.outbox, self.on_send = inbox, outbox, on_send

    def send(self, *messages):
        for message in messages:
            self.outbox.put(message)
            self.on_send(decode(message)[0])

    def receive(self):
        return self.inbox.get()

    def kill(self):
        self.inbox.put(None)
        self.outbox.put(None)

    def close(self):
        pass


def test_image_overtakes_a_file_on_its_way_to_a_worker(line, tmp_path):
    segments = SegmentStore(tmp_path / "agent")
    path, content = segments.segment_path("a0"), bytes(range(256)) * (3 * PIECE_BYTES // 256)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    file = PackedFile("segments", "a0", len(content), "of another box")
    to_agent, to_worker, sent = queue.SimpleQueue(), queue.SimpleQueue(), []

    def on_send(name):
        sent.append(name)
        if sent == ["write"]:
            worker.prepare(effects.Prepare(1, "cls/own-0", (), 0, 0.0, 0), line.pixels(1))

    worker = RemoteWorker("w1", QueueChannel(to_agent, to_worker, on_send), segments)
    to_agent.put(encode("lacking", (file,)))
    arrived = [decode(to_worker.get(timeout=PATIENCE_S)) for _ in range(5)]
    assert [name for name, _ in arrived] == ["write", "take_image", "prepare", "write", "write"]
    receiver = FileReceiver(tmp_path)
    for name, arguments in arrived:
        if name == "write":
            receiver.write(*arguments)
    assert (tmp_path / "segments" / "a0.bin").read_bytes() == content
    worker.lose("the test has ended")


def test_load_waits_for_its_files_and_a_damaged_file_is_sent_again(line, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EXDEV, "on another filesystem")

    monkeypatch.setattr(os, "link", refuse)
    to_agent, to_worker, answers = queue.SimpleQueue(), queue.SimpleQueue(), queue.SimpleQueue()
    channel = QueueChannel(to_worker, to_agent)

    def serve():
        WorkerHost(channel, tmp_path).serve()
        channel.kill()

    serving = Thread(target=serve, daemon=True)
    serving.start()
    with remote(line, answers.put, QueueChannel(to_agent, to_worker), has_files=False) as worker:
        worker.know(line.copies, plan_of(line).setup.matrix)
        worker.start_load(load_of(line, "own-0"))
        assert answers.get(timeout=PATIENCE_S) == events.Loaded(1)
        worker.start_load(load_of(line, "own-1"))
        assert answers.get(timeout=PATIENCE_S) == events.Loaded(1)
        worker.evict(line.copy("own-1").name, "w1/host")
        segment = line.copy("own-1").packed.own
        (tmp_path / "segments" / f"{segment.sha256}.bin").write_bytes(bytes(segment.size_bytes))
        worker.start_load(load_of(line, "own-1", 2))
        failed = answers.get(timeout=PATIENCE_S)
        assert (type(failed), failed.load, failed.permanent) == (events.LoadFailed, 2, False)
        worker.start_load(load_of(line, "own-1", 3))
        assert answers.get(timeout=PATIENCE_S) == events.Loaded(3)
    serving.join(PATIENCE_S)


BATCH = Batch(1, 2, "a", "a@fp32", (1, 2), 5, None, (Portion("a", "a@fp32", (1,)),))


@pytest.mark.parametrize(
    "arguments",
    [
        (BATCH, True),
        (events.Finished(1, (Prediction("ok", 0.1, (BoundingBox("a", 0.25, 1.0, 2.0, 3.0, 4.0),)), Rejected("é"))),),
        (Limits((PoolSpec("h", 1, 2),), placement={"a": frozenset({"x", "y"})}),),
        (b"", b"ab", {("a", 1): 1.5}, None, float("inf"), Precision.BF16),
    ],
)
def test_messages_arrive_as_they_were_sent(arguments):
    name, arrived = decode(encode("name", *arguments))
    assert (name, arrived) == ("name", arguments)
    assert [type(each) for each in arrived] == [type(each) for each in arguments]


def test_pixels_arrive_writable():
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    _, (arrived,) = decode(encode("image", pixels))
    arrived[0, 0, 0] = 9
    assert (arrived.shape, arrived[1, 3, 2]) == ((2, 4, 3), 23)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "no message"),
        (encode("a", b"x")[:-1], "says"),
        (bytes([VERSION + 1, 0]) + encode("a")[2:], "install the same version everywhere"),
        (encode("a", Path("/")).replace(b"Path", b"open"), "no message of a worker: KeyError"),
        (encode("a", Path("/")).replace(b"Path", b"dict"), "update sequence"),
        (encode("a")[:-1] + b"}", "Expecting"),
    ],
)
def test_malformed_message_is_refused_with_the_reason(content, told):
    with pytest.raises(ValueError, match=told):
        decode(content)


def test_message_with_an_undeclared_record_is_refused():
    with pytest.raises(TypeError, match="object crosses to no worker"):
        encode("a", object())
    forged = encode("a", Portion("a", "b", ())).replace(b"Portion", b"Forgery")
    with pytest.raises(ValueError, match="Forgery"):
        decode(forged)


def test_packed_files_are_linked_or_sent(line, tmp_path):
    receiver, files = FileReceiver(tmp_path), files_of([line.copy("own-0").packed], line.segments)
    assert receiver.link(files) == ()
    assert (tmp_path / "segments" / f"{files[0].sha256}.bin").samefile(files[0].path)
    sent = FileReceiver(tmp_path / "other")
    away = tuple(replace(file, path="/nowhere") for file in files)
    assert sent.link(away) == away
    for file in away:
        for offset in range(0, file.size_bytes, PIECE_BYTES):
            assert file.sha256 in sent.awaited
            sent.write(file, offset, piece_of(file, offset, line.segments))
    assert (sent.link(away), sent.awaited) == ((), set())
    gone = replace(away[0], sha256="a0")
    assert sent.link([gone]) == (gone,)
    sent.write(gone, 0, piece_of(gone, 0, line.segments))
    assert sent.awaited == set()
    with pytest.raises(CoServeError, match="is no packed file"):
        sent.write(replace(gone, kind="../segments"), 0, b"right")
