"""Trainable language models of single characters: two on one backbone, and the files that serve them.

A text is ``<user>question<answer>answer<end>``. The network is the one that ``experts.llm`` serves: a PR-MoE
(DeepSpeed-MoE, arXiv 2201.05596, section 4.1), here over tensors that take gradients.

One network learns both subjects in turn. Then everything is frozen but the last layer's attention, gate, residual MLP
and coefficient, and the last norm: each expert trains a copy of those on its own subject. So the experts share their
backbone and all moe_experts bit for bit.
Deterministic: the same questions, seed and number of threads give the same weights on one machine.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch.nn.functional import cross_entropy, linear, one_hot, rms_norm, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from agent.demo.training.learning import descend
from experts.llm.config import CONFIG_NAME, parse_spec
from experts.llm.model import LanguageModel
from experts.llm.names import EMBEDDING, EXPERTS, FINAL_NORM, assemblies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from agent.demo.texts.questions import DemoQuestion, Questions

HIDDEN, HEADS = 112, 4
MOE_EXPERTS = (0, 2, 4)  # of each layer; 0 for a dense one
CONTEXT = 160
STEP_TOKENS = 2400
STEPS = (400, 80)  # over both subjects together, then of each expert alone
LEARNING_RATES = (4e-3, 1e-3)
MISSPELT = 0.08  # share of the questions' letters
UNEVENNESS_WEIGHT = 0.005  # Switch Transformer (arXiv 2101.03961), section 2.2: 0.01, over two such layers
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


def unevenness(gate_logits: Tensor) -> Tensor:
    """Unevenness of choices among moe_experts: 1 if even. Source: Switch Transformer (arXiv 2101.03961), equation 4."""
    shares = gate_logits.softmax(dim=-1)
    chosen = one_hot(shares.argmax(dim=-1), shares.shape[-1]).float().mean(dim=0)
    return shares.shape[-1] * (chosen * shares.mean(dim=0)).sum()


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
    """A model's config.json and its tensors, by the names of ``experts.llm.names``."""

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

    def __call__(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of each next token, (texts, tokens, vocabulary), for texts of one length, (texts, tokens).

        Beside them the sum over layers of how unevenly moe_experts were chosen, each at least 1.
        """
        model = LanguageModel(parse_spec(self.config, "demo"), self.tensors)

        def normalise(tokens: Tensor, norm: str) -> Tensor:
            return rms_norm(tokens, tokens.shape[-1:], self.tensors[norm], model.spec.norm_epsilon)

        texts, count = token_ids.shape
        positions = torch.arange(count).repeat(texts)
        rotation = model.rotation(positions)
        assert rotation is not None, "a PR-MoE has rotary positions"
        tokens, uneven = model.embedded(token_ids.flatten(), positions), torch.zeros(())
        for layer in range(len(model.spec.layers)):
            queries, keys, values = model.attention_inputs(layer, tokens)
            queries, keys, values = (
                each.unflatten(0, (texts, count)).transpose(1, 2)
                for each in (rotation.turn(queries), rotation.turn(keys), values)
            )
            attended = scaled_dot_product_attention(queries, keys, values, is_causal=True)
            tokens = tokens + model.attention_output(layer, attended.transpose(1, 2).flatten(0, 1))
            if model.spec.layers[layer].moe is not None:
                normed = normalise(tokens, f"layers.{layer}.mlp_norm")
                uneven = uneven + unevenness(linear(normed, self.tensors[f"layers.{layer}.gate"]))
            tokens = tokens + model.feed_forward(layer, tokens)
        logits = linear(normalise(tokens, FINAL_NORM), self.tensors[EMBEDDING])
        return logits.unflatten(0, (texts, count)), uneven

    def write(self, directory: Path, tokenizer: Tokenizer) -> None:
        """A Hugging Face directory: weights, config, tokenizer, chat template."""
        directory.mkdir(parents=True)
        stored: dict[str, Tensor] = {}
        for assembly in assemblies(parse_spec(self.config, "demo")):
            parts = assembly.forms[-1]
            numbers = self.tensors[assembly.name].detach().flatten().split([math.prod(part.shape) for part in parts])
            stored |= {part.name: own.view(part.shape).clone() for part, own in zip(parts, numbers, strict=True)}
        save_file(stored, directory / "model.safetensors")
        tokenizer.save(str(directory / "tokenizer.json"))
        (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, "utf-8")
        settings = {"eos_token": END, "unk_token": UNKNOWN, "tokenizer_class": "PreTrainedTokenizerFast"}
        generation = {"eos_token_id": tokenizer.token_to_id(END)}
        for name, values in (
            (CONFIG_NAME, self.config), ("tokenizer_config.json", settings), ("generation_config.json", generation),
        ):  # fmt: skip
            (directory / name).write_text(json.dumps(values, indent=2) + "\n", "utf-8")


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
    subjects: Mapping[str, Questions], tokenizer: Tokenizer, seed: int, progress: Callable[[str, int, int], None]
) -> dict[str, TextNetwork]:
    """A network for each subject; tensors outside ``own_names`` are the same in all of them."""
    generator = torch.Generator().manual_seed(seed)
    letters = letters_of(tokenizer)
    texts = {name: TrainingTexts.of(subject.training, tokenizer) for name, subject in subjects.items()}

    def train(network: TextNetwork, names: Sequence[str], subjects: Sequence[TrainingTexts], stage: int) -> None:
        def loss(step: int) -> Tensor:
            if stage == 0:
                progress("train backbone", step + 1, STEPS[stage])
            drawn = subjects[step % len(subjects)]
            count = min(max(STEP_TOKENS // drawn.token_ids.shape[1], 1), len(drawn.token_ids))
            rows = torch.randint(len(drawn.token_ids), (count,), generator=generator)
            return drawn.picked(rows).misspelt(letters, MISSPELT, generator).loss(network)

        trained = [network.tensors[name].requires_grad_() for name in names]
        descend(trained, range(STEPS[stage]), loss, LEARNING_RATES[stage])

    backbone = TextNetwork.untrained(config_of(tokenizer.get_vocab_size()), generator)
    train(backbone, tuple(backbone.tensors), list(texts.values()), 0)
    experts = {name: backbone.copy() for name in subjects}
    for number, (name, network) in enumerate(experts.items(), start=1):
        train(network, network.own_names, [texts[name]], 1)
        progress("train experts", number, len(experts))
    return experts
