"""Numbers of a GGUF file's blocks, in fp32: exactly those of ggml's reference code (ggml-quants.c).

A block has one scale in fp16, or scales of its parts, and a few bits for each number; ``_1`` and K formats also have
offsets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from experts.llm.gguf.header import NumberFormat

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NUMBERS_AT_ONCE = 2**18  # 1 MiB, which stays in a cache


def numbers_of(stored: bytearray, number_format: NumberFormat) -> Tensor:
    """Numbers of whole blocks, (n,) in fp32."""
    if number_format.name in PLAIN:
        return torch.frombuffer(stored, dtype=PLAIN[number_format.name]).float()
    blocks = torch.frombuffer(stored, dtype=torch.uint8).view(-1, number_format.block_bytes)
    read, numbers = READERS[number_format.name], torch.empty(len(blocks), number_format.numbers)
    at_once = NUMBERS_AT_ONCE // number_format.numbers
    for start in range(0, len(blocks), at_once):
        part = slice(start, start + at_once)
        numbers[part] = read(blocks[part]).flatten(1)
    return numbers.view(-1)


def _halves(block_bytes: Tensor) -> Tensor:
    return block_bytes.contiguous().view(torch.float16).float()


def _parts(packed: Tensor, bits: int, width: int, shift: int = 0) -> Tensor:
    """Numbers of so many bits, (n, parts, width): of each ``width`` bytes the lowest bits, then the next."""
    lanes = packed.reshape(len(packed), -1, width)
    parts = torch.stack([(lanes >> place) & (2**bits - 1) for place in range(0, 8, bits)], 2).flatten(1, 2)
    return parts << shift if shift else parts


def _fifth_bits(packed: Tensor) -> Tensor:
    """The highest of five bits, of 32 numbers in 4 bytes, in place."""
    return (((packed.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8)) & 1) << 4).flatten(1)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _halves(blocks[:, :2])


def _q4_0(blocks: Tensor) -> Tensor:
    return (_parts(blocks[:, 2:], 4, 16).flatten(1).float() - 8) * _halves(blocks[:, :2])


def _q4_1(blocks: Tensor) -> Tensor:
    return _parts(blocks[:, 4:], 4, 16).flatten(1).float() * _halves(blocks[:, :2]) + _halves(blocks[:, 2:4])


def _q5_0(blocks: Tensor) -> Tensor:
    numbers = _parts(blocks[:, 6:], 4, 16).flatten(1) | _fifth_bits(blocks[:, 2:6])
    return (numbers.float() - 16) * _halves(blocks[:, :2])


def _q5_1(blocks: Tensor) -> Tensor:
    numbers = _parts(blocks[:, 8:], 4, 16).flatten(1) | _fifth_bits(blocks[:, 4:8])
    return numbers.float() * _halves(blocks[:, :2]) + _halves(blocks[:, 2:4])


def _q4_k(blocks: Tensor) -> Tensor:
    return _scaled(_parts(blocks[:, 16:], 4, 32), blocks)


def _q5_k(blocks: Tensor) -> Tensor:
    return _scaled(_parts(blocks[:, 48:], 4, 32) | _parts(blocks[:, 16:48], 1, 32, shift=4), blocks)


def _scaled(numbers: Tensor, blocks: Tensor) -> Tensor:
    """``numbers``: (n, 8, 32). Eight scales and offsets of six bits each lie in the bytes 4 to 15."""
    low, middle, high = blocks[:, 4:16].reshape(-1, 3, 4).unbind(1)
    scales = torch.cat([low & 63, (high & 15) | ((low >> 2) & 48)], 1).float() * _halves(blocks[:, :2])
    offsets = torch.cat([middle & 63, (high >> 4) | ((middle >> 2) & 48)], 1).float() * _halves(blocks[:, 2:4])
    return numbers.float() * scales.unsqueeze(2) - offsets.unsqueeze(2)


def _q6_k(blocks: Tensor) -> Tensor:
    lower = _parts(blocks[:, :128], 4, 64).reshape(-1, 8, 32)
    numbers = (lower | _parts(blocks[:, 128:192], 2, 32, shift=4)).reshape(-1, 16, 16).float() - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float() * _halves(blocks[:, 208:])
    return numbers * scales.unsqueeze(2)


READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}  # fmt: skip
