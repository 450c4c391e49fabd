"""Two language models on one backbone: trained together first, then a last layer for each.

One network learns both subjects in turn. Then everything is frozen but the last layer's attention, gate, residual MLP
and coefficient, and the last norm: each expert trains a copy of those on its own subject. So the experts share their
backbone and all moe_experts bit for bit.
Deterministic: the same questions, plan, seed and number of threads give the same weights on one machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from agent.demo.texts.models import ANSWER, END, TextNetwork, tokens_of
from agent.demo.training.learning import descend

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tokenizers import Tokenizer
    from torch import Tensor

    from agent.demo.texts.questions import DemoQuestion, Questions

CONTEXT = 160
UNEVENNESS_WEIGHT = 0.005  # Switch Transformer (arXiv 2101.03961), section 2.2: 0.01, over two such layers


@dataclass(frozen=True, slots=True)
class TextPlan:
    """Sizes and training of the two. ``steps``: over both subjects together, then of each expert alone.

    ``moe_experts``: of each layer, 0 for a dense one. ``misspelt``: share of the questions' letters.
    """

    hidden: int = 112
    heads: int = 4
    moe_experts: tuple[int, ...] = (0, 2, 4)
    step_tokens: int = 2400
    misspelt: float = 0.08
    steps: tuple[int, int] = (400, 80)
    learning_rates: tuple[float, float] = (4e-3, 1e-3)

    def config(self, vocabulary: int) -> dict[str, Any]:
        return {
            "model_type": "pr_moe",
            "vocab_size": vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": 4 * self.hidden,
            "num_hidden_layers": len(self.moe_experts),
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e4,
            "num_experts": list(self.moe_experts),
            "num_experts_per_tok": 1,
            "norm_topk_prob": False,
            "residual": "softmax",
            "mlp": "gelu",
            "tie_word_embeddings": True,
        }


@dataclass(frozen=True, slots=True)
class TrainingTexts:
    """Texts of one length. ``counted``: the tokens to predict, which are an answer's and its end."""

    token_ids: Tensor
    counted: Tensor

    @classmethod
    def of(cls, questions: Sequence[DemoQuestion], tokenizer: Tokenizer) -> TrainingTexts:
        encoded = [torch.tensor(tokens_of(one, tokenizer)) for one in questions]
        token_ids = pad_sequence(encoded, batch_first=True, padding_value=tokenizer.token_to_id(END))
        places = torch.arange(token_ids.shape[1])
        answers = (token_ids == tokenizer.token_to_id(ANSWER)).int().argmax(1, keepdim=True)
        lengths = torch.tensor([len(one) for one in encoded])[:, None]
        return cls(token_ids, (places > answers) & (places < lengths))

    def misspelt(self, letters: Tensor, share: float, generator: torch.Generator) -> TrainingTexts:
        """The texts with a share of the questions' letters, but no digit, replaced at random.

        A model cannot memorise such questions, and so understands new ones.
        """
        drawn = torch.rand(self.token_ids.shape, generator=generator)
        asked = ~self.counted & torch.isin(self.token_ids, letters)
        others = letters[torch.randint(len(letters), self.token_ids.shape, generator=generator)]
        return TrainingTexts(torch.where(asked & (drawn < share), others, self.token_ids), self.counted)

    def picked(self, rows: Tensor) -> TrainingTexts:
        token_ids, counted = self.token_ids[rows], self.counted[rows]
        length = int(counted.any(dim=0).nonzero().max()) + 1
        return TrainingTexts(token_ids[:, :length], counted[:, :length])

    def loss(self, network: TextNetwork) -> Tensor:
        counted = self.counted[:, 1:]
        logits, uneven = network(self.token_ids)
        return cross_entropy(logits[:, :-1][counted], self.token_ids[:, 1:][counted]) + UNEVENNESS_WEIGHT * uneven


def letters_of(tokenizer: Tokenizer) -> Tensor:
    tokens = tokenizer.get_vocab().items()
    return torch.tensor(sorted(number for token, number in tokens if len(token) == 1 and not token.isdigit()))


def train_pair(
    subjects: Mapping[str, Questions],
    tokenizer: Tokenizer,
    plan: TextPlan,
    seed: int,
    progress: Callable[[str, int, int], None],
) -> dict[str, TextNetwork]:
    """A network for each subject; tensors outside ``own_names`` are the same in all of them."""
    generator = torch.Generator().manual_seed(seed)
    letters = letters_of(tokenizer)
    texts = {name: TrainingTexts.of(subject.training, tokenizer) for name, subject in subjects.items()}

    def train(network: TextNetwork, names: Sequence[str], subjects: Sequence[TrainingTexts], stage: int) -> None:
        def loss(step: int) -> Tensor:
            if stage == 0:
                progress("train backbone", step + 1, plan.steps[stage])
            drawn = subjects[step % len(subjects)]
            count = min(max(plan.step_tokens // drawn.token_ids.shape[1], 1), len(drawn.token_ids))
            rows = torch.randint(len(drawn.token_ids), (count,), generator=generator)
            return drawn.picked(rows).misspelt(letters, plan.misspelt, generator).loss(network)

        trained = [network.tensors[name].requires_grad_() for name in names]
        descend(trained, range(plan.steps[stage]), loss, plan.learning_rates[stage])

    backbone = TextNetwork.untrained(plan.config(tokenizer.get_vocab_size()), generator)
    train(backbone, tuple(backbone.tensors), list(texts.values()), 0)
    experts = {name: backbone.copy() for name in subjects}
    for number, (name, network) in enumerate(experts.items(), start=1):
        train(network, network.own_names, [texts[name]], 1)
        progress("train experts", number, len(experts))
    return experts
