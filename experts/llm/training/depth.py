"""Depth cut: a student of fewer layers than its teacher, made of layers of the teacher (Mixture-of-Students).

Rule: the first and the last layer are kept, and those between at equal distances. Each kept layer is kept whole, with
its count of moe_experts, so a pyramid stays one. Source: DeepSpeed-MoE (arXiv 2201.05596), section 4.2.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from experts.errors import WeightsRefused
from experts.llm.config import ConfigFamily, parse_spec
from experts.llm.names import layer_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

LAYERS = "layers."
BY_LAYER = ("num_experts", "layer_types")  # keys of a config.json that may hold a list with an entry for each layer


def kept_layers(layers: int, depth: int, teacher: str) -> tuple[int, ...]:
    """Numbers of the teacher's layers that a student of this depth keeps. Raises WeightsRefused."""
    if not 2 <= depth < layers:
        advice = f"give --depth from 2 to {layers - 1}" if layers > 2 else "it cannot be made shallower"
        raise WeightsRefused(teacher, f"has {layers} layers, and a student of {depth} is asked for: {advice}")
    return tuple(n * (layers - 1) // (depth - 1) for n in range(depth))


def student_config(config: Mapping[str, Any], kept: Sequence[int], teacher: str) -> dict[str, Any]:
    """The teacher's config.json for the kept layers alone."""
    whole = parse_spec(config, teacher)
    cut = {**config, "num_hidden_layers": len(kept)}
    for key in BY_LAYER:
        if isinstance(config.get(key), list):
            cut[key] = [config[key][layer] for layer in kept]
    if whole.family in {ConfigFamily.QWEN2_MOE, ConfigFamily.QWEN3_MOE}:
        dense = [number for number, layer in enumerate(kept) if whole.layers[layer].moe is None]
        cut |= {"decoder_sparse_step": 1, "mlp_only_layers": dense}
    assert parse_spec(cut, teacher).layers == tuple(whole.layers[layer] for layer in kept), "layers are kept whole"
    return cut


def student_tensors(tensors: Mapping[str, Tensor], kept: Sequence[int]) -> dict[str, Tensor]:
    """Copies of the teacher's tensors outside its layers and of the kept layers, that take gradients."""
    places = {layer: number for number, layer in enumerate(kept)}
    cut: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.startswith(LAYERS):
            own = name
        elif (layer := layer_of(name)) in places:
            own = name.replace(f"{LAYERS}{layer}.", f"{LAYERS}{places[layer]}.", 1)
        else:
            continue
        cut[own] = tensor.detach().clone().requires_grad_()
    return cut
