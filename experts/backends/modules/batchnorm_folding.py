"""BatchNorm folded into the convolution before it, if a recording of the module proves this valid.

Proof: the convolution's output goes to the BatchNorm alone, and each is called once. Then BatchNorm is an affine map of
the convolution's channels. Others (BatchNorm first, as in DenseNet) stay unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.fx import Node
from torch.nn import BatchNorm2d, Identity, functional
from torch.nn.utils.fusion import fuse_conv_bn_weights

from experts.backends.modules.recording import recorded_once

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor
    from torch.nn import Module

_NORM_KEYS = ("running_mean", "running_var", "weight", "bias")


@dataclass(frozen=True, slots=True)
class FoldablePair:
    """Names of a convolution and of the BatchNorm that alone reads its output."""

    convolution: str
    batchnorm: str
    epsilon: float


def foldable_pairs(module: Module, size: tuple[int, int]) -> tuple[FoldablePair, ...]:
    """Pairs in the order of their calls. ``module``: in inference mode, on meta. ``size``: height, width."""
    if not any(isinstance(part, BatchNorm2d) for part in module.modules()):
        return ()
    recording = recorded_once(module, size)
    pairs = []
    for node in recording.graph.nodes:
        if node.target is not functional.batch_norm:
            continue
        source, mean, variance = node.args
        scale, shift, epsilon = (node.kwargs[key] for key in ("weight", "bias", "eps"))
        is_alone = source.target is torch.conv2d and len(source.users) == 1
        if is_alone and all(_is_read_once(each) for each in (source.args[1], mean, variance, scale, shift)):
            convolution, batchnorm = (recording.weights[each.target] for each in (source.args[1], scale))
            pairs.append(FoldablePair(convolution.removesuffix(".weight"), batchnorm.removesuffix(".weight"), epsilon))
    return tuple(pairs)


def fold_structure(module: Module, pairs: Sequence[FoldablePair]) -> None:
    """Give the module the structure of folded weights: convolutions with a bias, no BatchNorm. In place."""
    for pair in pairs:
        convolution = module.get_submodule(pair.convolution)
        weight = convolution.weight
        assert isinstance(weight, torch.Tensor)
        if convolution.bias is None:
            convolution.bias = torch.nn.Parameter(weight.new_empty(weight.shape[0]), requires_grad=False)
        module.set_submodule(pair.batchnorm, Identity())


def fold_weights(tensors: Mapping[str, Tensor], pairs: Sequence[FoldablePair]) -> dict[str, Tensor]:
    """State dict of the folded structure, computed in double precision."""
    folded = dict(tensors)
    for pair in pairs:
        weight, bias = f"{pair.convolution}.weight", f"{pair.convolution}.bias"
        mean, variance, scale, shift = (folded.pop(f"{pair.batchnorm}.{key}").double() for key in _NORM_KEYS)
        old_bias = folded[bias].double() if bias in folded else None
        fused_weight, fused_bias = fuse_conv_bn_weights(
            folded[weight].double(), old_bias, mean, variance, pair.epsilon, scale, shift
        )
        folded[weight] = fused_weight.detach().to(tensors[weight].dtype)
        folded[bias] = fused_bias.detach().to(tensors[weight].dtype)
    return folded


def _is_read_once(weight: object) -> bool:
    """True if one call reads the weight. False without a weight, and for a module that is called twice."""
    return isinstance(weight, Node) and weight.op == "placeholder" and len(weight.users) == 1
