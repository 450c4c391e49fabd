"""A language model over ranks on a line of images: its texts, a rank that dies, a reload, and refusals."""

import os
import re
import signal
import threading

import numpy as np
import psutil
import pytest

from agent.config import read_line
from agent.deployment.line_change import plan_change
from agent.runtime.texts import TextSource
from experts.errors import ConfigError
from experts.expert import Verdict
from experts.llm.files.config import read_spec
from experts.llm.model import load_model
from experts.llm.parallel.shape import MeshShape
from experts.llm.parallel.slices import bytes_of_ranks
from experts.llm.serving.generation import GREEDY, TextRequest
from tests.agent.line_files import LineFile, expert, fake, route
from tests.experts.llm.conftest import ModelFiles, greedy
from tests.experts.llm.serving.conftest import Notes
from tests.waiting import until

PATIENCE_S = 90.0
NEW_TOKENS = 12
IMAGE = np.zeros((8, 8, 3), dtype=np.uint8)
PROMPTS = [[7, 3, 44], [5], [90, 2, 17, 8, 61, 30, 4], [33, 12]]


class Line(LineFile):
    def __init__(self, folder):
        super().__init__(
            folder,
            experts={
                "llm/mix": {"architecture": "llm", "weights": "mix", "parallel": {"expert": 2, "tensor": 2}},
                "cls/f": expert("f.yaml"),
            },
            routes={"part": route("cls/f")},
            device="cpu",
            executors={"cpu": 1},
            memory={"host": "64MiB"},
            texts={"kv": "4MiB"},
        )
        files = ModelFiles(folder)
        files.write(files.config("mixtral")).rename(folder / "mix")
        fake(folder / "f.yaml", 100_000)


def rank_processes():
    """Process of each rank, by its number; of one model."""
    return {number: pid for pid, number in ranks_by_pid().items()}


def rank_pids():
    return set(ranks_by_pid())


def ranks_by_pid():
    found = {}
    for process in psutil.Process().children():
        try:
            arguments = process.cmdline()
            if "experts.llm.parallel.rank_process" in arguments:
                found[process.pid] = int(arguments[-1])
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    line = Line(tmp_path_factory.mktemp("line"))
    with line.built(starts=True) as (agent, outcomes, _):
        yield line, agent, outcomes
    assert not rank_processes()


def asked(agent, prompts, act=lambda count: False):
    """Texts of these prompts under way: (request, what is written) of each."""
    found = []
    for prompt in prompts:
        notes = Notes(act)
        text = TextRequest(tuple(prompt), NEW_TOKENS, GREEDY, notes)
        found.append((agent.loop.submit(TextSource(lambda _, text=text: text), expert="llm/mix"), notes))
    return found


@pytest.fixture(scope="module")
def expected(serving):
    return greedy(load_model(serving[0].folder / "mix", "mix"), PROMPTS, NEW_TOKENS)[0]


def test_texts_over_ranks_are_those_of_one_process_beside_images(serving, expected):
    line, agent, outcomes = serving
    texts = asked(agent, PROMPTS)
    images = [agent.loop.submit(IMAGE, component="part") for _ in range(6)]
    assert agent.loop.wait_until_idle(PATIENCE_S)
    assert [notes.tokens for _, notes in texts] == expected
    assert {outcomes[request].verdict for request in images} == {Verdict.OK}
    assert sorted(rank_processes()) == [0, 1, 2, 3]
    spec = read_spec(line.folder / "mix", "mix")
    (pool,) = (pool for pool in agent.loop.statistics().engine.pools if pool.name == "ranks-llm:mix/host")
    assert pool.used_bytes == bytes_of_ranks(spec, MeshShape(expert=2, tensor=2), 4)


def test_killed_rank_is_reported_and_texts_go_on_once_all_ranks_are_back(serving, expected):
    _, agent, outcomes = serving
    victim = rank_processes()[2]

    def kill(count):
        if count == 4:
            os.kill(victim, signal.SIGKILL)
        return False

    texts = [*asked(agent, PROMPTS[:1], kill), *asked(agent, PROMPTS[1:])]
    until(lambda: agent.loop.lost)
    assert agent.loop.lost["ranks-llm:mix"] == f"rank 2 (process {victim}) was killed by signal 9"
    image = agent.loop.submit(IMAGE, component="part")
    until(lambda: image in outcomes)
    assert outcomes[image].verdict is Verdict.OK
    assert agent.loop.wait_until_idle(PATIENCE_S)
    assert [notes.tokens for _, notes in texts] == expected, [outcomes[request] for request, _ in texts]
    assert not agent.loop.lost


@pytest.mark.slow
def test_ranks_that_die_idle_come_back_and_leave_no_thread(serving, expected):
    _, agent, _ = serving
    assert agent.loop.wait_until_idle(PATIENCE_S)
    executors = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("executor-"))
    os.kill(rank_processes()[0], signal.SIGKILL)
    until(lambda: agent.loop.lost)
    until(lambda: not agent.loop.lost)
    ((_, notes),) = asked(agent, PROMPTS[:1])
    assert agent.loop.wait_until_idle(PATIENCE_S)
    assert notes.tokens == expected[0]
    now = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("executor-"))
    assert now == executors


@pytest.mark.slow
def test_ranks_whose_restart_fails_are_started_again_after_a_pause(serving, expected, monkeypatch, caplog):
    _, agent, _ = serving
    assert agent.loop.wait_until_idle(PATIENCE_S)
    with monkeypatch.context() as broken:
        broken.setenv("MASTER_ADDR", "localhost")
        broken.setenv("LOCAL_WORLD_SIZE", "two")
        os.kill(rank_processes()[0], signal.SIGKILL)
        until(lambda: "worker_not_back worker=ranks-llm:mix" in caplog.text)
    until(lambda: not agent.loop.lost)
    ((_, notes),) = asked(agent, PROMPTS[:1])
    assert agent.loop.wait_until_idle(PATIENCE_S)
    assert notes.tokens == expected[0]


def test_reload_keeps_the_ranks(serving, expected):
    line, agent, _ = serving
    before = rank_processes()
    line.document["experts"]["cls/g"] = expert("f.yaml")
    line.document["routes"]["other"] = route("cls/g")
    change = plan_change(agent, line.config, lambda *_: None)
    agent.loop.change_line(change.event, change.copies)
    ((_, notes),) = asked(agent, PROMPTS[:1])
    assert agent.loop.wait_until_idle(PATIENCE_S)
    assert notes.tokens == expected[0]
    assert rank_processes() == before


def test_reload_with_new_ranks_is_refused_before_anything_changes(serving):
    line, agent, _ = serving
    more = {**line.document["experts"], "llm/more": line.document["experts"]["llm/mix"]}
    with pytest.raises(ConfigError, match=r"experts.llm/more.parallel: .* - restart"):
        plan_change(agent, read_line(line.write(experts=more), {}), lambda *_: None)


@pytest.mark.slow
def test_reload_that_replaces_the_model_starts_other_ranks(tmp_path):
    line = Line(tmp_path)
    line.document["experts"]["llm/mix"]["parallel"] = {"data": 2, "expert": 2}
    files = ModelFiles(tmp_path)
    values = files.config("mixtral")
    other = files.write(values, files.tensors(values, seed=5)).rename(tmp_path / "other")
    expected = [greedy(load_model(each, "mix"), PROMPTS[:1], NEW_TOKENS)[0] for each in (tmp_path / "mix", other)]
    assert expected[0] != expected[1]
    with line.built(starts=True) as (agent, *_):
        ((_, old),) = asked(agent, PROMPTS[:1])
        assert agent.loop.wait_until_idle(PATIENCE_S)
        line.document["experts"]["llm/mix"] |= {"weights": str(other), "parallel": {"expert": 2}}
        ((_, behind),) = asked(agent, PROMPTS[:1])
        change = plan_change(agent, line.config, lambda *_: None)
        agent.loop.change_line(change.event, change.copies)
        text = TextRequest(tuple(PROMPTS[0]), NEW_TOKENS, GREEDY, new := Notes(lambda _: False))
        agent.loop.submit(TextSource(lambda _: text), expert=change.agent.expert("llm/mix"))
        assert agent.loop.wait_until_idle(PATIENCE_S)
        assert [old.tokens, behind.tokens, new.tokens] == [expected[0][0], expected[0][0], expected[1][0]]


@pytest.mark.parametrize(
    ("ranks_here", "more", "text"),
    [
        ("3", {}, "4 ranks do not fill boxes of 3 - correct it or LOCAL_WORLD_SIZE"),
        ("2", {"llm/more": {"architecture": "llm", "weights": "mix", "parallel": {"expert": 2}}}, "of one model only"),
    ],
)
def test_ranks_that_cannot_meet_those_of_other_boxes_are_refused(tmp_path, monkeypatch, ranks_here, more, text):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks_here)
    line = Line(tmp_path)
    line.document["experts"] |= more
    assert text in line.refusal()


def test_stop_while_ranks_load_leaves_no_process(tmp_path):
    others = rank_pids()
    with Line(tmp_path).built(starts=True) as (agent, *_):
        asked(agent, PROMPTS[:1])
        until(lambda: rank_pids() - others)
    assert rank_pids() <= others


def test_each_model_has_a_worker(tmp_path):
    line = Line(tmp_path)
    mix = line.document["experts"].pop("llm/mix")
    line.document["experts"] |= {"llm/a-b": mix, "llm-a/b": mix}
    with line.built() as (agent, *_):
        assert set(agent.setup.workers) == {"ranks-llm:a-b", "ranks-llm-a:b"}


def test_box_needs_the_memory_of_its_own_ranks_only(tmp_path, monkeypatch):
    line = Line(tmp_path)
    line.document["texts"] = {"kv": "4000TiB"}
    taken = re.compile("its ranks take ([0-9]+) bytes on this box")
    whole = int(taken.search(line.refusal())[1])
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert int(taken.search(line.refusal())[1]) == whole // 2


def test_heads_of_keys_on_several_ranks_count_for_each_of_them(tmp_path):
    line, kv_bytes = Line(tmp_path), 4000 * 2**40
    line.document["texts"] = {"kv": "4000TiB"}
    for ranks, copies in ((2, 1), (4, 2)):  # of 2 heads
        line.document["experts"]["llm/mix"]["parallel"] = {"tensor": ranks}
        wanted_bytes = int(re.search("its ranks take ([0-9]+) bytes", line.refusal())[1])
        assert wanted_bytes // kv_bytes == copies


def test_memory_beyond_the_box_is_refused_with_what_to_lower(tmp_path):
    line = Line(tmp_path)
    line.document["texts"]["kv"] = "1000000GiB"
    assert "on this box, which has" in (text := line.refusal())
    assert "lower texts: kv" in text


@pytest.mark.parametrize(
    ("parallel", "more", "text"),
    [
        ({"tensor": 3}, {}, "4 heads, 2 of keys, cannot be cut over 3 tensor ranks"),
        ({"expert": 1}, {}, "parallel names a single process"),
        ({"expert": 2}, {"precision": "int8"}, "parallel takes neither moe_cache nor precision int8"),
        ({"expert": 2}, {"precision": "int4"}, "parallel takes neither moe_cache nor precision int8 or int4"),
    ],
)
def test_model_that_cannot_be_split_over_ranks_is_refused(tmp_path, parallel, more, text):
    line = Line(tmp_path)
    line.document["experts"]["llm/mix"] |= {"parallel": parallel, **more}
    if more or parallel == {"expert": 1}:
        assert text in line.refusal()
        return
    with line.built() as (agent, *_):
        assert text in agent.setup.broken["llm/mix"]
