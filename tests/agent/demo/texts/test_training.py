"""The demo's pair: what is trained is what is served, the backbone is one, and the same seed makes the same."""

import pytest
import torch

from agent.demo.texts.characters import Characters
from agent.demo.texts.questions import DemoQuestion, Questions
from agent.demo.texts.training import TextPlan, TrainingTexts, train_pair, write_model
from agent.demo.training.learning import Pace, torch_threads
from experts.llm.model import load_model
from experts.llm.program import PROGRAM_FILES
from experts.llm.serving.extents import ModelKeyValues
from experts.llm.text.tokenizer import TextModel
from experts.llm.token_batch import Chunk, TokenBatch

SUBJECTS = {
    "cats": Questions((DemoQuestion("cat?", "a cat."), DemoQuestion("a cat?", "two cats.")), ()),
    "dogs": Questions((DemoQuestion("dog?", "1 dog."), DemoQuestion("no dog?", "2 dogs.")), ()),
}
CHARACTERS = Characters.of(one for each in SUBJECTS.values() for one in each.training)
PLAN = TextPlan(
    hidden=16, heads=2, moe_experts=(0, 2, 3), step_tokens=40, joint=Pace(60, 1e-2), own=Pace(20, 1e-2), misspelt=0.0
)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """So small a network only waits for more."""
    with torch_threads(1):
        yield


def trained(seed=0, plan=PLAN):
    return train_pair(SUBJECTS, CHARACTERS, plan, seed, lambda stage, done, total: None)


@pytest.fixture(scope="module")
def pair(one_thread):
    return trained()


def loss(network, subject):
    texts = TrainingTexts.of(SUBJECTS[subject].training, CHARACTERS)
    with torch.no_grad():
        return texts.loss(network(texts.token_ids)[0]).item()


def test_experts_differ_in_their_own_parts_and_in_nothing_else(pair):
    cats, dogs = (network.checkpoint() for network in pair.values())
    differing = {name for name in cats if not torch.equal(cats[name], dogs[name])}
    own = set(pair["cats"].own_names)
    assert differing <= own
    assert "model.layers.2.self_attn.q_proj.weight" in differing
    assert "model.layers.2.mlp.gate.weight" in own
    assert not any(".experts." in name for name in own)


def test_each_knows_its_own_subject_better(pair):
    assert loss(pair["cats"], "cats") < 0.7
    assert loss(pair["cats"], "cats") < loss(pair["dogs"], "cats")
    assert loss(pair["dogs"], "dogs") < loss(pair["cats"], "dogs")


def test_the_same_seed_makes_the_same_weights(pair):
    again, other = trained(), trained(seed=1)
    for name, tensor in pair["cats"].checkpoint().items():
        assert torch.equal(tensor, again["cats"].checkpoint()[name])
    assert not torch.equal(pair["cats"]["model.embed_tokens.weight"], other["cats"]["model.embed_tokens.weight"])


def test_what_was_trained_is_what_is_served(pair, tmp_path):
    network = pair["dogs"]
    write_model(tmp_path / "dogs", network, CHARACTERS)
    model = load_model(tmp_path / "dogs", "dogs")
    tokens = CHARACTERS.encode(SUBJECTS["dogs"].training[1])
    hidden = model.hidden(TokenBatch.of([Chunk(0, 0, tokens)]), ModelKeyValues(model.spec, torch.float32))
    with torch.no_grad():
        expected, _ = network(torch.tensor([tokens]))
    torch.testing.assert_close(model.logits(hidden), expected[0], atol=1e-5, rtol=0)


def test_a_question_is_read_as_it_was_learned(pair, tmp_path):
    write_model(tmp_path / "cats", pair["cats"], CHARACTERS)
    files = {name: (tmp_path / "cats" / name).read_bytes() for name in PROGRAM_FILES}
    text_model = TextModel.of(files, "cats")
    (question, _) = SUBJECTS["cats"].training
    learned = CHARACTERS.encode(question)
    prompt = text_model.chat_prompt_of([{"role": "user", "content": question.text}])
    assert list(prompt) == learned[: len(prompt)]
    assert text_model.decode(learned[len(prompt) :]) == question.answer
    assert text_model.stop_tokens == {CHARACTERS.end_mark}
    assert text_model.encode("ä", adds_special=False) == (CHARACTERS.tokens.index("<unknown>"),)


def test_an_answer_is_what_counts_and_its_end():
    texts = TrainingTexts.of(SUBJECTS["cats"].training, CHARACTERS)
    counted = [CHARACTERS.tokens[token] for token in texts.token_ids[0][texts.counted[0]]]
    assert counted == [*"a cat.", "<end>"]


def test_letters_are_misspelt_in_questions_alone():
    texts = TrainingTexts.of(SUBJECTS["dogs"].training, CHARACTERS)
    letters = torch.tensor(CHARACTERS.letters)
    noisy = texts.misspelt(letters, 1.0, torch.Generator().manual_seed(0))
    changed = noisy.token_ids != texts.token_ids
    assert changed.any()
    assert not (changed & texts.counted).any()
    assert torch.isin(texts.token_ids[changed], letters).all()
    digits = [CHARACTERS.tokens.index(token) for token in "12"]
    assert not set(digits) & set(CHARACTERS.letters)
    assert torch.equal(texts.misspelt(letters, 0.0, torch.Generator()).token_ids, texts.token_ids)
