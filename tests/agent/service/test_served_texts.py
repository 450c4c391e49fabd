"""Texts of a served line over HTTP: OpenAI's client, the command line's, and those who go away in the middle."""

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from agent.commands.asking import AgentAccess, generated, text_call
from agent.doors.desk import TextOrder
from agent.doors.http.client import WebClient
from experts.llm.serving.generation import GREEDY
from tests.agent.service.language_models import CONTEXT, Reader
from tests.waiting import until

USER = [{"role": "user", "content": "the quick fox"}]


@pytest.fixture
def line(text_line, tmp_path_factory):
    """With addresses; a short path, as they have to be."""
    text_line.document["api"] = {"grpc": [], "http": ["127.0.0.1:0", f"unix:{tmp_path_factory.mktemp('s')}/w.sock"]}
    return text_line


def client_of(service):
    return openai.OpenAI(base_url=f"http://{service.web.addresses[0]}/v1", api_key="none", max_retries=0)


def written(client):
    answer = client.completions.create(model="llm/code", prompt="x", max_tokens=2, temperature=0)
    return answer.usage.completion_tokens


def at_the_desk(service, **given):
    reader = Reader()
    service.desk.generate(TextOrder("llm/code", sampling=GREEDY, **given), reader)
    reader.wait()
    return reader.text


def test_text_is_equal_over_every_wire(line):
    with line.served() as service, client_of(service) as client:
        messages = ({"role": "user", "content": "the quick fox"},)
        text = at_the_desk(service, messages=messages, most_tokens=10)
        asked = {"model": "llm/code", "messages": USER, "temperature": 0, "max_tokens": 10}
        whole = client.chat.completions.create(**asked)
        assert whole.choices[0].message.content == text
        assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("length", 10)
        streamed = client.chat.completions.create(**asked, stream=True)
        assert "".join(event.choices[0].delta.content or "" for event in streamed) == text
        pieces = []
        call = text_call("llm/code", messages, 10, None, (), {"temperature": 0.0})
        row = generated(None, AgentAccess(service.web.addresses[1]), call, pieces.append)
        assert ("".join(pieces), row["text"], row["written_tokens"]) == (text, text, 10)
        page = client.with_options(base_url=f"http://{service.web.addresses[0]}").get("/metrics", cast_to=str)
    for metric in (
        'texts_ended_total{ending="length"} 4.0', "texts_under_way 0.0", "text_first_token_seconds_count 4.0",
        'executor_written_tokens_total{executor="0"} 40.0', 'executor_accepted_tokens_total{executor="0"} ',
        'lease_used_bytes{pool="host"} 0.0',
    ):  # fmt: skip
        assert f"coserve_{metric}" in page


def test_concurrent_callers_get_the_same_text_as_a_lone_one(line):
    prompts = [f"the {word}" for word in ("quick", "brown", "lazy", "fox")]
    with line.served() as service, client_of(service) as client, ThreadPoolExecutor(len(prompts)) as threads:

        def asked(prompt):
            answer = client.completions.create(model="llm/code", prompt=prompt, temperature=0, max_tokens=8)
            return answer.choices[0].text

        alone = [asked(prompt) for prompt in prompts]
        assert list(threads.map(asked, prompts)) == alone


def test_caller_that_leaves_mid_text_leaves_no_lease_or_request(line):
    with line.served() as service, client_of(service) as client:
        for _ in range(5):
            with client.completions.create(model="helpdesk", prompt="fox", stream=True, max_tokens=CONTEXT) as events:
                next(iter(events))
        told = WebClient(service.web.addresses[1]).events(*text_call("llm/maths", "fox", None, None, (), {}))
        next(told)
        told.close()
        until(lambda: service.agent.loop.requests_in_flight == 0)
        until(lambda: service.desk.status().texts.under_way == 0)
        assert sum(pool.lease_bytes for pool in service.desk.status().pools) == 0
        assert written(client) == 2
