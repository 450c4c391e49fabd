"""The demo's pair: the served model is the trained one, the backbone is shared, a seed makes the same weights."""

import pytest
import torch

from agent.demo.texts import models
from agent.demo.texts.models import END, UNKNOWN, letters_of, misspelt, texts_of, tokenizer_of, tokens_of, train_pair
from agent.demo.texts.questions import DemoQuestion, Questions
from agent.demo.training.learning import torch_threads
from experts.llm.arenas.extents import ModelKeyValues
from experts.llm.files.program import read_program
from experts.llm.model import LanguageModel, load_model
from experts.llm.text.tokenizer import TextModel
from experts.llm.token_batch import Chunk, TokenBatch
from experts.llm.training.step import losses_of, run_texts

SUBJECTS = {
    "cats": Questions((DemoQuestion("cat?", "a cat."), DemoQuestion("a cat?", "two cats.")), ()),
    "dogs": Questions((DemoQuestion("dog?", "1 dog."), DemoQuestion("no dog?", "2 dogs.")), ()),
}
TOKENIZER = tokenizer_of(one for each in SUBJECTS.values() for one in each.training)
TEXTS = {name: texts_of(subject.training, TOKENIZER) for name, subject in SUBJECTS.items()}


TINY = {"HIDDEN": 16, "HEADS": 2, "MOE_EXPERTS": (0, 2, 3), "STEP_TOKENS": 40, "MISSPELT": 0.0, "STEPS": (60, 20)}


@pytest.fixture(scope="module", autouse=True)
def tiny():
    """A tiny model on one thread: so small a network only waits for more."""
    with torch_threads(1), pytest.MonkeyPatch.context() as patch:
        for name, value in {**TINY, "LEARNING_RATES": (1e-2, 1e-2)}.items():
            patch.setattr(models, name, value)
        yield


def trained(seed=0):
    return train_pair(SUBJECTS, TOKENIZER, seed, lambda stage, done, total: None)


@pytest.fixture(scope="module")
def pair(tiny):
    return trained()


def loss(network, subject):
    with torch.no_grad():
        return losses_of(LanguageModel(network.spec, network.tensors), TEXTS[subject]).cross_entropy.item()


def test_experts_differ_in_their_own_parts_and_in_nothing_else(pair):
    cats, dogs = (network.tensors for network in pair.values())
    differing = {name for name in cats if not torch.equal(cats[name], dogs[name])}
    own = set(pair["cats"].own_names)
    assert {"layers.2.qkv", "layers.2.mlp.up", "norm"} <= differing <= own
    assert "layers.2.gate" in own
    assert not any(".experts." in name for name in own)


def test_each_language_model_knows_its_own_subject_better(pair):
    assert loss(pair["cats"], "cats") < 0.7
    assert loss(pair["cats"], "cats") < loss(pair["dogs"], "cats")
    assert loss(pair["dogs"], "dogs") < loss(pair["cats"], "dogs")


def test_equal_seeds_make_equal_weights(pair):
    again, other = trained()["cats"], trained(seed=1)["cats"]
    assert all(torch.equal(tensor, again.tensors[name]) for name, tensor in pair["cats"].tensors.items())
    assert not torch.equal(pair["cats"].tensors["embedding"], other.tensors["embedding"])


def test_trained_model_is_the_served_one(pair, tmp_path):
    network = pair["dogs"]
    network.write(tmp_path / "dogs", TOKENIZER)
    model = load_model(tmp_path / "dogs", "dogs")
    tokens = tokens_of(SUBJECTS["dogs"].training[1], TOKENIZER)
    hidden = model.hidden(TokenBatch.of([Chunk(0, 0, tokens)]), ModelKeyValues(model.spec, torch.float32))
    trained = LanguageModel(network.spec, network.tensors)
    with torch.no_grad():
        expected = trained.predicted(run_texts(trained, torch.tensor([tokens]))[0])
    torch.testing.assert_close(model.logits(hidden), expected, atol=1e-5, rtol=0)


def test_question_is_read_as_it_was_learned(pair, tmp_path):
    pair["cats"].write(tmp_path / "cats", TOKENIZER)
    text_model = TextModel.of(read_program(tmp_path / "cats", "cats"), "cats")
    (question, _) = SUBJECTS["cats"].training
    learned = tokens_of(question, TOKENIZER)
    prompt = text_model.chat_prompt_of([{"role": "user", "content": question.text}])
    assert list(prompt) == learned[: len(prompt)]
    assert text_model.decode(learned[len(prompt) :]) == question.answer
    assert text_model.stop_tokens == {TOKENIZER.token_to_id(END)}
    assert text_model.encode("ä", adds_special=False) == (TOKENIZER.token_to_id(UNKNOWN),)


def test_only_the_answer_and_its_end_are_learned():
    texts = TEXTS["cats"]
    counted = [TOKENIZER.id_to_token(token) for token in texts.token_ids[0][texts.counted[0]].tolist()]
    assert counted == [*"a cat.", END]


def test_letters_are_misspelt_in_questions_alone():
    texts, letters = TEXTS["dogs"], letters_of(TOKENIZER)
    noisy = misspelt(texts, letters, 1.0, torch.Generator().manual_seed(0))
    changed = noisy.token_ids != texts.token_ids
    assert changed.any()
    assert not (changed & texts.counted).any()
    assert torch.isin(texts.token_ids[changed], letters).all()
    assert not {TOKENIZER.token_to_id(digit) for digit in "12"} & set(letters.tolist())
    assert torch.equal(misspelt(texts, letters, 0.0, torch.Generator()).token_ids, texts.token_ids)
