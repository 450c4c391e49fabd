"""Writing of a trained model as the Hugging Face directory that ``experts.llm.checkpoint`` reads."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file

from experts.llm.checkpoint import SINGLE_NAME
from experts.llm.config import CONFIG_NAME, parse_spec
from experts.llm.names import assemblies

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch
    from torch import Tensor


def write_model(
    directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None
) -> None:
    """Write config.json, and the tensors in the family's usual form, in their own dtype or this one."""
    stored: dict[str, Tensor] = {}
    for assembly in assemblies(parse_spec(config, str(directory))):
        parts = assembly.forms[0]
        numbers = tensors[assembly.name].detach().to(dtype).flatten()
        split = numbers.split([math.prod(part.shape) for part in parts])
        stored |= {part.name: own.view(part.shape).clone() for part, own in zip(parts, split, strict=True)}
    save_file(stored, directory / SINGLE_NAME, metadata={"format": "pt"})
    (directory / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", "utf-8")
