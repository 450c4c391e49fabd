"""Check of a line file as ``serve`` reads it, and of what would leave an expert of it unserved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.config import line_of
from experts.errors import ConfigError, LoadError, WeightsCorrupt, WeightsMismatch, WeightsMissing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent.config import LineConfig
    from experts.document import Document


def checked_line(document: Document) -> LineConfig:
    """Raises ConfigError, with all ``problems``."""
    config = line_of(document)
    if problems := [*_weights_problems(config), *_cluster_problems(config)]:
        raise ConfigError.of(problems)
    return config


def _weights_problems(config: LineConfig) -> Iterator[ConfigError]:
    """Weights files of ONNX experts that cannot be served; ``serve`` goes on without these experts."""
    from experts.backends.onnx.layouts import require_served

    for name, expert in config.catalog.experts.items():
        if expert.architecture != "onnx":
            continue
        try:
            require_served(expert)
        except (WeightsMismatch, WeightsCorrupt) as error:
            yield config.document.error(error.message, "experts", name, "weights")
        except (WeightsMissing, LoadError):
            pass  # weights may come later


def _cluster_problems(config: LineConfig) -> Iterator[ConfigError]:
    """A cluster without the extra that it needs."""
    from agent.cluster.extra import why_absent

    if config.cluster.address is not None and (missing := why_absent()) is not None:
        yield config.document.error(missing, "cluster", "address")
