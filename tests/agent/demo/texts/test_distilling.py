"""Students: fewer layers, the same experts in those that stay, and a teacher who is listened to for a while."""

import pytest
import torch

from agent.demo.texts.characters import Characters
from agent.demo.texts.distilling import StudentPlan, distil, staged_loss, student_of
from agent.demo.texts.network import PrMoe, Shape
from agent.demo.texts.questions import DemoQuestion
from agent.demo.texts.training import TrainingTexts, write_model
from agent.demo.training.learning import Descent, Pace, torch_threads
from experts.llm.config import read_spec
from experts.llm.model import load_model

QUESTIONS = (DemoQuestion("cat?", "a cat."), DemoQuestion("dog?", "two dogs."))
CHARACTERS = Characters.of(QUESTIONS)
TEXTS = TrainingTexts.of(QUESTIONS, CHARACTERS)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    with torch_threads(1):
        yield


@pytest.fixture(scope="module")
def teacher(one_thread):
    network = PrMoe(Shape(len(CHARACTERS.tokens), 16, 2, 32, (0, 2, 3, 2), 64), torch.Generator().manual_seed(1))
    descent = Descent(network.parameters(), Pace(60, 1e-2), weight_decay=0.01)
    for _ in range(60):
        descent.step(TEXTS.loss(network(TEXTS.token_ids)[0]))
    return network.requires_grad_(False)


def loss(network):
    with torch.no_grad():
        return TEXTS.loss(network(TEXTS.token_ids)[0]).item()


def test_a_student_is_the_teacher_without_some_layers(teacher):
    student = student_of(teacher, (0, 2))
    assert student.shape.moe_experts == (0, 3)
    assert torch.equal(student["model.layers.1.mlp.gate.weight"], teacher["model.layers.2.mlp.gate.weight"])
    assert torch.equal(student["model.embed_tokens.weight"], teacher["model.embed_tokens.weight"])
    student["model.norm.weight"].data += 1
    assert not torch.equal(student["model.norm.weight"], teacher["model.norm.weight"])


def test_all_layers_are_the_teacher_again(teacher):
    again = student_of(teacher, (0, 1, 2, 3))
    with torch.no_grad():
        assert torch.equal(again(TEXTS.token_ids)[0], teacher(TEXTS.token_ids)[0])


@pytest.mark.parametrize("layers", [(), (0, 4), (1, 0), (0, 0)])
def test_layers_that_there_are_not_are_refused(teacher, layers):
    with pytest.raises(ValueError, match="of a teacher with 4"):
        student_of(teacher, layers)


def test_the_teacher_counts_until_the_stop_step():
    plan = StudentPlan((0,), Pace(10, 1e-3), stop_step=6)
    assert [plan.alpha(step) > 0 for step in range(10)] == [True] * 6 + [False] * 4


def test_the_loss_is_that_of_the_text_and_of_what_differs_from_the_teacher(teacher):
    student = student_of(teacher, (0, 2))
    alone = staged_loss(student, teacher, TEXTS, 0.0)
    assert alone == TEXTS.loss(student(TEXTS.token_ids)[0])
    own, theirs = (one(TEXTS.token_ids)[0][:, :-1][TEXTS.counted[:, 1:]] for one in (student, teacher))
    divergence = (theirs.softmax(-1) * (theirs.log_softmax(-1) - own.log_softmax(-1))).sum(-1).mean()
    torch.testing.assert_close(staged_loss(student, teacher, TEXTS, 0.5), alone + 0.5 * divergence)
    torch.testing.assert_close(staged_loss(teacher, teacher, TEXTS, 1.0), TEXTS.loss(teacher(TEXTS.token_ids)[0]))


def test_a_student_learns_and_is_served(teacher, tmp_path):
    before = loss(student_of(teacher, (0, 2)))
    student = distil(teacher, lambda: TEXTS, StudentPlan((0, 2), Pace(40, 1e-2), stop_step=25))
    assert loss(student) < 0.5 * before
    write_model(tmp_path / "student", student, CHARACTERS)
    assert [layer.moe and layer.moe.moe_experts for layer in read_spec(tmp_path / "student", "s").layers] == [None, 3]
    assert len(load_model(tmp_path / "student", "s").spec.layers) == 2
