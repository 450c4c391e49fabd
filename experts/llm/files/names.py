"""Names of tensors: maps a checkpoint's names to the model's, which are common to all families.

An assembly concatenates parts of the checkpoint in memory: queries, keys and values as one matrix, gate and
up of an MLP as one, all experts as one block (experts, 2 * width, hidden). A single part is not copied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from experts.llm.files.config import ConfigFamily, Norm, QkNorm, Residual

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from experts.llm.files.config import ArchSpec, LayerSpec, Mlp, MoeSpec

Shape: TypeAlias = tuple[int, ...]

EMBEDDING = "embedding"
HEAD = "head"
HEAD_STORED = "lm_head.weight"
FINAL_NORM = "norm"
FINAL_NORM_BIAS = "norm_bias"
POSITIONS = "positions"
EXPERTS = ".experts."  # between a layer's name and that of a tensor of all its experts


@dataclass(frozen=True, slots=True)
class SourceTensor:
    name: str
    shape: Shape


@dataclass(frozen=True, slots=True)
class Assembly:
    """Tensor of the model, with the forms in which checkpoints store it; the first is the usual one."""

    name: str
    shape: Shape
    forms: tuple[tuple[SourceTensor, ...], ...]

    def __post_init__(self) -> None:
        for form in self.forms:
            laid = sum(math.prod(part.shape) for part in form)
            assert laid == math.prod(self.shape), f"{self.name}: {laid} numbers do not make {self.shape}"


def expert_stacks(names: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Names of the tensors that hold all moe_experts of a layer, by layer."""
    stacks: dict[str, list[str]] = {}
    for name in names:
        layer, found, _ = name.partition(EXPERTS)
        if found:
            stacks.setdefault(layer, []).append(name)
    return tuple(tuple(stack) for stack in stacks.values())


def layer_of(name: str) -> int:
    """The number of the layer that a model's tensor belongs to. ValueError for one that belongs to none."""
    kind, _, rest = name.partition(".")
    if kind != "layers":
        raise ValueError(f"{name} belongs to no layer")
    return int(rest.partition(".")[0])


def assemblies(spec: ArchSpec) -> Iterator[Assembly]:
    """Assemblies of all tensors of a model. A tied head has none."""
    yield _one(EMBEDDING, "model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size))
    if spec.rope is None:
        yield _one(POSITIONS, "model.embed_positions.weight", (spec.max_positions, spec.hidden_size))
    for number, layer in enumerate(spec.layers):
        yield from _attention(spec, number)
        yield from _feed_forward(spec, layer, number)
    yield from _norm(spec, FINAL_NORM, "model.norm")
    if not spec.is_tied:
        yield _one(HEAD, HEAD_STORED, (spec.vocab_size, spec.hidden_size))


def _attention(spec: ArchSpec, layer: int) -> Iterator[Assembly]:
    own, stored, hidden = f"layers.{layer}", f"model.layers.{layer}", spec.hidden_size
    yield from _norm(spec, f"{own}.attention_norm", f"{stored}.input_layernorm")
    sizes = {"q": spec.query_size, "k": spec.kv_size, "v": spec.kv_size}
    total = sum(sizes.values())
    heads = {"qkv": total} if spec.family is ConfigFamily.PHI3 else sizes
    yield _joined(
        f"{own}.qkv",
        (total, hidden),
        [SourceTensor(f"{stored}.self_attn.{one}_proj.weight", (size, hidden)) for one, size in heads.items()],
    )
    if spec.has_qkv_bias:
        parts = [SourceTensor(f"{stored}.self_attn.{one}_proj.bias", (size,)) for one, size in sizes.items()]
        yield _joined(f"{own}.qkv_bias", (total,), parts)
    yield _one(f"{own}.output", f"{stored}.self_attn.o_proj.weight", (hidden, spec.query_size))
    if spec.has_output_bias:
        yield _one(f"{own}.output_bias", f"{stored}.self_attn.o_proj.bias", (hidden,))
    if spec.qk_norm is not None:
        is_whole = spec.qk_norm is QkNorm.WHOLE
        for one in ("q", "k"):
            size = sizes[one] if is_whole else spec.head_size
            yield _one(f"{own}.{one}_norm", f"{stored}.self_attn.{one}_norm.weight", (size,))


def _feed_forward(spec: ArchSpec, layer: LayerSpec, number: int) -> Iterator[Assembly]:
    own, stored, hidden = f"layers.{number}", f"model.layers.{number}", spec.hidden_size
    if spec.has_output_norms:
        yield from _norm(spec, f"{own}.output_norm", f"{stored}.post_attention_layernorm")
        yield from _norm(spec, f"{own}.mlp_output_norm", f"{stored}.post_feedforward_layernorm")
    before = "pre_feedforward_layernorm" if spec.has_output_norms else "post_attention_layernorm"
    yield from _norm(spec, f"{own}.mlp_norm", f"{stored}.{before}")
    if layer.moe is None:
        yield from _mlp(spec, f"{own}.mlp", f"{stored}.mlp", layer.mlp_size)
        return
    yield from _moe(spec, layer.moe, own, stored)
    if layer.has_shared_expert:
        yield from _mlp(spec, f"{own}.mlp", f"{stored}.mlp.shared_expert", layer.mlp_size)
        yield _one(f"{own}.shared_gate", f"{stored}.mlp.shared_expert_gate.weight", (1, hidden))
    if layer.residual is not None:
        yield from _mlp(spec, f"{own}.mlp", f"{stored}.mlp.residual", layer.mlp_size)
    if layer.residual is Residual.SOFTMAX:
        yield _one(f"{own}.coefficient", f"{stored}.mlp.coefficient.weight", (2, hidden))
        yield _one(f"{own}.coefficient_bias", f"{stored}.mlp.coefficient.bias", (2,))


def _norm(spec: ArchSpec, own: str, stored: str) -> Iterator[Assembly]:
    yield _one(own, f"{stored}.weight", (spec.hidden_size,))
    if spec.norm is Norm.LAYER:
        yield _one(f"{own}_bias", f"{stored}.bias", (spec.hidden_size,))


def _mlp(spec: ArchSpec, own: str, stored: str, size: int) -> Iterator[Assembly]:
    hidden = spec.hidden_size
    raising = _raising(spec.mlp)
    raised = len(raising) * size
    parts = [SourceTensor(f"{stored}.{name}.weight", (size, hidden)) for name in raising]
    if spec.family is ConfigFamily.PHI3:
        parts = [SourceTensor(f"{stored}.gate_up_proj.weight", (raised, hidden))]
    yield _joined(f"{own}.up", (raised, hidden), parts)
    yield _one(f"{own}.down", f"{stored}.down_proj.weight", (hidden, size))
    if spec.has_mlp_bias:
        yield _joined(f"{own}.up_bias", (raised,), [SourceTensor(f"{stored}.{name}.bias", (size,)) for name in raising])
        yield _one(f"{own}.down_bias", f"{stored}.down_proj.bias", (hidden,))


def _moe(spec: ArchSpec, moe: MoeSpec, own: str, stored: str) -> Iterator[Assembly]:
    is_mixtral = spec.family is ConfigFamily.MIXTRAL
    usual = f"{stored}.block_sparse_moe" if is_mixtral else f"{stored}.mlp"
    fused = f"{stored}.mlp.experts"
    raising, lowering = (("w1", "w3"), "w2") if is_mixtral else (_raising(spec.mlp), "down_proj")
    count, size, hidden = moe.moe_experts, moe.size, spec.hidden_size
    raised = len(raising) * size
    gate_shape = (count, hidden)
    gates = dict.fromkeys((f"{usual}.gate.weight", f"{stored}.mlp.gate.weight"))
    yield Assembly(f"{own}.gate", gate_shape, tuple((SourceTensor(name, gate_shape),) for name in gates))

    def of_each(names: Sequence[str], kind: str, shape: Shape) -> tuple[SourceTensor, ...]:
        return tuple(SourceTensor(f"{usual}.experts.{j}.{name}.{kind}", shape) for j in range(count) for name in names)

    def assembly(name: str, shape: Shape, each: tuple[SourceTensor, ...], together: str) -> Assembly:
        return Assembly(f"{own}.experts.{name}", shape, (each, (SourceTensor(f"{fused}.{together}", shape),)))

    up_name = "gate_up_proj" if spec.mlp.is_gated else "up_proj"
    yield assembly("up", (count, raised, hidden), of_each(raising, "weight", (size, hidden)), up_name)
    yield assembly("down", (count, hidden, size), of_each([lowering], "weight", (hidden, size)), "down_proj")
    if spec.has_mlp_bias:
        yield assembly("up_bias", (count, raised), of_each(raising, "bias", (size,)), f"{up_name}_bias")
        yield assembly("down_bias", (count, hidden), of_each([lowering], "bias", (hidden,)), "down_proj_bias")


def _raising(mlp: Mlp) -> tuple[str, ...]:
    return ("gate_proj", "up_proj") if mlp.is_gated else ("up_proj",)


def _one(name: str, stored: str, shape: Shape) -> Assembly:
    return Assembly(name, shape, ((SourceTensor(stored, shape),),))


def _joined(name: str, shape: Shape, parts: Sequence[SourceTensor]) -> Assembly:
    return Assembly(name, shape, (tuple(parts),))
