"""One step: predictions are those that are served, gradients are the loss's slope; soft labels until the stop step."""

import pytest
import torch
from torch.nn.functional import gelu

from experts.llm.dispatch import MlpWeights, combine, mapping_table, run_each, run_grouped, run_padded, scatter
from experts.llm.files.config import Mlp, parse_spec
from experts.llm.model import LanguageModel
from experts.llm.training.descent import GradientDescent
from experts.llm.training.staged import Schedule, Training, train
from experts.llm.training.step import TextBatch, loss_and_gradients, losses_of, predictions, unevenness
from tests.experts.llm.conftest import FAMILIES, logits_of, tiny_config

TEXTS = ([5, 17, 3, 42, 8, 91, 2, 7, 60, 33, 20], [11, 6, 80, 9, 1], [70, 71, 72, 73, 74, 75, 76, 9])
GPT = {"norm": "layernorm", "layer_norm_eps": 1e-5, "positions": "learned", "residual": "add", "mlp": "gelu_tanh"}
BATCH = TextBatch.of([[5, 17, 3, 42, 8], [11, 6, 80, 9, 1]])


@pytest.fixture(params=[*FAMILIES, "gpt"])
def model(request, model_files):
    is_gpt = request.param == "gpt"
    spec, tensors = model_files.read("pr_moe" if is_gpt else request.param, **(GPT if is_gpt else {}))
    return spec, {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}


def test_trained_predictions_are_the_served_ones(model):
    spec, tensors = model
    predicted, _ = predictions(LanguageModel(spec, tensors), TextBatch.of(TEXTS))
    served = LanguageModel(spec, {name: tensor.detach() for name, tensor in tensors.items()})
    expected = torch.cat([logits_of(served, text)[:-1] for text in TEXTS])
    torch.testing.assert_close(predicted, expected, atol=2e-5, rtol=1e-4)


def test_gradients_are_the_slope_of_the_loss(model):
    spec, tensors = model
    batch = TextBatch.of(TEXTS)
    soft_labels = torch.randn(int(batch.counted.sum()), spec.vocab_size, generator=torch.Generator().manual_seed(3))
    _, gradients = loss_and_gradients(spec, tensors, batch, 0.7, soft_labels)
    assert gradients.keys() == tensors.keys()
    exact = {name: tensor.detach() for name, tensor in tensors.items()}
    for name, gradient in gradients.items():
        size = float(gradient.norm())
        step = 5e-5 / size * gradient / size  # changes the loss by 5e-5, too little for another choice of moe_experts

        def loss(sign, name=name, step=step):
            moved = {**exact, name: exact[name] + sign * step}
            with torch.no_grad():
                return float(losses_of(LanguageModel(spec, moved), batch, soft_labels).total(0.7))

        assert (loss(1) - loss(-1)) / 2 == pytest.approx(float((gradient * step).sum()), rel=0.1), name


def test_padding_changes_no_result():
    values = tiny_config("pr_moe")
    spec = parse_spec(values, "tiny")
    assert spec.layers[1].moe_experts == 4
    batch = TextBatch.of(TEXTS)
    wide = TextBatch(*(torch.nn.functional.pad(each, (0, 5)) for each in (batch.token_ids, batch.counted)))
    assert wide.is_text.sum() == sum(map(len, TEXTS))
    assert torch.equal(wide.picked(torch.tensor([1])).token_ids, batch.token_ids[1:2, :5])


def test_losses_are_of_the_counted_tokens_only(model_files):
    spec, tensors = model_files.read("pr_moe")
    model = LanguageModel(spec, tensors)
    batch = TextBatch.of(TEXTS)
    alone = [losses_of(model, TextBatch.of([text])) for text in TEXTS]
    expected = sum(float(each.cross_entropy) * (len(text) - 1) for each, text in zip(alone, TEXTS, strict=True))
    found = losses_of(model, batch)
    assert float(found.cross_entropy) == pytest.approx(expected / sum(len(text) - 1 for text in TEXTS), rel=1e-4)
    own, _ = predictions(model, batch)
    assert float(losses_of(model, batch, own).divergence) == pytest.approx(0, abs=1e-6)
    assert float(losses_of(model, batch, own.roll(1, dims=-1)).divergence) > 0.1


def test_frozen_tensors_have_no_gradient(model_files):
    spec, tensors = model_files.read("llama")
    tensors["norm"].requires_grad_()
    _, gradients = loss_and_gradients(spec, tensors, TextBatch.of(TEXTS))
    assert set(gradients) == {"norm"}


def test_unevenness_is_least_for_equal_use():
    even, uneven = 20 * torch.eye(4), 20 * torch.eye(4)[:1].expand(4, -1)
    assert float(unevenness(even)) == pytest.approx(1)
    assert float(unevenness(uneven)) == pytest.approx(4)


@pytest.mark.parametrize("run", [run_each, run_grouped, run_padded])
def test_each_dispatch_of_moe_experts_has_equal_gradients(run):
    generator = torch.Generator().manual_seed(5)

    def drawn(*shape):
        return torch.randn(shape, generator=generator).requires_grad_()

    tokens, up, down, up_bias, down_bias = drawn(20, 16), drawn(4, 24, 16), drawn(4, 16, 24), drawn(4, 24), drawn(4, 16)
    table = mapping_table(torch.randint(4, (20, 1), generator=generator), torch.rand(20, 1, generator=generator), 4)
    rows = [
        one * (gelu(token @ up[n].T + up_bias[n]) @ down[n].T + down_bias[n])
        for token, n, one in zip(tokens, table.moe_expert[table.order.argsort()], table.weight, strict=True)
    ]
    weights = MlpWeights(Mlp.GELU, up, down, up_bias, down_bias)
    found = combine(run(scatter(tokens, table), table, weights), table, torch.float32)
    leaves, way = (tokens, up, down, up_bias, down_bias), torch.randn(20, 16, generator=generator)
    expected = torch.autograd.grad((torch.stack(rows) * way).sum(), leaves)
    torch.testing.assert_close(torch.autograd.grad((found * way).sum(), leaves), expected, atol=1e-4, rtol=1e-4)


@pytest.fixture
def run(model_files):
    spec, teacher = model_files.read("pr_moe")

    def run(schedule, seed=1):
        generator = torch.Generator().manual_seed(seed)
        own = {n: (t + 0.1 * torch.randn(t.shape, generator=generator)).requires_grad_() for n, t in teacher.items()}
        training, seen = Training(spec, own), []
        train(training, lambda step: BATCH, schedule, LanguageModel(spec, teacher), lambda *each: seen.append(each))
        return own, [losses for _, losses in seen]

    return run


def test_alpha_is_zero_from_the_stop_step_on(run):
    schedule = Schedule(6, 1e-3, alpha=0.5, stop_at=4)
    assert [schedule.alpha_at(step) for step in range(6)] == [0.5] * 4 + [0.0] * 2
    _, losses = run(schedule)
    assert [float(each.divergence) > 0 for each in losses] == [True] * 4 + [False] * 2


def test_default_stop_is_at_seventy_per_cent():
    assert Schedule(1000, 1e-3, alpha=1.0).stop_step == 700


def test_teacher_changes_nothing_after_the_stop(run):
    without, staged = run(Schedule(5, 1e-3))[0], run(Schedule(5, 1e-3, alpha=1.0, stop_at=0))[0]
    full = run(Schedule(5, 1e-3, alpha=1.0, stop_at=5))[0]
    assert all(torch.equal(tensor, staged[name]) for name, tensor in without.items())
    assert not torch.equal(full["embedding"], staged["embedding"])


def test_teacher_is_followed_while_its_soft_labels_weigh_most(run):
    _, losses = run(Schedule(25, 1e-2, alpha=50.0, stop_at=25))
    assert float(losses[-1].divergence) < 0.5 * float(losses[0].divergence)


def test_losses_fall_and_are_reproducible(run):
    schedule = Schedule(25, 1e-2, alpha=1.0)
    (first, losses), (again, _) = run(schedule), run(schedule)
    assert float(losses[-1].cross_entropy) < 0.6 * float(losses[0].cross_entropy)
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())


def test_gradient_with_other_strides_gives_an_equal_step():
    straight, turned = (torch.zeros(3, 4).requires_grad_() for _ in range(2))
    gradient = (torch.arange(12.0) - 5.5).view(4, 3).t()
    for tensor, given in ((straight, gradient.contiguous()), (turned, gradient)):
        descent = GradientDescent([tensor], 2, 0.1)
        tensor.grad = given
        descent.step()
    assert torch.equal(straight, turned)
