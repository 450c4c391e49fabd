"""Manifests of packed experts and their sources, one JSON file per expert and precision.

A manifest that cannot be understood counts as absent: the expert is packed again. A power cut leaves the old or the
new one.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from experts.calibrations import path_of
from experts.filesystem import whole_file
from experts.packed.weights import Blocks, PackedExpert, Segment, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class PackedSource:
    """Source of a packed expert. Its stamp spares hashing it at every start."""

    sha256: str
    stamp: str  # see experts.packed.sources
    recipe: str  # of the packed bytes: format, architecture, stem, labels
    names: tuple[str, ...] | None = None  # labels in the file, if any; None: packed by an earlier version


@dataclass(frozen=True, slots=True)
class Manifest:
    """One packed expert, its source, and the sha256 of each tensor by name, by which shared ones are found.

    Tensors in blocks have none: their segments are compared as a whole.
    """

    packed: PackedExpert
    source: PackedSource
    tensor_sha256: Mapping[str, str]


class ManifestFolder:
    """The manifests of one line, by expert and precision."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def path(self, expert: str, precision: str) -> Path:
        return path_of(self._directory, expert, f".{precision}.json")

    def read(self, expert: str, precision: str) -> Manifest | None:
        """None where there is no manifest, or none that can be understood."""
        found = _read(self.path(expert, precision))
        is_own = found is not None and (found.packed.expert, found.packed.precision) == (expert, precision)
        return found if is_own else None

    def write(self, manifest: Manifest) -> None:
        path = self.path(manifest.packed.expert, manifest.packed.precision)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path, has_rivals=True) as file:
            file.write(json.dumps(asdict(manifest), separators=(",", ":")).encode())

    def delete(self, expert: str, precision: str) -> None:
        self.path(expert, precision).unlink(missing_ok=True)

    def read_all(self) -> list[Manifest]:
        """Manifests that can be understood, in the order of their paths."""
        found = (_read(path) for path in sorted(self._directory.rglob("*.json")))
        return [manifest for manifest in found if manifest is not None]


def _read(path: Path) -> Manifest | None:
    try:
        document = json.loads(path.read_bytes())
        packed = dict(document["packed"])
        packed["own"] = _segment(packed["own"])
        packed["shared"] = tuple(_segment(shared) for shared in packed["shared"])
        source = PackedSource(**document["source"])
        source = source if source.names is None else replace(source, names=tuple(source.names))
        return Manifest(PackedExpert(**packed), source, dict(document["tensor_sha256"]))
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError):  # absent, or of another version
        return None


def _segment(document: dict[str, Any]) -> Segment:
    tensors = tuple(
        TensorSpec(spec["name"], spec["dtype"], tuple(spec["shape"]), tuple(spec["stride"]), spec["offset_bytes"])
        for spec in document["tensors"]
    )
    found = document.get("blocks")  # absent in manifests from before there were any
    blocks = None if found is None else Blocks(found["size_bytes"], tuple(found["sha256"]))
    return Segment(document["sha256"], document["size_bytes"], tensors, blocks)
