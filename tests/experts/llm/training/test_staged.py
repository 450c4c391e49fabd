"""Staged training: soft labels until the stop step, and none from it on."""

import pytest
import torch

from experts.llm.model import LanguageModel
from experts.llm.training.descent import GradientDescent
from experts.llm.training.staged import Schedule, train
from experts.llm.training.step import TextBatch

BATCH = TextBatch.of([[5, 17, 3, 42, 8], [11, 6, 80, 9, 1]])


@pytest.fixture
def run(model_files):
    spec, teacher = model_files.read("pr_moe")

    def run(schedule, seed=1):
        generator = torch.Generator().manual_seed(seed)
        own = {n: (t + 0.1 * torch.randn(t.shape, generator=generator)).requires_grad_() for n, t in teacher.items()}
        seen = []
        train(spec, own, lambda step: BATCH, schedule, LanguageModel(spec, teacher), lambda *each: seen.append(each))
        return own, [losses for _, losses in seen]

    return run


def test_alpha_is_zero_from_the_stop_step_on(run):
    schedule = Schedule(6, 1e-3, alpha=0.5, stop_at=4)
    assert [schedule.alpha_at(step) for step in range(6)] == [0.5] * 4 + [0.0] * 2
    _, losses = run(schedule)
    assert [float(each.divergence) > 0 for each in losses] == [True] * 4 + [False] * 2


def test_the_usual_stop_is_at_seventy_per_cent():
    assert Schedule(1000, 1e-3, alpha=1.0).stop_step == 700


def test_after_the_stop_a_teacher_changes_nothing(run):
    without, staged = run(Schedule(5, 1e-3))[0], run(Schedule(5, 1e-3, alpha=1.0, stop_at=0))[0]
    full = run(Schedule(5, 1e-3, alpha=1.0, stop_at=5))[0]
    assert all(torch.equal(tensor, staged[name]) for name, tensor in without.items())
    assert not torch.equal(full["embedding"], staged["embedding"])


def test_a_teacher_is_followed_while_its_soft_labels_weigh_most(run):
    _, losses = run(Schedule(25, 1e-2, alpha=50.0, stop_at=25))
    assert float(losses[-1].divergence) < 0.5 * float(losses[0].divergence)


def test_losses_fall_and_are_the_same_again(run):
    schedule = Schedule(25, 1e-2, alpha=1.0)
    (first, losses), (again, _) = run(schedule), run(schedule)
    assert float(losses[-1].cross_entropy) < 0.6 * float(losses[0].cross_entropy)
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())


def test_a_gradient_in_another_order_of_strides_is_followed_as_it_is():
    straight, turned = (torch.zeros(3, 4).requires_grad_() for _ in range(2))
    gradient = (torch.arange(12.0) - 5.5).view(4, 3).t()
    for tensor, given in ((straight, gradient.contiguous()), (turned, gradient)):
        descent = GradientDescent([tensor], 2, 0.1)
        tensor.grad = given
        descent.step()
    assert torch.equal(straight, turned)
