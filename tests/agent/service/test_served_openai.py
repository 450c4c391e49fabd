"""What OpenAI's client asks beside one text: several of one prompt, a prompt's own probabilities, vectors, responses.

Over the real door of a served line; transformers computes the same of the same files.
"""

import json
import math
import shutil
from itertools import pairwise

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.agent.service.fake_line import FakeLine
from tests.agent.service.language_models import with_models

PROMPT = "the quick brown fox jumps over the lazy dog"


@pytest.fixture(scope="module")
def client(tmp_path_factory, models):
    folder = tmp_path_factory.mktemp("line")
    line = with_models(FakeLine(folder), models)
    for name, mode in (("mean", "mean_tokens"), ("odd", "weightedmean_tokens")):
        copy = shutil.copytree(models / "code", folder / name)
        kinds = [{"type": f"sentence_transformers.models.{kind}"} for kind in ("Transformer", "Pooling")]
        (copy / "modules.json").write_text(json.dumps([kinds[0] | {"path": ""}, kinds[1] | {"path": "1_Pooling"}]))
        (copy / "1_Pooling").mkdir()
        (copy / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))
        line.document["experts"][f"llm/{name}"] = {"architecture": "llm", "weights": str(copy)}
    line.document["api"] = {"grpc": [], "http": ["127.0.0.1:0"]}
    with line.served() as service:
        url = f"http://{service.web.addresses[0]}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            client.desk = service.desk
            yield client


@pytest.fixture(scope="module")
def oracle(models):
    tokenizer = AutoTokenizer.from_pretrained(models / "code")
    return tokenizer, AutoModelForCausalLM.from_pretrained(models / "code").eval().float()


def complete(client, prompt=PROMPT, **given):
    return client.completions.create(**{"model": "llm/code", "prompt": prompt, "max_tokens": 6} | given)


class TestChoices:
    def test_choices_of_a_seed_differ_and_are_repeated_streamed_or_not(self, client):
        given = {"n": 3, "seed": 7, "temperature": 2.0}
        answer = complete(client, **given)
        texts = [choice.text for choice in answer.choices]
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert len(set(texts)) == 3
        streamed = ["", "", ""]
        for event in complete(client, **given, stream=True):
            for choice in event.choices:
                streamed[choice.index] += choice.text
        assert streamed == texts
        assert complete(client, seed=8, temperature=2.0).choices[0].text == texts[1], "each is one of its own seed"

    def test_prompt_of_several_choices_counts_once_and_is_read_once(self, client):
        one, three = complete(client, temperature=0).usage, complete(client, temperature=0, n=3).usage
        assert (three.prompt_tokens, three.completion_tokens) == (one.prompt_tokens, 3 * one.completion_tokens)
        before = client.desk.status().texts.read_tokens
        long = complete(client, "lazy dog " * 12, n=4).usage
        assert client.desk.status().texts.read_tokens - before < 2 * long.prompt_tokens
        assert three.total_tokens == three.prompt_tokens + three.completion_tokens

    def test_prompts_of_a_request_are_answered_as_each_alone(self, client):
        prompts = ["the fox", "lazy", "the quick"]
        alone = [complete(client, prompt, temperature=0).choices[0].text for prompt in prompts]
        answer = complete(client, prompts, temperature=0, n=2)
        assert [choice.text for choice in answer.choices] == [text for text in alone for _ in range(2)]

    def test_messages_of_a_chat_are_streamed_by_their_index(self, client):
        chat = {"model": "llm/code", "messages": [{"role": "user", "content": PROMPT}]}
        given = chat | {"n": 2, "max_tokens": 4, "seed": 7}  # chance ends one text in a hundred
        events = list(client.chat.completions.create(**given, stream=True, stream_options={"include_usage": True}))
        finished = [choice.index for event in events for choice in event.choices if choice.finish_reason]
        assert sorted(finished) == [0, 1]
        assert (events[-1].choices, events[-1].usage.completion_tokens) == ([], 8)


class TestEcho:
    def scored(self, oracle, prompt):
        tokenizer, model = oracle
        tokens = tokenizer(prompt)["input_ids"]
        with torch.no_grad():
            logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(dim=-1)
        return tokens, [float(logprobs[place, token]) for place, token in enumerate(tokens[1:])], logprobs

    @pytest.mark.parametrize("as_tokens", [False, True])
    def test_probabilities_of_prompts_equal_transformers(self, client, oracle, as_tokens):
        prompts = [PROMPT, "fox 🦊 wörld"]
        sent = [oracle[0](prompt)["input_ids"] for prompt in prompts] if as_tokens else prompts
        answer = complete(client, sent, echo=True, max_tokens=0, logprobs=2)
        for prompt, choice in zip(prompts, answer.choices, strict=True):
            tokens, wanted, logprobs = self.scored(oracle, prompt)
            told = choice.logprobs
            assert (choice.text, choice.finish_reason, len(told.tokens)) == (prompt, "length", len(tokens))
            assert (told.token_logprobs[0], told.top_logprobs[0]) == (None, None)
            assert max(map(abs, map(float.__sub__, told.token_logprobs[1:], wanted))) < 1e-4
            for place, top in enumerate(told.top_logprobs[1:]):
                assert math.isclose(max(top.values()), float(logprobs[place].max()), abs_tol=1e-4)
            for token, (start, end) in zip(told.tokens, pairwise([*told.text_offset, len(prompt)]), strict=True):
                assert token.startswith("bytes:") or prompt[start:end] == token
        assert answer.usage.completion_tokens == 0

    @pytest.mark.parametrize("streams", [False, True])
    def test_echoed_prompt_is_followed_by_its_text(self, client, streams):
        given = {"echo": True, "logprobs": 1, "temperature": 0}
        answers = list(complete(client, **given, stream=True)) if streams else [complete(client, **given)]
        text = "".join(answer.choices[0].text for answer in answers)
        told = [answer.choices[0].logprobs for answer in answers if answer.choices[0].logprobs]
        assert text == PROMPT + complete(client, temperature=0).choices[0].text
        offsets = [offset for one in told for offset in one.text_offset]
        assert offsets == sorted(offsets)
        assert offsets[-6] == len(PROMPT), "of the first written"
        assert [logprob is None for one in told for logprob in one.token_logprobs] == [True] + [False] * (
            len(offsets) - 1
        )

    @pytest.mark.parametrize(
        "given", [{"max_tokens": 0}, {"model": "helpdesk", "echo": True}, {"model": "llm/router", "echo": True}]
    )
    def test_prompt_that_cannot_be_read_so_is_refused(self, client, given):
        with pytest.raises(openai.BadRequestError) as refused:
            complete(client, **given)
        assert refused.value.param == ("max_tokens" if "max_tokens" in given else "model")


class TestEmbeddings:
    def states(self, oracle, text):
        tokens = torch.tensor([oracle[0](text)["input_ids"]])
        with torch.no_grad():
            return oracle[1].model(tokens).last_hidden_state[0]

    @pytest.mark.parametrize("model", ["llm/code", "llm/mean"])
    def test_vectors_equal_the_pooled_states_of_transformers(self, client, oracle, model):
        texts = [PROMPT, "fox"]
        tokens = [oracle[0](text)["input_ids"] for text in texts]
        for sent in (texts, tokens, PROMPT, tokens[0]):  # the client asks for base64
            answer = client.embeddings.create(model=model, input=sent)
            for place, one in enumerate(answer.data):
                states = self.states(oracle, texts[place])
                wanted = states.mean(0) if model == "llm/mean" else torch.nn.functional.normalize(states[-1], dim=0)
                assert torch.allclose(torch.tensor(one.embedding), wanted, atol=1e-4)
            assert [one.index for one in answer.data] == list(range(len(answer.data)))
            assert answer.usage.total_tokens == sum(map(len, tokens[: len(answer.data)]))

    def test_numbers_are_those_of_base64_and_fewer_dimensions_have_length_1(self, client):
        asked = {"model": "llm/code", "input": "fox"}
        coded, plain = (client.embeddings.create(**asked, encoding_format=form) for form in ("base64", "float"))
        whole = torch.tensor(plain.data[0].embedding)
        short = torch.tensor(client.embeddings.create(**asked, dimensions=5).data[0].embedding)
        assert isinstance(coded.data[0].embedding, str)
        assert torch.allclose(short, whole[:5] / whole[:5].norm(), atol=1e-6)

    def test_more_inputs_than_run_at_once_are_all_answered(self, client):
        answer = client.embeddings.create(model="llm/code", input=[f"fox {number}" for number in range(140)])
        assert len({tuple(one.embedding) for one in answer.data}) == 140

    def test_listing_says_how_a_vector_is_made(self, client):
        told = {model.id: model.embedding for model in client.models.list()}
        assert told["llm/code"] == "last token, normalised"
        assert (told["llm/mean"], told["llm/router"], told["helpdesk"], told["llm/odd"]) == (
            "mean of all tokens",
            None,
            None,
            None,
        )

    @pytest.mark.parametrize(
        ("given", "param"),
        [
            ({"input": ""}, "input"), ({"input": ["fox", ""]}, "input"), ({"input": "fox " * 99}, "input"),
            ({"input": [[]]}, "input"), ({"dimensions": 33}, "dimensions"), ({"model": "llm/router"}, "model"),
            ({"model": "helpdesk"}, "model"), ({"model": "llm/odd"}, "model"), ({"extra_body": {"size": 1}}, "size"),
        ],
    )  # fmt: skip
    def test_vector_that_cannot_be_made_is_refused_with_its_field(self, client, given, param):
        with pytest.raises(openai.BadRequestError) as refused:
            client.embeddings.create(**{"model": "llm/code", "input": "fox"} | given)
        assert refused.value.param == param
