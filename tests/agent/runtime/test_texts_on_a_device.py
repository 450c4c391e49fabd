"""Texts and images on an emulated device: the tokens and verdicts of the CPU, within the device's budgets, also after
the device is lost."""

import threading
from dataclasses import replace

import pytest
import torch

from agent.runtime.ages import AgeLimits
from agent.runtime.texts import TextSource
from experts.expert import Verdict
from experts.llm.arenas.blocks import BlockArena
from experts.llm.arenas.extents import ExtentArena
from experts.llm.model import LanguageModel
from experts.llm.serving.generation import Sampling, TextRequest
from tests.agent.runtime import text_line
from tests.agent.runtime.test_text_loop import IMAGE
from tests.agent.runtime.text_line import PATIENCE_S, Reader, TextAgent, TextLine, write_line
from tests.experts.llm.conftest import tiny_config
from tests.waiting import until

LOST = "CUDA error: an illegal memory access was encountered"
EXPERTS = ("llm/code", "llm/maths", "llm/manuals")


@pytest.fixture(scope="module")
def line(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    line = TextLine.packed(folder, write_line(folder))
    yield line
    line.segments.close()


@pytest.fixture(params=[ExtentArena, BlockArena])
def arena(request, monkeypatch):
    """The arena of keys and values on the emulated device."""
    monkeypatch.setattr("agent.runtime.text_engines.arena_for", lambda _, *given, **keys: request.param(*given, **keys))


def asked_of(agent, count=2, tokens=10):
    """Texts of each expert, with what they are to be: (request, reader, expert, prompt)."""
    prompts = [(2, number + 1) for number in range(count)]
    return [(*agent.ask(expert, prompt, tokens), expert, prompt) for prompt in prompts for expert in EXPERTS]


def sampled(agent):
    """Reader of a text that is drawn from a seed."""
    text = TextRequest((4, 5, 6), 10, Sampling(temperature=1.0, seed=7), reader := Reader())
    agent.loop.submit(TextSource(lambda _: text), expert="llm/code")
    return reader


def check(agent, asked, tokens=10):
    for request, reader, expert, prompt in asked:
        assert agent.outcomes[request].label == "length", agent.outcomes[request]
        assert reader.tokens == agent.line.greedy(expert, prompt, tokens)


def pool_of(agent, name):
    return next(pool for pool in agent.loop.statistics().engine.pools if pool.name == name)


def test_texts_and_images_of_a_line_without_a_cpu_executor_are_those_of_the_cpu(line, arena):
    with TextAgent(line, processors=("emulated", "emulated"), room=2) as agent:
        asked = asked_of(agent)
        images = [agent.loop.submit(IMAGE, component="eye") for _ in range(6)]
        routed, _ = agent.ask("llm/router", (1, 2, 3))
        agent.settle()
        statistics, device, host = agent.loop.statistics(), pool_of(agent, "device"), pool_of(agent, "host")
    check(agent, asked)
    assert agent.outcomes[routed].label in ("code", "maths")
    assert {agent.outcomes[number].verdict for number in images} == {Verdict.OK}
    assert all(each.processor == "emulated" and each.texts for each in statistics.executors)
    assert statistics.engine.evictions > 0, "two of five experts fit"
    assert device.lease_bytes == 400 * agent.texts.lease_bytes
    assert device.lease_used_bytes == host.lease_used_bytes == 0
    assert device.used_bytes <= device.expert_bytes


def test_offloaded_moe_experts_on_a_device_write_the_tokens_of_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(text_line, "CONFIG", tiny_config("mixtral", hidden_size=64))
    line = TextLine.packed(tmp_path, write_line(tmp_path))
    held = {name: replace(copy, moe_places=3 if copy.block_bytes else None) for name, copy in line.copies.items()}
    with TextAgent(replace(line, copies=held), processors=("emulated", "emulated"), room=2) as agent:
        asked = asked_of(agent, tokens=6)
        agent.settle()
        device = agent.loop.here.stores["device"].statistics()
    check(agent, asked, tokens=6)
    assert device.moe_experts.loads > 3 * len(EXPERTS)
    line.segments.close()


class LostDevice:
    """The emulated device: after four passes its executor waits until it is let go, which raises ``error``, if any."""

    def __init__(self, monkeypatch):
        self.inside, self.gate, self.error, self.passes = threading.Event(), threading.Event(), None, 0
        forward = LanguageModel.hidden

        def hidden(model, *arguments):
            self.passes += threading.current_thread().name == "executor-0"
            if threading.current_thread().name == "executor-0" and self.passes > 4:
                self.inside.set()
                assert self.gate.wait(PATIENCE_S)
                if self.error is not None:
                    raise self.error
            return forward(model, *arguments)

        monkeypatch.setattr(LanguageModel, "hidden", hidden)


@pytest.mark.parametrize(("arena", "is_hung"), [(ExtentArena, False), (BlockArena, True)], indirect=["arena"])
def test_texts_of_a_lost_device_continue_on_the_cpu_with_the_same_tokens(line, arena, monkeypatch, is_hung):
    with TextAgent(line) as alone:
        expected = sampled(alone)
        alone.settle()
    device = LostDevice(monkeypatch)
    now_s, processors = 1000.0, ("emulated", "cpu")
    with TextAgent(line, processors=processors, times={"cpu": 1e4}, clock=lambda: now_s) as agent:
        drawn, asked = sampled(agent), asked_of(agent)
        image = agent.loop.submit(IMAGE, component="eye")
        assert device.inside.wait(PATIENCE_S)
        if not is_hung:
            device.error = torch.AcceleratorError(LOST)
            device.gate.set()
        until(lambda: not any(pool.loading for pool in agent.loop.statistics().engine.pools))
        while is_hung and not agent.loop.lost:  # its age is logged, then it is given up
            now_s += AgeLimits().ended_s
            for _ in range(2):  # ages are looked at after each message
                agent.loop.statistics()
        until(lambda: agent.loop.lost)
        agent.settle()
        check(agent, asked)
        assert drawn.tokens == expected.tokens
        device.gate.set()  # a pass that comes back from a hung device writes nothing more
        assert agent.loop.here.executors[0].stop(PATIENCE_S)
        later = asked_of(agent, 1)
        agent.settle()
        statistics = agent.loop.statistics()
    check(agent, asked + later)
    assert agent.outcomes[image].verdict is Verdict.OK
    assert {pool.name for pool in statistics.engine.pools} == {"host"}
    assert agent.loop.here.text_engines.arenas.keys() == {("host", "cpu")}
