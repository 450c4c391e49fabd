"""Usage probabilities of moe_experts, counted while serving, kept in a file of each copy between starts.

Guarantees: what is read was written whole, for these very weights. A file that cannot be read or written is logged.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING
from urllib.parse import quote

from experts.filesystem import whole_file
from experts.llm.tiers.moe_experts import MoeExpert

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from agent.runtime.expert_copy import ExpertCopy

logger = logging.getLogger(__name__)
FOLDER = "moe-usage"


def read_usage(folder: Path, copy: ExpertCopy) -> dict[MoeExpert, float]:
    """Nothing for other weights."""
    try:
        found = json.loads(_file(folder, copy).read_bytes())
        rows = found["usage"] if found["weights"] == _weights(copy) else ()
        return {MoeExpert(int(layer), int(number)): float(share) for layer, number, share in rows}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning("moe_usage_unread copy=%s error=%s: it is counted anew", copy.name, error)
        return {}


def write_usage(folder: Path, copy: ExpertCopy, usage: Mapping[MoeExpert, float]) -> None:
    rows = [[one.layer, one.number, share] for one, share in usage.items()]
    try:
        folder.mkdir(exist_ok=True)
        with whole_file(_file(folder, copy)) as final:
            final.write(json.dumps({"weights": _weights(copy), "usage": rows}).encode())
    except OSError as error:
        logger.warning("moe_usage_unwritten copy=%s error=%s: it is counted anew", copy.name, error)


def _file(folder: Path, copy: ExpertCopy) -> Path:
    return folder / f"{quote(copy.name, safe='')}.json"


def _weights(copy: ExpertCopy) -> str:
    return " ".join(segment.sha256 for segment in copy.packed.moe_layers)
