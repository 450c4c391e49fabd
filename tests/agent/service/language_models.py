"""Tiny language models with random weights, on a served line, and whoever has texts written there."""

import json
import math
import threading

import torch
from safetensors.torch import save_file

from experts.llm.files.config import parse_spec
from experts.llm.files.names import assemblies
from tests.experts.llm.text.conftest import CHAT, byte_level

PATIENCE_S = 60.0
CONTEXT = 96
TEXTS = {
    "helpdesk": {
        "rules": [{"matches": "(?i)python", "expert": "llm/code"}],
        "router": "llm/router",
        "experts": {"code": "llm/code", "maths": "llm/maths"},
    },
    "plain": {"rules": [{"matches": "[0-9]", "expert": "llm/maths"}], "otherwise": "llm/code"},
}


def config_of(tokenizer):
    return {
        "model_type": "llama", "vocab_size": tokenizer.get_vocab_size(), "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    }  # fmt: skip


def random_tensors(config, seed):
    generator = torch.Generator().manual_seed(seed)
    parts = [part for one in assemblies(parse_spec(config, "tiny")) for part in one.forms[0]]
    return {
        part.name: 1 + 0.1 * drawn if "norm" in part.name else drawn / math.sqrt(part.shape[-1])
        for part in parts
        for drawn in [torch.randn(part.shape, generator=generator)]
    }


class Reader:
    def __init__(self):
        self.pieces, self.end, self.calls_after_end = [], None, 0
        self.has_ended, self.has_read = threading.Event(), threading.Event()

    def wrote(self, piece):
        self.calls_after_end += self.end is not None
        self.pieces.append(piece)
        self.has_read.set()

    def ended(self, end):
        self.calls_after_end += self.end is not None
        self.end = end
        self.has_ended.set()

    def wait(self):
        assert self.has_ended.wait(PATIENCE_S), "no end"
        return self.end

    @property
    def text(self):
        return "".join(piece.text for piece in self.pieces)


class Held(Reader):
    """One that keeps whoever writes waiting at its first piece, which none may: so the text is under way for sure."""

    def __init__(self):
        super().__init__()
        self.may_go_on = threading.Event()

    def wrote(self, piece):
        super().wrote(piece)
        assert self.may_go_on.wait(PATIENCE_S)

    def ended(self, end):
        super().ended(end)
        self.may_go_on.set()


def write_models(folder):
    tokenizer = byte_level()
    config = config_of(tokenizer)
    for seed, name in enumerate(("router", "code", "maths", "mute")):
        directory = folder / name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config), "utf-8")
        save_file(random_tensors(config, seed), directory / "model.safetensors")
        if name != "mute":
            (directory / "tokenizer.json").write_text(tokenizer.to_str(), "utf-8")
            settings = {"eos_token": "<|end|>", "chat_template": CHAT}
            (directory / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    return folder


def with_models(line, models):
    """A line of images, with language models and routes to them."""
    for name in ("router", "code", "maths", "mute"):
        labels = {"labels": ["code", "maths"]} if name == "router" else {}
        line.document["experts"][f"llm/{name}"] = {"architecture": "llm", "weights": str(models / name), **labels}
    line.document["texts"] = {"routes": TEXTS, "quantum_s": 0.02}
    line.document["memory"] = {"host": "64MiB", "workspace": "32MiB"}
    line.document["device"] = "cpu"
    return line
