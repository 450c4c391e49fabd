"""BatchNorm folded into the convolution before it, where a run of the module proves that it may be.

Proof: in one run on the meta device the convolution's output goes to the BatchNorm alone, and each is called once. Then
BatchNorm is an affine map of the convolution's channels. Others (BatchNorm first, as in DenseNet) stay as they are.

Guarantees: the proof changes nothing for other threads: hooks are the module's own, watched operators this thread's.
(torch.fx would tell the same pairs, but replaces ``Module.__call__`` for the whole process.)
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import BatchNorm2d, Conv2d, Identity
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor
    from torch.nn import Module


@dataclass(frozen=True, slots=True)
class FoldablePair:
    """The names of a convolution and of the BatchNorm that alone reads its output."""

    convolution: str
    batchnorm: str
    epsilon: float


def foldable_pairs(module: Module, size: tuple[int, int]) -> tuple[FoldablePair, ...]:
    """Pairs as they run. ``module``: in inference mode, on meta, the caller's alone. ``size``: height, width."""
    if not any(isinstance(part, BatchNorm2d) for part in module.modules()):
        return ()
    with ExitStack() as watching, torch.no_grad():
        reads = _Reads()
        for name, part in module.named_modules():
            if type(part) is Conv2d:
                watching.enter_context(part.register_forward_hook(reads.convolved(name)))
            elif type(part) is BatchNorm2d and part.affine and part.track_running_stats:
                watching.enter_context(part.register_forward_pre_hook(reads.norm_begins(name, part.eps)))
                watching.enter_context(part.register_forward_hook(reads.norm_ends))
        watching.enter_context(reads)
        answer = module(torch.empty((1, 3, *size), device="meta"))
    reads.count(answer)
    return reads.pairs()


class _Reads(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed by mypy here
    """Counts, of every convolution's output, the BatchNorms and the other operators that take it."""

    def __init__(self) -> None:
        super().__init__()
        self._outputs: dict[int, Tensor] = {}  # by id; kept, so that no later tensor has an id of theirs
        self._sources: dict[int, str] = {}  # the same tensors' convolutions
        self._calls: Counter[str] = Counter()
        self._reads: Counter[str] = Counter()  # by convolution, those of BatchNorms included
        self._pairs: list[FoldablePair] = []
        self._is_in_norm = False

    def convolved(self, name: str) -> Callable[..., None]:
        """The hook of a convolution that ends."""

        def ends(module: Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            self._calls[name] += 1
            self._outputs[id(output)] = output
            self._sources[id(output)] = name

        return ends

    def norm_begins(self, name: str, epsilon: float) -> Callable[..., None]:
        """The hook of a BatchNorm that begins: however many operators it is made of, it reads its input once."""

        def begins(module: Module, inputs: tuple[Any, ...]) -> None:
            self._calls[name] += 1
            self.count(inputs)
            self._is_in_norm = True
            source = self._sources.get(id(inputs[0])) if inputs else None
            if source is not None:
                self._pairs.append(FoldablePair(source, name, epsilon))

        return begins

    def norm_ends(self, module: Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        self._is_in_norm = False

    def count(self, values: object) -> None:
        self._reads.update(self._sources[id(value)] for value in tree_leaves(values) if id(value) in self._sources)

    def pairs(self) -> tuple[FoldablePair, ...]:
        """Pairs of which each module is called once and nothing else reads the convolution's answer."""
        return tuple(
            pair
            for pair in self._pairs
            if self._calls[pair.convolution] == self._calls[pair.batchnorm] == self._reads[pair.convolution] == 1
        )

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # noqa: ANN401  torch's own signature
        if not self._is_in_norm:
            self.count((args, kwargs))
        return func(*args, **(kwargs or {}))


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
        scale, shift, mean, variance = (folded.pop(f"{pair.batchnorm}.{key}").double() for key in _NORM_KEYS)
        old_bias = folded[bias].double() if bias in folded else None
        fused_weight, fused_bias = fuse_conv_bn_weights(
            folded[weight].double(), old_bias, mean, variance, pair.epsilon, scale, shift
        )
        folded[weight] = fused_weight.detach().to(tensors[weight].dtype)
        folded[bias] = fused_bias.detach().to(tensors[weight].dtype)
    return folded


_NORM_KEYS = ("weight", "bias", "running_mean", "running_var")
