"""The experts of a line as rows, for people and scripts: `coserve experts list`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from agent.deployment.packed_copies import packed_manifests
from agent.deployment.profile_in_use import find_profile, scaled_experts, usage_of
from experts.errors import ConfigError
from experts.packed.sources import is_there, size_bytes_of
from experts.sizes import mib

if TYPE_CHECKING:
    from collections.abc import Iterable

    from agent.config import LineConfig
    from agent.device_profile.records import StoredProfile
    from experts.packed.manifests import Manifest


log = logging.getLogger(__name__)


def packed_bytes(manifests: Iterable[Manifest]) -> int:
    """Size of all packed files of an expert; segments shared with others count in full."""
    return sum(segment.size_bytes for manifest in manifests for segment in manifest.packed.segments)


def expert_rows(config: LineConfig) -> list[dict[str, Any]]:
    """One row per expert, the most used first. ``usage``: the device profile's, computed without one; ``size_bytes``:
    what is packed; ``weights_bytes``: the file or directory it comes from. None: not there."""
    manifests = packed_manifests(config)
    profile = _profile(config)
    usage, scaled = usage_of(config, profile), scaled_experts(profile)
    graph = config.catalog.graph
    rows = [
        {
            "expert": name,
            "architecture": expert.architecture,
            "labels": list(expert.labels),
            "weights": str(expert.weights),
            "size_bytes": packed_bytes(manifests[name]) if manifests[name] else None,
            "weights_bytes": size_bytes_of(expert) if is_there(expert) else None,
            "usage": round(usage[name], 6),
            "routes": [
                *(route for route in config.catalog.components if name in graph.experts_of(route)),
                *(route for route, texts in config.catalog.texts.items() if name in texts.experts),
            ],
            "pin": expert.pin,
            "shadow": graph.shadows.get(name),
            "scaled_decoding": name in scaled,
        }
        for name, expert in config.catalog.experts.items()
    ]
    return sorted(rows, key=lambda row: (-float(str(row["usage"])), str(row["expert"])))


def print_experts(rows: list[dict[str, Any]]) -> None:
    table = Table("expert", "architecture", "packed", "usage", "labels", "routes", box=None, header_style="bold")
    for row in rows:
        size = "not yet" if row["size_bytes"] is None else mib(row["size_bytes"])
        size += ", weights MISSING" if row["weights_bytes"] is None else ""
        pin = " (pinned)" if row["pin"] else ""
        shadow = f", {row['shadow']} in its shadow" if row["shadow"] else ""
        shadow += ", JPEGs decoded smaller" if row["scaled_decoding"] else ""
        labels, routes = ", ".join(row["labels"]), ", ".join(row["routes"])
        table.add_row(row["expert"] + pin, row["architecture"], size, f"{row['usage']:.4f}", labels, routes + shadow)
    Console(width=160 if not Console().is_terminal else None).print(table)


def _profile(config: LineConfig) -> StoredProfile | None:
    try:
        return find_profile(config)
    except ConfigError as error:
        log.warning("usage_computed without the device profile: %s", error)
        return None
