"""A line file as it takes effect: every key with its value and where that comes from."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from agent.config import read_secret
from agent.sources.cameras.probe import probe
from experts.backends.onnx.layouts import require_served
from experts.errors import LoadError, WeightsCorrupt, WeightsMismatch, WeightsMissing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from agent.config import LineConfig, ResolvedKey
    from experts.errors import ConfigError

PROBE_S = 15.0


def silent_cameras(config: LineConfig) -> Iterator[str]:
    """Cameras that answered no frame, with the fault. Raises SecretMissing."""
    for camera in config.intake.cameras:
        password = None if camera.password is None else read_secret(camera.password)
        if (fault := probe(camera, password, PROBE_S)) is not None:
            yield f"camera {camera.name}: {fault}"


def weights_problems(config: LineConfig) -> Iterator[ConfigError]:
    """Weights files of ONNX experts that cannot be served; ``serve`` goes on without these experts."""
    for name, expert in config.catalog.experts.items():
        if expert.architecture != "onnx":
            continue
        try:
            require_served(expert)
        except (WeightsMismatch, WeightsCorrupt) as error:
            yield config.document.error(error.message, "experts", name, "weights")
        except (WeightsMissing, LoadError):
            pass  # weights may come later


def shown_lines(keys: Sequence[ResolvedKey]) -> Iterator[str]:
    width = max((len(_text(key)) for key in keys), default=0)
    for key in keys:
        yield f"{_text(key):<{min(width, 72)}}  # {key.origin}"


def shown_rows(keys: Sequence[ResolvedKey]) -> list[dict[str, Any]]:
    return [{"key": key.key, "value": _plain(key.value), "origin": key.origin} for key in keys]


def _text(key: ResolvedKey) -> str:
    value = _plain(key.value)
    return f"{key.key}: {value if isinstance(value, str) else json.dumps(value)}"


def _plain(value: object) -> Any:  # noqa: ANN401  # what JSON knows
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if isinstance(value, bool | int | float | None) else str(value)
