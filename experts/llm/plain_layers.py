"""Passes of single tokens through all layers of a plain model, in one compiled call.

Plain are layers of matrices that ``products`` multiplies, norms by the root mean square, rotation, usual attention and
SwiGLU: most models that people bring. Guarantee: the numbers are those of the same calls one by one, bit for bit. A
call for each step costs a small model as much time as its matrices.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from experts.llm.files.config import Mlp, Norm, QkNorm
from experts.llm.kernels.products import (
    AttentionCall,
    ProductCall,
    TurningCall,
    address,
    attention_call,
    fits_attention,
    library,
    product_call,
    turning_call,
)
from experts.llm.quant import product_room, takes_product

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from experts.llm.files.config import ArchSpec
    from experts.llm.kernels.products import Sequences
    from experts.llm.layer_weights import AttentionWeights, FeedForwardWeights
    from experts.llm.quant import Matrix

    Layer = tuple[AttentionWeights, FeedForwardWeights]
    Step = tuple[Matrix, Tensor | None, Tensor | None, bool]  # with its bias, the norm before it, a gate before it


class _PassCall(ctypes.Structure):
    """``passing`` of products.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("products", "norms", "tokens", "raised", "added", "room")),
        ("attended", AttentionCall),
        ("turned", TurningCall),
        *((name, ctypes.c_int64) for name in ("layers", "room_bytes")),
    )


class PlainLayers:
    """Layers of one model. It keeps addresses: the tensors stay where they are, as a model's do."""

    def __init__(self, spec: ArchSpec, layers: Sequence[Layer]) -> None:
        """``layers``: those for which ``plain_layers`` makes it."""
        self._spec, self._tensors = spec, layers
        products = [product for layer in layers for product in _products(layer, spec.norm_epsilon)]
        norms = [address(norm) for own, _ in layers for norm in (own.q_norm, own.k_norm)]
        self._products = (ProductCall * len(products))(*products)
        self._norms = (ctypes.c_void_p * len(norms))(*norms)
        self._width = 2 * int(products[3].in_size)

    def run(self, tokens: Tensor, rotation: tuple[Tensor, Tensor] | None, sequences: Sequences) -> None:
        """Tokens, (tokens, hidden), in place. ``rotation``: cosine and sine, each (tokens, 1, head size)."""
        spec, found, count, room = self._spec, library(), len(tokens), product_room()
        assert found is not None, "callers ask first"
        heads = tokens.new_empty((count, spec.heads + 2 * spec.kv_heads, spec.head_size))
        attended, raised, added = (
            tokens.new_empty((count, size)) for size in (spec.query_size, self._width, spec.hidden_size)
        )
        queries, keys, values = heads.split((spec.heads, spec.kv_heads, spec.kv_heads), dim=1)
        cosine, sine = rotation or (None, None)
        turned = turning_call(
            heads[:, : spec.heads + spec.kv_heads], None, None, address(cosine), address(sine),
            first_heads=spec.heads, epsilon=spec.norm_epsilon,
        )  # fmt: skip
        asked = _PassCall(
            ctypes.addressof(self._products), ctypes.addressof(self._norms), tokens.data_ptr(), raised.data_ptr(),
            added.data_ptr(), room.data_ptr(), attention_call(queries, keys, values, attended, sequences), turned,
            len(spec.layers), room.nbytes,
        )  # fmt: skip
        found.coserve_pass(ctypes.byref(asked))


def plain_layers(spec: ArchSpec, layers: Sequence[Layer]) -> PlainLayers | None:
    """None for a model with another layer, or on a CPU without the call."""
    is_attention_usual = spec.is_attention_plain and spec.qkv_limit is None and spec.qk_norm is not QkNorm.WHOLE
    is_turned_alike = spec.local_rope is None and (spec.rope is None or spec.rope.head_share == 1)
    is_usual = is_attention_usual and is_turned_alike and spec.norm is Norm.RMS and not spec.has_output_norms
    is_plain = is_usual and fits_attention(spec.head_size) and all(map(_is_plain, layers))
    return PlainLayers(spec, layers) if is_plain and library() is not None else None


def _is_plain(layer: Layer) -> bool:
    own, behind = layer
    if behind.mlp is None or behind.experts is not None or behind.mlp.kind is not Mlp.SWIGLU:
        return False
    vectors = [one for one in (own.q_norm, own.k_norm) if one is not None]
    return all(_is_taken(own.attention_norm, vectors, step) for step in _steps(layer))


def _is_taken(like: Tensor, vectors: Sequence[Tensor], step: Step) -> bool:
    matrix, *others, _ = step
    vectors = [*vectors, *(one for one in others if one is not None)]
    return hasattr(matrix, "lanes") and takes_product(like.unsqueeze(0), matrix, vectors)


def _steps(layer: Layer) -> tuple[Step, ...]:
    own, behind = layer
    mlp = behind.mlp
    assert mlp is not None, "plain layers have one"
    return (
        (own.qkv, own.qkv_bias, own.attention_norm, False),
        (own.output, own.output_bias, None, False),
        (mlp.up, mlp.up_bias, behind.mlp_norm, False),
        (mlp.down, mlp.down_bias, None, True),
    )


def _products(layer: Layer, epsilon: float) -> Iterator[ProductCall]:
    dtype = layer[0].attention_norm.dtype
    for matrix, bias, norm, is_gated in _steps(layer):
        yield product_call(matrix, bias, None if norm is None else (norm, epsilon), dtype, is_gated=is_gated)
