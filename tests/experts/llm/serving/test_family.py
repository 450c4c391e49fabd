"""Models that share tensors in one pass: each token by its own model's weights, shared weights once for all."""

import pytest
import torch

from experts.llm.arenas.blocks import BlockArena
from experts.llm.arenas.extents import ModelKeyValues
from experts.llm.model import LanguageModel
from experts.llm.serving.family import ModelFamily, families
from experts.llm.serving.generation import Sampling
from experts.llm.token_batch import Chunk, TokenBatch
from tests.experts.llm.serving.conftest import CountingModel, Desk

OWN_OF = {  # what each of three experts has for itself
    "head": ("head",),
    "feed-forward of the last layer": ("layers.2.experts", "layers.2.gate", "layers.2.mlp"),
    "attention of the middle": ("layers.1.qkv", "layers.1.output"),
    "embedding": ("embedding",),
}


class Counting(LanguageModel):
    """A model that counts its feed-forward steps, and over how many tokens."""

    def __init__(self, spec, tensors):
        super().__init__(spec, tensors)
        self.fed = []

    def feed_forward(self, layer, tokens):
        self.fed.append((layer, len(tokens)))
        return super().feed_forward(layer, tokens)


@pytest.fixture
def members(model_files):
    def made(kind, own, count=3, **changes):
        spec, shared = model_files.read(kind, **changes)
        models = []
        for seed in range(count):
            generator = torch.Generator().manual_seed(seed)
            tensors = {
                name: tensor + 0.3 * torch.randn(tensor.shape, generator=generator) if name.startswith(own) else tensor
                for name, tensor in shared.items()
            }
            models.append(Counting(spec, tensors))
        return models

    return made


def texts_of(models, weights=None, arena=None):
    desk = Desk(models[0], arena)
    for request in range(9):
        prompt = [(7 * request + n) % 90 for n in range(3 + 5 * request)]
        sampling = Sampling(seed=request) if request % 2 else Sampling(temperature=0)
        desk.ask(request, prompt, 4 + request, model=models[request % 3], sampling=sampling, weights=weights)
    return desk


@pytest.mark.parametrize("kind", ["llama", "qwen2_moe", "pr_moe"])
@pytest.mark.parametrize("own", OWN_OF.values(), ids=OWN_OF)
def test_texts_of_a_family_are_what_they_are_alone(members, kind, own):
    models = members(kind, own)
    alone = {}
    for number, model in enumerate(models):
        desk = texts_of(models)
        desk.texts = {request: text for request, text in desk.texts.items() if desk.models[request] is model}
        tokens = desk.finish()
        alone.update({request: tokens[request] for request in range(number, 9, 3)})
    together = texts_of(models, arena=BlockArena(4 * 2**20))
    assert together.finish() == alone
    assert together.engine.statistics().rows > 2 * together.engine.statistics().iterations, "they ran together"


def test_shared_weights_run_once_over_all_tokens(members):
    models = members("llama", ("layers.2.mlp",))
    batch = TokenBatch.of([Chunk(0, 0, [1, 2, 3]), Chunk(1, 0, [4, 5]), Chunk(2, 0, [6])])
    ModelFamily(models).hidden(batch, ModelKeyValues(models[0].spec, torch.float32), (0, 1, 2))
    assert [model.fed for model in models] == [[(0, 6), (1, 6), (2, 3)], [(2, 2)], [(2, 1)]]


def test_family_has_a_common_step(members):
    models = members("llama", ("head",))
    assert [list(family.models) for family in families(models)] == [models]
    one, other = members("llama", (), count=1)[0], members("llama", (), count=1)[0]
    assert [list(family.models) for family in families([one, other])] == [[one], [other]]  # equal, in other memory
    smaller = members("llama", (), count=1, num_hidden_layers=2)[0]
    assert len(families([one, smaller])) == 2
    with pytest.raises(ValueError, match="no family"):
        ModelFamily([one, smaller])


def test_parts_of_a_model_are_compared_by_addresses_that_are_read_once():
    class Counted(CountingModel):
        reads = 0

        @property
        def parts(self):
            self.reads += 1
            return super().parts

    models = [Counted(), Counted(), Counted()]
    for _ in range(3):
        assert len(families(models)) == 3
    assert [model.reads for model in models] == [1, 1, 1]
