"""LoRA adapters with random numbers, as PEFT saves them, and the models that they would be if merged."""

import json
import math

import torch
from safetensors.torch import save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(folder, base, modules=ALL, *, seed=0, changes=lambda tensors: tensors, **config):
    """Write an adapter of ``base``, the tensors of a checkpoint; returns the folder, and the merged checkpoint."""
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "bias": "none", "init_lora_weights": True} | config
    generator, merged, halves = torch.Generator().manual_seed(seed), dict(base), {}
    for name in [name for name in base if name.endswith(tuple(f"{module}.weight" for module in modules))]:
        module = name.removesuffix(".weight")
        rank = values.get("rank_pattern", {}).get(module.rpartition(".")[2], values["r"])
        alpha = values.get("alpha_pattern", {}).get(module, values["lora_alpha"])
        (outputs, inputs), deviation = base[name].shape, 0.2 / math.sqrt(base[name].shape[1])
        down = deviation * torch.randn((rank, inputs), generator=generator)
        up = torch.randn((outputs, rank), generator=generator)
        halves |= {f"base_model.model.{module}.lora_A.weight": down, f"base_model.model.{module}.lora_B.weight": up}
        merged[name] = base[name] + alpha / (math.sqrt(rank) if values.get("use_rslora") else rank) * up @ down
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(values))
    save_file(changes(halves), folder / "adapter_model.safetensors")
    return folder, merged
