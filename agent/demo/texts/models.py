"""Trainable language models of single characters: two on one backbone, and the files that serve them.

A text is ``<user>question<answer>answer<end>``. The network is the one that ``experts.llm`` serves: a PR-MoE
(DeepSpeed-MoE, arXiv 2201.05596, section 4.1), trained by ``experts.llm.training``.

One network learns both subjects in turn. Then everything is frozen but the last layer's attention, gate, residual MLP
and coefficient, and the last norm: each expert trains a copy of those on its own subject. So the experts share their
backbone and all moe_experts bit for bit.
Deterministic: the same questions, seed and number of threads give the same weights on one machine.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from experts.llm.files.config import parse_spec
from experts.llm.files.names import EXPERTS, FINAL_NORM, assemblies
from experts.llm.training.distil import write_model
from experts.llm.training.staged import Schedule, Training, train
from experts.llm.training.step import TextBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from agent.demo.texts.questions import DemoQuestion, Questions
    from experts.llm.files.config import ArchSpec

HIDDEN, HEADS = 112, 4
MOE_EXPERTS = (0, 2, 4)  # of each layer; 0 for a dense one
CONTEXT = 160
STEP_TOKENS = 2400
STEPS = (400, 80)  # over both subjects together, then of each expert alone
LEARNING_RATES = (4e-3, 1e-3)
MISSPELT = 0.08  # share of the questions' letters
USER, ANSWER, END, UNKNOWN = MARKS = ("<user>", "<answer>", "<end>", "<unknown>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'user' %}" + USER + "{{ message.content }}" + ANSWER + "{% endif %}"
    "{% if message.role == 'assistant' %}{{ message.content }}" + END + "{% endif %}"
    "{% endfor %}"
)
FIRST_DEVIATION = 0.7  # of a new matrix's numbers, times the root of its width


def tokenizer_of(questions: Iterable[DemoQuestion]) -> Tokenizer:
    """A tokenizer with one token for each character of these questions and answers."""
    signs = sorted({sign for one in questions for sign in one.text + one.answer})
    tokenizer = Tokenizer(WordLevel({token: n for n, token in enumerate((*MARKS, *signs))}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens(list(MARKS))
    return tokenizer


def tokens_of(question: DemoQuestion, tokenizer: Tokenizer) -> list[int]:
    ids: list[int] = tokenizer.encode(f"{USER}{question.text}{ANSWER}{question.answer}{END}").ids
    return ids


def config_of(vocabulary: int) -> dict[str, Any]:
    return {
        "model_type": "pr_moe",
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "intermediate_size": 4 * HIDDEN,
        "num_hidden_layers": len(MOE_EXPERTS),
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "num_experts": list(MOE_EXPERTS),
        "num_experts_per_tok": 1,
        "norm_topk_prob": False,
        "residual": "softmax",
        "mlp": "gelu",
        "tie_word_embeddings": True,
    }


@dataclass(frozen=True, slots=True)
class TextNetwork:
    """A model's config.json and its tensors, by the names of ``experts.llm.files.names``."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @classmethod
    def untrained(cls, config: Mapping[str, Any], generator: torch.Generator) -> TextNetwork:
        def first(name: str, shape: tuple[int, ...]) -> Tensor:
            if name.endswith(FINAL_NORM):
                return torch.ones(shape)
            if name.endswith("bias"):
                return torch.zeros(shape)
            return torch.randn(shape, generator=generator) * FIRST_DEVIATION / math.sqrt(shape[-1])

        return cls(config, {each.name: first(each.name, each.shape) for each in assemblies(parse_spec(config, "demo"))})

    def copy(self) -> TextNetwork:
        return TextNetwork(self.config, {name: tensor.detach().clone() for name, tensor in self.tensors.items()})

    @property
    def own_names(self) -> tuple[str, ...]:
        """Tensors that an expert owns: the last layer without its moe_experts, and the last norm."""
        last = f"layers.{self.config['num_hidden_layers'] - 1}."
        return tuple(name for name in self.tensors if name.startswith((last, FINAL_NORM)) and EXPERTS not in name)

    @property
    def spec(self) -> ArchSpec:
        return parse_spec(self.config, "demo")

    def write(self, directory: Path, tokenizer: Tokenizer) -> None:
        """A Hugging Face directory: weights, config, tokenizer, chat template."""
        directory.mkdir(parents=True)
        write_model(directory, self.config, self.tensors)
        tokenizer.save(str(directory / "tokenizer.json"))
        (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, "utf-8")
        settings = {"eos_token": END, "unk_token": UNKNOWN, "tokenizer_class": "PreTrainedTokenizerFast"}
        generation = {"eos_token_id": tokenizer.token_to_id(END)}
        for name, values in (("tokenizer_config.json", settings), ("generation_config.json", generation)):
            (directory / name).write_text(json.dumps(values, indent=2) + "\n", "utf-8")


def texts_of(questions: Sequence[DemoQuestion], tokenizer: Tokenizer) -> TextBatch:
    """The questions with their answers. Counted: an answer's tokens and its end."""
    texts = TextBatch.of([tokens_of(one, tokenizer) for one in questions], tokenizer.get_vocab()[END])
    answers = (texts.token_ids == tokenizer.token_to_id(ANSWER)).int().argmax(1, keepdim=True)
    return replace(texts, counted=texts.counted & (torch.arange(texts.token_ids.shape[1]) > answers))


def misspelt(texts: TextBatch, letters: Tensor, share: float, generator: torch.Generator) -> TextBatch:
    """The texts with a share of the questions' letters, but no digit, replaced at random.

    A model cannot memorise such questions, and so understands new ones.
    """
    drawn = torch.rand(texts.token_ids.shape, generator=generator)
    asked = ~texts.counted & torch.isin(texts.token_ids, letters)
    others = letters[torch.randint(len(letters), texts.token_ids.shape, generator=generator)]
    return replace(texts, token_ids=torch.where(asked & (drawn < share), others, texts.token_ids))


def letters_of(tokenizer: Tokenizer) -> Tensor:
    tokens = tokenizer.get_vocab().items()
    return torch.tensor(sorted(number for token, number in tokens if len(token) == 1 and not token.isdigit()))


def drawn_texts(texts: TextBatch, step_tokens: int, generator: torch.Generator) -> TextBatch:
    count = min(max(step_tokens // texts.token_ids.shape[1], 1), len(texts.token_ids))
    return texts.picked(torch.randint(len(texts.token_ids), (count,), generator=generator))


def train_pair(
    subjects: Mapping[str, Questions], tokenizer: Tokenizer, seed: int, progress: Callable[[str, int, int], None]
) -> dict[str, TextNetwork]:
    """A network for each subject; tensors outside ``own_names`` are the same in all of them."""
    generator = torch.Generator().manual_seed(seed)
    letters = letters_of(tokenizer)
    texts = {name: texts_of(subject.training, tokenizer) for name, subject in subjects.items()}

    def train_on(network: TextNetwork, names: Sequence[str], subjects: Sequence[TextBatch], stage: int) -> None:
        def batch_of(step: int) -> TextBatch:
            if stage == 0:
                progress("train backbone", step + 1, STEPS[stage])
            drawn = drawn_texts(subjects[step % len(subjects)], STEP_TOKENS, generator)
            return misspelt(drawn, letters, MISSPELT, generator)

        for name in names:
            network.tensors[name].requires_grad_()
        training = Training(network.spec, network.tensors)
        train(training, batch_of, Schedule(STEPS[stage], LEARNING_RATES[stage]))

    backbone = TextNetwork.untrained(config_of(tokenizer.get_vocab_size()), generator)
    train_on(backbone, tuple(backbone.tensors), list(texts.values()), 0)
    experts = {name: backbone.copy() for name in subjects}
    for number, (name, network) in enumerate(experts.items(), start=1):
        train_on(network, network.own_names, [texts[name]], 1)
        progress("train experts", number, len(experts))
    return experts
