"""BatchNorm folded into the convolution before it, where the module's own graph proves that it may be.

Proof: traced in inference mode, the convolution's output goes to the BatchNorm and nowhere else, and either of the two
is called exactly once. Then BatchNorm is an affine map of the convolution's channels, and the convolution absorbs it.
Others (BatchNorm first, as in DenseNet; modules without BatchNorm, as in transformers) stay as they are.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import BatchNorm2d, Conv2d, Identity
from torch.nn.utils.fusion import fuse_conv_bn_weights

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor
    from torch.fx import Graph, Node
    from torch.nn import Module


@dataclass(frozen=True, slots=True)
class FoldablePair:
    """The names of a convolution and of the BatchNorm that alone reads its output."""

    convolution: str
    batchnorm: str
    epsilon: float


def foldable_pairs(module: Module) -> tuple[FoldablePair, ...]:
    """All pairs of a module in inference mode; empty where there is no BatchNorm."""
    modules = dict(module.named_modules())
    if not any(isinstance(part, BatchNorm2d) for part in modules.values()):
        return ()
    graph = torch.fx.symbolic_trace(module).graph
    calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
    return tuple(_pairs(graph, modules, calls))


def fold_structure(module: Module, pairs: Sequence[FoldablePair]) -> None:
    """Give the module the structure that folded weights need: convolutions with a bias, no BatchNorm. In place."""
    for pair in pairs:
        convolution = module.get_submodule(pair.convolution)
        weight = convolution.weight
        assert isinstance(weight, torch.Tensor)
        if convolution.bias is None:
            convolution.bias = torch.nn.Parameter(weight.new_empty(weight.shape[0]), requires_grad=False)
        module.set_submodule(pair.batchnorm, Identity())


def fold_weights(tensors: Mapping[str, Tensor], pairs: Sequence[FoldablePair]) -> dict[str, Tensor]:
    """The state dict of the folded structure, from that of the original. Computed in double precision."""
    folded = dict(tensors)
    for pair in pairs:
        weight = f"{pair.convolution}.weight"
        bias = f"{pair.convolution}.bias"
        norm = {key: folded.pop(f"{pair.batchnorm}.{key}") for key in _NORM_KEYS}
        fused_weight, fused_bias = fuse_conv_bn_weights(
            folded[weight].double(),
            folded[bias].double() if bias in folded else None,
            norm["running_mean"].double(),
            norm["running_var"].double(),
            pair.epsilon,
            norm["weight"].double(),
            norm["bias"].double(),
        )
        folded[weight] = fused_weight.detach().to(tensors[weight].dtype)
        folded[bias] = fused_bias.detach().to(tensors[weight].dtype)
    return folded


_NORM_KEYS = ("weight", "bias", "running_mean", "running_var")


def _pairs(graph: Graph, modules: Mapping[str, Module], calls: Mapping[object, int]) -> list[FoldablePair]:
    pairs: list[FoldablePair] = []
    for node in graph.nodes:
        source = node.args[0] if node.op == "call_module" and node.args else None
        if not isinstance(source, torch.fx.Node) or not _is_foldable(source, node, modules, calls):
            continue
        norm = modules[str(node.target)]
        assert isinstance(norm, BatchNorm2d)
        pairs.append(FoldablePair(str(source.target), str(node.target), norm.eps))
    return pairs


def _is_foldable(source: Node, node: Node, modules: Mapping[str, Module], calls: Mapping[object, int]) -> bool:
    norm = modules[str(node.target)]
    return (
        source.op == "call_module"
        and type(modules[str(source.target)]) is Conv2d
        and type(norm) is BatchNorm2d
        and norm.affine
        and norm.track_running_stats
        and len(source.users) == 1
        and calls[source.target] == calls[node.target] == 1
    )
