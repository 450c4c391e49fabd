"""Iterations of single tokens of one model as CUDA graphs: one for each bucket of rows and of blocks.

Rows added to fill a bucket repeat the first row: they read what it reads, and store in its place what it stores, up to
rounding. So they need no block of their own, and change no other row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from experts.llm.arenas.blocks import BatchOfBlocks
from experts.llm.attention import Attention
from experts.llm.dispatch import MlpWeights
from experts.llm.layer_weights import FeedForwardWeights
from experts.llm.model import run_layers, run_steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from experts.devices.graphs import DeviceGraphs
    from experts.llm.attention import BatchKeyValues
    from experts.llm.model import LanguageModel
    from experts.llm.token_batch import TokenBatch

MOST_ROWS = 64  # products of more rows take longer than their launches


def hidden_by(graphs: DeviceGraphs, model: LanguageModel, batch: TokenBatch, reserved: BatchKeyValues) -> Tensor:
    """Hidden states of one model's tokens behind the last layer, by a graph if there is one."""

    def run(_: int, step: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
        return step(model, *inputs)

    def decode(token_ids: Tensor, positions: Tensor, *named: Tensor) -> Tensor:
        return run_steps(model, run, token_ids, positions, Attention(batch, blocks.at_inputs(*named)).run)

    if isinstance(reserved, BatchOfBlocks) and _is_captured(model, batch):
        blocks = reserved
        inputs = (batch.token_ids, batch.positions, *blocks.decode_inputs)
        shapes = [(_bucket(batch.count), *map(_bucket, each.shape[1:])) for each in inputs]
        if (hidden := graphs.run(model, decode, inputs, shapes, key=blocks.address)) is not None:
            return hidden[: batch.count]
    return run_layers(model, run, batch, reserved)


def _is_captured(model: LanguageModel, batch: TokenBatch) -> bool:
    """False for layers that ask the host: for lengths, or for moe_experts that a cache loads."""
    if batch.prefill_count or batch.count > MOST_ROWS or model.scopes is not None:
        return False
    layers = (part for part in model.parts if isinstance(part, FeedForwardWeights))
    return all(layer.experts is None or isinstance(layer.experts, MlpWeights) for layer in layers)


def _bucket(count: int) -> int:
    """The power of two that is as large, or the next."""
    return 1 << (count - 1).bit_length()
