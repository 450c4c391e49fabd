"""What int8 weights save, and what they change: a model's matrices in a byte a number, against the same in bf16.

The weights are random, which is hard on quantisation: nothing that was learned makes one token much likelier than all
others. What a trained model loses is told by `coserve profile` on the line's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from experts.llm.checkpoint import open_checkpoint
from experts.llm.config import read_spec
from experts.llm.model import Model
from experts.llm.quant import Int8Tensors, weight_bytes
from profiler.targets import Target
from proof.llm.difference import output_difference
from proof.llm.part import Part
from proof.llm.random_models import write_random_model
from proof.llm.text_jobs import mixed_lengths

if TYPE_CHECKING:
    from pathlib import Path

    from proof.llm.random_models import QwenShape

TEXTS = 8
TARGET_MEMORY = 0.55  # of bf16: half, and what is not quantised


def measure_int8(folder: Path, shape: QwenShape) -> Part:
    """Bytes of both forms, and how far what they say differs."""
    directory = write_random_model(folder / f"int8-{shape.name}", shape)
    spec = read_spec(directory, shape.name)
    tensors = open_checkpoint(directory, shape.name, spec).read_all(torch.bfloat16)
    quantised = Int8Tensors(tensors)
    held = {name: quantised[name] for name in quantised}
    share = weight_bytes(held.values()) / weight_bytes(tensors.values())
    texts = [job.prompt for job in mixed_lengths(TEXTS, shape.vocabulary)]
    difference = output_difference(Model(spec, tensors), Model(spec, held), texts)
    target = Target("int8 weights, of their size in bf16", f"at most {TARGET_MEMORY:.0%}", f"{share:.1%}",
                    share <= TARGET_MEMORY)  # fmt: skip
    figures = {"share": share, "relative_error": difference.relative_error, "same_best": difference.same_best,
               "divergence": difference.divergence}  # fmt: skip
    return Part("int8", (target,), figures, (f"int8 against bf16, random weights: {difference}",))
