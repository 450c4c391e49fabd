"""Two language models on one backbone: learned together first, then each its own last layer.

First one network learns both subjects, by turns. Then all of it is frozen but for the last layer's attention, gate,
residual MLP and coefficient, and the last norm; each expert trains its own copy of those on its own subject, over what
the frozen trunk makes of the texts. So experts share their trunk and all moe_experts bit for bit.
Deterministic: the same questions, plan, seed and number of threads give the same weights on one machine.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy

from agent.demo.texts.characters import Characters, padded
from agent.demo.texts.network import PrMoe, Shape
from agent.demo.training.learning import Descent, Pace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from agent.demo.texts.questions import DemoQuestion, Questions

    Progress = Callable[[str, int, int], None]  # stage, done, total

UNEVENNESS_WEIGHT = 0.01  # Switch Transformer (arXiv 2101.03961), section 2.2
WEIGHT_DECAY = 0.01
CONTEXT = 160
JOINT, OWN = Pace(steps=400, learning_rate=4e-3), Pace(steps=80, learning_rate=1e-3)


@dataclass(frozen=True, slots=True)
class TextPlan:
    """How the two are trained. ``joint``: steps over both subjects in all; ``misspelt``: of questions' letters."""

    hidden: int = 112
    heads: int = 4
    moe_experts: tuple[int, ...] = (0, 2, 4)
    step_tokens: int = 2400
    misspelt: float = 0.08
    joint: Pace = JOINT
    own: Pace = OWN

    def shape(self, vocabulary: int) -> Shape:
        return Shape(vocabulary, self.hidden, self.heads, 4 * self.hidden, self.moe_experts, CONTEXT)


@dataclass(frozen=True, slots=True)
class TrainingTexts:
    """A subject's texts, of one length. ``counted``: the tokens that are to be foreseen, an answer's and its end."""

    token_ids: Tensor
    counted: Tensor

    @classmethod
    def of(cls, questions: Sequence[DemoQuestion], characters: Characters) -> TrainingTexts:
        encoded = [characters.encode(one) for one in questions]
        token_ids = torch.tensor(padded(encoded, characters.end_mark))
        places = torch.arange(token_ids.shape[1])
        answers = (token_ids == characters.answer_mark).int().argmax(dim=1)
        lengths = torch.tensor([len(one) for one in encoded])
        counted = (places > answers[:, None]) & (places < lengths[:, None])
        return cls(token_ids, counted)

    def misspelt(self, letters: Tensor, share: float, generator: torch.Generator) -> TrainingTexts:
        """The texts with a share of the questions' letters, but no digit, replaced at random.

        A model cannot memorise such questions, and so understands new ones.
        """
        drawn = torch.rand(self.token_ids.shape, generator=generator)
        asked = ~self.counted & torch.isin(self.token_ids, letters)
        others = letters[torch.randint(len(letters), self.token_ids.shape, generator=generator)]
        return TrainingTexts(torch.where(asked & (drawn < share), others, self.token_ids), self.counted)

    def picked(self, picked: Tensor) -> TrainingTexts:
        token_ids, counted = self.token_ids[picked], self.counted[picked]
        length = int(counted.any(dim=0).nonzero().max()) + 1
        return TrainingTexts(token_ids[:, :length], counted[:, :length])

    def loss(self, logits: Tensor) -> Tensor:
        counted = self.counted[:, 1:]
        return cross_entropy(logits[:, :-1][counted], self.token_ids[:, 1:][counted])


def train_pair(
    subjects: Mapping[str, Questions], characters: Characters, plan: TextPlan, seed: int, progress: Progress
) -> dict[str, PrMoe]:
    """A network for each subject; all that is not ``own_names`` is the same in all of them."""
    generator = torch.Generator().manual_seed(seed)
    texts = {name: TrainingTexts.of(subject.training, characters) for name, subject in subjects.items()}
    letters = torch.tensor(characters.letters)
    network = PrMoe(plan.shape(len(characters.tokens)), generator)
    drawing = _Drawing(plan, letters, generator)
    _train_backbone(network, list(texts.values()), drawing, progress)
    trained = {}
    for number, (name, own) in enumerate(texts.items(), start=1):
        trained[name] = _train_own(network, own, drawing)
        progress("train experts", number, len(texts))
    return trained


@dataclass(frozen=True, slots=True)
class _Drawing:
    plan: TextPlan
    letters: Tensor
    generator: torch.Generator

    def draw(self, texts: TrainingTexts) -> TrainingTexts:
        count = min(self.plan.step_tokens // texts.token_ids.shape[1], len(texts.token_ids))
        picked = torch.randint(len(texts.token_ids), (max(count, 1),), generator=self.generator)
        return texts.picked(picked).misspelt(self.letters, self.plan.misspelt, self.generator)


def _train_backbone(network: PrMoe, texts: Sequence[TrainingTexts], drawing: _Drawing, progress: Progress) -> None:
    pace = drawing.plan.joint
    descent = Descent(network.parameters(), pace, WEIGHT_DECAY)
    for step in range(pace.steps):
        batch = drawing.draw(texts[step % len(texts)])
        logits, uneven = network(batch.token_ids)
        descent.step(batch.loss(logits) + UNEVENNESS_WEIGHT * uneven)
        progress("train backbone", step + 1, pace.steps)


def _train_own(backbone: PrMoe, texts: TrainingTexts, drawing: _Drawing) -> PrMoe:
    """A copy whose own parts are trained, over what the frozen trunk gives."""
    network = copy.deepcopy(backbone)
    network.requires_grad_(False)
    own = [network[name].requires_grad_(True) for name in network.own_names]
    descent = Descent(own, drawing.plan.own, WEIGHT_DECAY)
    for _ in range(drawing.plan.own.steps):
        batch = drawing.draw(texts)
        with torch.no_grad():
            tokens, _ = network.trunk(batch.token_ids)
        logits, uneven = network.answer(tokens)
        descent.step(batch.loss(logits) + UNEVENNESS_WEIGHT * uneven)
    network.requires_grad_(False)
    return network


def write_model(directory: Path, network: PrMoe, characters: Characters) -> None:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(network.shape.config(), indent=2) + "\n", "utf-8")
    save_file({name: one.contiguous() for name, one in network.checkpoint().items()}, directory / "model.safetensors")
    characters.write(directory)
