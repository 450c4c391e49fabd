"""A whole agent that serves texts beside images: real Engine, files and threads; models that are real, or not."""

import json
import shutil
import threading
from functools import partial

import numpy as np
import pytest

from agent.runtime.text_engines import TextEngines, layout_of
from agent.runtime.texts import TextSource
from experts.errors import PromptInvalid
from experts.expert import Verdict
from experts.llm.arenas.extents import ExtentArena
from tests.agent.runtime.fake_text_engine import FakeTextEngine, token
from tests.agent.runtime.text_line import CONFIG, EYE, PATIENCE_S, TextAgent, TextLine, write_line

IMAGE = np.zeros((70, 80, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def line(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    line = TextLine.packed(folder, write_line(folder))
    yield line
    line.segments.close()


@pytest.fixture
def fake():
    return FakeTextEngine()


def written(expert, prompt=3, count=5):
    return [token(expert, position) for position in range(prompt, prompt + count)]


def served(line, fake, **options):
    return TextAgent(line, engines=TextEngines({0: fake}), **options)


# -- with real models --


def test_text_is_what_its_model_writes_and_ends_without_a_verdict(line):
    with TextAgent(line) as agent:
        number, reader = agent.ask("llm/code", (3, 1, 4, 1, 5), 12)
        agent.settle()
        statistics = agent.loop.statistics().executors[0]
    assert reader.tokens == line.greedy("llm/code", (3, 1, 4, 1, 5), 12)
    outcome = agent.outcomes[number]
    assert (outcome.verdict, outcome.label, outcome.score) == (Verdict.UNKNOWN, "length", 1.0)
    assert outcome.reason == "asked of one expert, not of a route"
    assert (statistics.texts, statistics.images, statistics.written_tokens) == (1, 0, 12)
    assert statistics.read_tokens >= 5


@pytest.mark.parametrize("family", [None, "f"])
def test_texts_of_all_experts_and_images_share_one_executor(line, family):
    with TextAgent(line, family=family) as agent:
        texts = [
            (*agent.ask(expert, (2, n + 1), 8), expert, n) for n in range(4) for expert in ("llm/code", "llm/maths")
        ]
        images = [agent.loop.submit(IMAGE, component="eye") for _ in range(6)]
        agent.settle()
        statistics = agent.loop.statistics()
    for number, reader, expert, n in texts:
        assert (reader.tokens, agent.outcomes[number].label) == (line.greedy(expert, (2, n + 1), 8), "length")
    assert {agent.outcomes[number].verdict for number in images} == {Verdict.OK}
    assert (statistics.executors[0].texts, statistics.executors[0].images) == (8, 6)
    assert statistics.engine.pools[0].lease_used_bytes == 0


def test_shared_prefix_is_not_reused_by_another_program_with_equal_weights(tmp_path):
    experts, (code, scaled) = write_line(tmp_path), ("llm/code", "llm/maths")
    shutil.copy(tmp_path / "llm-code" / "model.safetensors", tmp_path / "llm-maths")
    scaling = {"rope_type": "linear", "factor": 4.0}
    (tmp_path / "llm-maths" / "config.json").write_text(json.dumps(CONFIG | {"rope_scaling": scaling}))
    line = TextLine.packed(tmp_path, experts)
    assert line.copy(code).packed.segments == line.copy(scaled).packed.segments
    prompt = tuple(range(1, 41))
    with TextAgent(line) as agent:
        readers = []
        for expert in (code, scaled, code):
            readers.append(agent.ask(expert, prompt, 8)[1])
            agent.settle()
        assert agent.loop.statistics().executors[0].read_tokens == 2 * len(prompt)  # the third goes on from the first
    assert [reader.tokens for reader in readers] == [line.greedy(each, prompt, 8) for each in (code, scaled, code)]
    assert readers[0].tokens != readers[1].tokens


@pytest.mark.parametrize(
    ("processors", "lease_tokens"), [(("cpu",), 70), (("cpu",), 100), (("integrated", "cpu"), 4100)]
)
def test_longest_text_takes_its_whole_lease_and_no_token_more(line, processors, lease_tokens):
    prompt, expert = (1, 2, 3), "llm/code"
    with TextAgent(line, processors=processors, lease_tokens=lease_tokens) as agent:
        most = agent.loop.most_tokens(expert)
        asked = [agent.ask(expert, prompt, count - len(prompt))[0] for count in (most, most + 1)]
        agent.settle()
    reasons = [agent.outcomes[number].reason or "" for number in asked]
    assert ["ask for fewer tokens" in reason for reason in reasons] == [False, True]


def test_room_for_texts_counts_only_memories_that_the_expert_runs_from(line):
    copy, budget_bytes = line.copy("llm/code"), 2**20
    arenas = {("host", "cpu"): ExtentArena(8 * budget_bytes), ("device", "cuda"): ExtentArena(budget_bytes)}
    engines = TextEngines({}, arenas=arenas, layout_of=partial(layout_of, segments=line.segments))
    engines.runs_on = {copy.name: {("device", "cuda")}}
    assert engines.most_tokens([copy]) * engines.layout_of(copy).token_bytes <= budget_bytes


# -- with an engine that writes without a model --


@pytest.mark.parametrize("comes", ["an image", "a text"])
def test_quantum_ends_once_a_request_comes_to_its_executor(line, fake, comes):
    fake.gate = threading.Semaphore(0)
    with served(line, fake) as agent:
        agent.ask("llm/code", count=9)
        assert fake.entered.acquire(timeout=PATIENCE_S)
        agent.loop.statistics()  # behind it in the loop's inbox
        assert ("end_quantum",) not in fake.log, "its own coming ends nothing"
        if comes == "an image":
            agent.loop.submit(IMAGE, component="eye")
        else:
            agent.ask("llm/maths")
        agent.loop.statistics()
        assert fake.log.count(("end_quantum",)) == 1
        fake.gate.release(1000)
        agent.settle()


@pytest.mark.parametrize("error", [RuntimeError("a kernel failed"), MemoryError()])
def test_texts_of_a_failed_batch_continue_alone_and_write_nothing_twice(line, fake, error):
    fake.gate = threading.Semaphore(0)
    with served(line, fake) as agent:
        asked = [agent.ask("llm/code", count=9)]
        assert fake.entered.acquire(timeout=PATIENCE_S)
        asked.append(agent.ask("llm/code", count=9))
        agent.loop.statistics()  # behind it in the loop's inbox
        for _ in range(2):  # until both have begun, in a quantum that waits to be let through
            fake.gate.release()
            assert fake.entered.acquire(timeout=PATIENCE_S)
        numbers = [number for number, _ in asked]
        fake.errors = [error]
        fake.gate.release(1000)
        agent.settle()
        statistics = agent.loop.statistics()
    assert [reader.tokens for _, reader in asked] == [written("llm/code", count=9)] * 2
    assert [agent.outcomes[number].label for number in numbers] == ["length"] * 2
    failed = fake.log.index(("preempt", numbers[0]))
    assert fake.log[failed - 1 : failed + 2] == [("run", tuple(numbers)), *(("preempt", each) for each in numbers)]
    assert {len(each[1]) for each in fake.log[failed:] if each[0] == "run"} == {1}
    assert (statistics.executors[0].failed, statistics.engine.pools[0].lease_used_bytes) == (1, 0)


def test_invalid_prompt_for_the_first_expert_is_raised_to_the_caller(line, fake):
    def refuse(expert):
        raise PromptInvalid("prompt", f"is nothing for {expert}")

    with served(line, fake) as agent:
        with pytest.raises(PromptInvalid, match="nothing for llm/router"):
            agent.loop.submit(TextSource(refuse), component="auto")
        assert agent.loop.requests_in_flight == 0


def test_image_expert_takes_no_text_and_a_text_expert_no_image(line, fake):
    with served(line, fake) as agent:
        text, _ = agent.ask(EYE)
        image = agent.loop.submit(IMAGE, expert="llm/code")
        right = agent.loop.submit(IMAGE, component="eye")
        agent.settle()
    assert "cls/eye takes images" in agent.outcomes[text].reason
    assert "llm/code takes texts" in agent.outcomes[image].reason
    assert agent.outcomes[right].verdict is Verdict.OK
