"""A training step over ranks against the same step in one process, over gloo."""

import pytest
import torch

from experts.llm.files.checkpoint import open_checkpoint
from experts.llm.files.config import read_spec
from experts.llm.files.names import EXPERTS
from experts.llm.training.descent import GradientDescent
from experts.llm.training.over_ranks import RankTraining
from experts.llm.training.step import TextBatch, loss_and_gradients
from tests.experts.llm.conftest import ModelFiles
from tests.experts.llm.parallel.rank_pool import rank_pool

TEXTS = [[5, 9, 3, 44, 8, 21], [7, 7, 12], [90, 2, 17, 8, 61, 30, 4, 11], [33, 12, 6, 80], [1, 50], [64, 2, 9, 9, 13]]
STEPS, LEARNING_RATE = 3, 0.02


def model_of(directory):
    spec = read_spec(directory, "tiny")
    return spec, open_checkpoint(directory, "tiny", spec).read_all()


def soft_labels_of(spec, batch):
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn((*batch.token_ids.shape, spec.vocab_size), generator=generator)
    return whole[batch.counted]


def descend(tensors, step, norm_of=lambda gradients: None):
    """Losses of each step; the tensors are trained in place."""
    descent = GradientDescent(tensors.values(), STEPS, LEARNING_RATE)
    told = []
    for _ in range(STEPS):
        losses, gradients = step()
        for name, gradient in gradients.items():
            tensors[name].grad = gradient.clone()
        descent.step(norm_of(gradients))
        told.append([float(each) for each in (losses.cross_entropy, losses.divergence, losses.unevenness)])
    return told


def train_rank(directory, texts_of):
    spec, whole = model_of(directory)
    training = RankTraining(spec, whole)
    own = texts_of[torch.distributed.get_rank()]
    everything = TextBatch.of(TEXTS)
    soft = soft_labels_of(spec, everything).split(everything.counted.sum(dim=1).tolist())
    batch = TextBatch.of([TEXTS[n] for n in own])
    labels = torch.cat([soft[n] for n in own])
    losses = descend(training.trained, lambda: training.loss_and_gradients(batch, 0.5, labels), training.norm)
    held = {name: tensor.detach().numpy() for name, tensor in training.trained.items()}
    return losses, held


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with rank_pool(tmp_path_factory.mktemp("ranks")) as pool:
        yield pool


@pytest.mark.parametrize(
    ("family", "changes", "texts_of"),
    [
        ("pr_moe", {"num_experts": [0, 2, 6]}, [[0, 3], [1], [2, 4], [5]]),  # degrees 1, 2 and 4
        ("pr_moe", {"num_experts": [3, 0, 5], "residual": "add"}, [[0, 1, 2, 3, 4], [5]]),
        pytest.param("mixtral", {}, [[0], [1, 2], [3, 5], [4]], marks=pytest.mark.slow),
    ],
)
def test_steps_over_ranks_equal_those_of_one_process(ranks, tmp_path, family, changes, texts_of):
    files = ModelFiles(tmp_path)
    directory = files.write(files.config(family, **changes))
    spec, whole = model_of(directory)
    whole = {name: tensor.clone().requires_grad_() for name, tensor in whole.items()}
    batch = TextBatch.of(TEXTS)
    expected = descend(whole, lambda: loss_and_gradients(spec, whole, batch, 0.5, soft_labels_of(spec, batch)))
    results = ranks.run(len(texts_of), train_rank, directory, texts_of)
    count = len(texts_of)
    for losses, held in results:
        assert torch.tensor(losses).allclose(torch.tensor(expected), atol=1e-5)
        for name, own in held.items():
            if EXPERTS not in name:
                assert torch.from_numpy(own).allclose(whole[name], atol=1e-4), name
    for name, trained in whole.items():
        if EXPERTS in name:
            parts = [torch.from_numpy(held[name]) for _, held in results]
            degree = next(n for n in range(min(len(trained), count), 0, -1) if count % n == 0)
            for first in range(0, count, degree):  # each copy of the layer's moe_experts
                assert torch.cat(parts[first : first + degree]).allclose(trained, atol=1e-4), name
