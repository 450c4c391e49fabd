"""Lines whose language models run on a device: columns, memories, tokens and reloads, from the line file on."""

import shutil

import numpy as np
import pytest

from agent.deployment.line_change import plan_change
from experts.expert import Verdict
from experts.llm.model import load_model
from tests.agent.deployment.test_language_models import MIB, Line, write_weights
from tests.agent.runtime.text_line import PATIENCE_S, Reader, source
from tests.experts.llm.conftest import greedy

PROMPT, TOKENS = (1, 2, 3), 8
IMAGE = np.zeros((8, 8, 3), np.uint8)
MEMORY = {"host": "64MiB", "device": "24MiB"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_weights(tmp_path_factory.mktemp("devices"))


@pytest.fixture(scope="module")
def expected(folder):
    return {name: greedy(load_model(folder / name, name), [PROMPT], TOKENS)[0][0] for name in ("a", "b")}


@pytest.fixture
def line(folder):
    shutil.rmtree(folder / "state", ignore_errors=True)
    line = Line(folder)
    line.document |= {"device": "emulated", "executors": {"emulated": 2}, "memory": MEMORY}
    return line


def asked(agent, *names):
    """Texts of these experts, beside images, once all are answered."""
    readers = {name: Reader() for name in names}
    for name, reader in readers.items():
        agent.loop.submit(source(PROMPT, TOKENS, reader), expert=agent.expert(f"llm/{name}"))
        agent.loop.submit(IMAGE, component="part")
    assert agent.loop.wait_until_idle(PATIENCE_S)
    return {name: reader.tokens for name, reader in readers.items()}


@pytest.mark.parametrize("device", ["emulated", "integrated"])
def test_line_with_executors_of_a_device_alone_runs_its_texts_and_images_there(line, expected, device):
    line.document |= {"device": device, "executors": {device: 2}}
    line.document["memory"] = MEMORY if device == "emulated" else {"host": "64MiB"}
    with line.built(starts=True) as (agent, outcomes, _):
        assert asked(agent, "a", "b") == expected
        assert {each.verdict for each in outcomes.values() if each.label == "ok"} == {Verdict.OK}
        leases = {pool.name: pool.lease_bytes for pool in agent.setup.pools}
        columns = agent.setup.matrix.experts
    pool = "device" if device == "emulated" else "host"
    assert leases == dict.fromkeys(leases, 0) | {pool: 2 * MIB}
    assert columns.keys() == {device}
    assert min(columns[device]["llm/a"].performance.K_prompt_s, columns[device]["llm/a"].load_s["ssd"]) > 0


def test_model_too_large_for_the_device_runs_on_the_cpu_beside_it(line, expected, caplog):
    line.document |= {"executors": {"emulated": 1, "cpu": 1}, "memory": {"host": "64MiB", "device": "8MiB"}}
    caplog.set_level("INFO")
    with line.built(starts=True) as (agent, *_):
        columns = agent.setup.matrix.experts
        assert (columns["emulated"].keys(), len(columns["cpu"])) == ({"cls/f", "llm/router"}, 4)
        assert asked(agent, "a") == {"a": expected["a"]}
    assert "model_runs_elsewhere expert=llm/a processor=emulated" in caplog.text
    line.document["executors"] = {"emulated": 1}
    assert "experts.llm/a: needs" in line.refusal()


def test_reload_adds_a_model_on_the_device(line, expected):
    added = {name: line.document["experts"].pop(name) for name in ("llm/b", "llm/router")}
    section = line.document["texts"].pop("routes")
    with line.built(starts=True) as (agent, *_):
        line.document["experts"] |= added
        line.document["texts"]["routes"] = section
        change = plan_change(agent, line.config, lambda *_: None)
        agent.loop.change_line(change.event, change.copies)
        assert asked(agent, "a", "b") == expected
        assert {each.processor for each in agent.loop.statistics().executors if each.texts} == {"emulated"}


def test_reload_adds_a_model_that_is_too_large_for_the_device_to_the_cpu_beside_it(line, expected):
    line.document |= {"executors": {"emulated": 1, "cpu": 1}, "memory": {"host": "64MiB", "device": "8MiB"}}
    added, section = line.document["experts"].pop("llm/b"), line.document["texts"].pop("routes")
    with line.built(starts=True) as (agent, *_):
        line.document["experts"]["llm/b"] = added
        line.document["texts"]["routes"] = section
        change = plan_change(agent, line.config, lambda *_: None)
        agent.loop.change_line(change.event, change.copies)
        assert asked(agent, "a", "b") == expected
        assert {each.processor for each in agent.loop.statistics().executors if each.texts} == {"cpu"}


@pytest.mark.slow
def test_texts_run_on_the_agent_s_device_beside_a_worker_with_another(line, expected):
    line.document["cluster"] = {"workers": [{"count": 1, "device": "emulated", "memory": MEMORY}]}
    with line.built(starts=True) as (agent, outcomes, _):
        assert asked(agent, "a", "b") == expected
        for _ in range(40):
            agent.loop.submit(IMAGE, component="part")
        assert agent.loop.wait_until_idle(PATIENCE_S)
        pools = {pool.name for pool in agent.loop.statistics().engine.pools}
    assert {"device", "w1/device"} <= pools
    assert all(each.verdict is Verdict.OK for each in outcomes.values() if each.label == "ok")
