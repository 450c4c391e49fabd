"""Trainable language models of single characters, and the files that serve them.

A text is ``<user>question<answer>answer<end>``. The network is the one that ``experts.llm`` serves: a PR-MoE
(DeepSpeed-MoE, arXiv 2201.05596, section 4.1), here over tensors that take gradients.
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
from torch.nn.functional import linear, one_hot, rms_norm, scaled_dot_product_attention

from experts.llm.config import CONFIG_NAME, parse_spec
from experts.llm.model import LanguageModel
from experts.llm.names import EMBEDDING, EXPERTS, FINAL_NORM, assemblies

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from torch import Tensor

    from agent.demo.texts.questions import DemoQuestion

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
    """Of tokens' choices among moe_experts: 1 if even. Source: Switch Transformer (arXiv 2101.03961), equation 4."""
    shares = gate_logits.softmax(dim=-1)
    chosen = one_hot(shares.argmax(dim=-1), shares.shape[-1]).float().mean(dim=0)
    return shares.shape[-1] * (chosen * shares.mean(dim=0)).sum()


def tokens_of(question: DemoQuestion, tokenizer: Tokenizer) -> list[int]:
    ids: list[int] = tokenizer.encode(f"{USER}{question.text}{ANSWER}{question.answer}{END}").ids
    return ids


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
