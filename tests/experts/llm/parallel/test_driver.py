"""A model over processes of its own, driven as one model: by hand, and by the engine that serves texts."""

import os
import shutil
import signal
import socket
import subprocess
import sys

import pytest
import torch

from experts.errors import LoadError
from experts.llm.arenas.extents import ExtentArena
from experts.llm.model import load_model
from experts.llm.parallel.driver import Ranks, RanksLost
from experts.llm.parallel.messages import RanksSetup
from experts.llm.parallel.shape import Meeting, MeshShape
from experts.llm.serving.iteration import IterationLimits
from experts.llm.text.constraints import Constraint
from tests.experts.llm.conftest import ModelFiles, greedy
from tests.experts.llm.serving.conftest import Desk, byte_grammar
from tests.waiting import until

PROMPTS = [[7, 3, 44], [5], [90, 2, 17, 8, 61, 30, 4], [33, 12]]
SHAPE = MeshShape(expert=2, tensor=2)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    files = ModelFiles(tmp_path_factory.mktemp("models"))
    return files.write(files.config("mixtral"))


@pytest.fixture
def ranks(directory):
    told = []
    ranks = Ranks(RanksSetup("tiny", str(directory), SHAPE), told.append)
    ranks.told = told
    yield ranks
    ranks.close()
    assert all(process.code is not None for process in ranks.processes)


def answers_of(model):
    """Texts of the engine that serves them: prompts in chunks, more texts than rows, one that is taken back."""
    desk = Desk(model, ExtentArena(64 * 2**20, keeps_prefixes=False), IterationLimits(rows=3, tokens=16))
    for request in range(6):
        desk.ask(request, [(7 * request + n) % 90 + 1 for n in range(5 + 9 * request)], 3 + request % 4)
    desk.ask(7, [3, 60, 12], choices={"left": (11,), "far": (13, 14, 15)})
    desk.ask(8, [9, 4], 20, grammar=byte_grammar(Constraint.of_regex("regex", "[0-9]{3}(:[0-9]{2})+")))
    desk.quantum(0)
    desk.engine.preempt(2)
    return desk.finish(0), desk.finished[7].label


def test_ranks_write_what_one_process_writes_and_a_killed_one_ends_them_all(directory, ranks):
    model = ranks.begin()
    whole = load_model(directory, "tiny")
    tokens, logits = greedy(model, PROMPTS, 4)
    expected, expected_logits = greedy(whole, PROMPTS, 4)
    assert tokens == expected
    assert (logits - expected_logits).abs().max() <= 1e-5
    assert answers_of(model) == answers_of(whole)
    os.kill(ranks.processes[3].pid, signal.SIGKILL)
    until(lambda: ranks.told)
    assert ranks.told == [f"rank 3 (process {ranks.processes[3].pid}) was killed by signal 9"]
    with pytest.raises(RanksLost, match=r"tiny.*rank 3"):
        greedy(model, PROMPTS, 1)


@pytest.mark.slow
def test_rank_that_cannot_load_gives_the_reason(tmp_path):
    ranks = Ranks(RanksSetup("tiny", str(tmp_path), MeshShape(expert=2)))
    with pytest.raises(LoadError, match=r"tiny.*rank 0.*config.json"):
        ranks.begin()
    ranks.close()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_ranks_without_the_gpus_that_they_were_given_end_with_the_reason(directory):
    ranks = Ranks(RanksSetup("tiny", str(directory), MeshShape(expert=2)), gpus=("0", "1"))
    with pytest.raises(RanksLost, match=r"rank \d.*NCCL"):
        ranks.begin()
    ranks.close()


def test_unforeseen_error_of_a_rank_reaches_the_driver_with_its_type_and_text(directory):
    ranks = Ranks(RanksSetup("tiny", str(directory), MeshShape(expert=2), dtype="nothing"))
    with pytest.raises(RanksLost, match=r"rank \d.* ended with code 1: AttributeError: .*nothing"):
        ranks.begin()
    ranks.close()


def test_ranks_that_do_not_meet_in_time_end_with_the_reason(ranks, monkeypatch):
    monkeypatch.setattr("experts.llm.parallel.driver.MEET_S", 0.001)
    with pytest.raises(RanksLost, match=r"have not met within 0\.001 s"):
        ranks.begin()
    assert ranks.told == ["its ranks have not met within 0.001 s"]


def test_ranks_stopped_before_they_begin_do_not_start(directory, ranks):
    ranks.stop()
    with pytest.raises(RanksLost, match="its ranks were stopped"):
        ranks.begin()
    assert not ranks.processes
    assert not ranks.told


def test_rank_that_waits_for_others_ends_with_its_driver(tmp_path):
    command = [sys.executable, "-m", "experts.llm.parallel.rank_process", "--driver", str(tmp_path / "driver")]
    command += ["--meeting", f"file://{tmp_path / 'meeting'}", "--ranks", "2", "--rank", "0"]
    alone = subprocess.Popen(command, stdin=subprocess.PIPE)
    until((tmp_path / "meeting").exists)
    alone.stdin.close()
    assert alone.wait(60) in (0, -signal.SIGKILL)


@pytest.mark.slow
def test_ranks_of_another_box_join_by_torchrun(directory, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = Ranks(RanksSetup("tiny", str(directory), SHAPE), meeting=Meeting("127.0.0.1", int(port), 2))
    command = ["--nnodes", "2", "--node-rank", "1", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    there = shutil.copytree(directory, tmp_path / "there")
    command += ["--master-port", port, "-m", "experts.llm.parallel.rank_process", "--model", str(there)]
    other_box = subprocess.Popen([sys.executable, "-m", "torch.distributed.run", *command])
    tokens, _ = greedy(ranks.begin(), PROMPTS, 3)
    assert tokens == greedy(load_model(directory, "tiny"), PROMPTS, 3)[0]
    ranks.close()
    other_box.wait(60)  # its ranks end, too
