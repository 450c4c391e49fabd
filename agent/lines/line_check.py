"""Check of a line file as ``serve`` reads it, and of what would leave an expert of it unserved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.config import line_of
from experts.errors import BackendUnavailable, ConfigError, LoadError, TokenizerUnusable, WeightsError, WeightsMissing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent.config import LineConfig
    from experts.document import Document


def checked_line(document: Document) -> LineConfig:
    """Raises ConfigError, with all ``problems``."""
    config = line_of(document)
    if problems := [*weights_problems(config), *_cluster_problems(config)]:
        raise ConfigError.of(problems)
    return config


def weights_problems(config: LineConfig) -> Iterator[ConfigError]:
    """Weights that are there and cannot be served, by the headers that packing reads; ``serve`` goes on without these
    experts. A missing file may come later."""
    from experts.backends import backend_for
    from experts.packed.sources import is_there

    for name, expert in config.catalog.experts.items():
        try:
            backend_for(expert.architecture).check(expert)
        except (WeightsError, TokenizerUnusable) as error:
            if not isinstance(error, WeightsMissing) or is_there(expert):
                yield config.document.error(error.message, "experts", name, error.key)
        except BackendUnavailable as error:
            yield config.document.error(str(error), "experts", name, "architecture")
        except LoadError:
            pass  # the disk, which may come back


def _cluster_problems(config: LineConfig) -> Iterator[ConfigError]:
    """A cluster without the extra that it needs."""
    from agent.cluster.extra import why_absent

    if config.cluster.address is not None and (missing := why_absent()) is not None:
        yield config.document.error(missing, "cluster", "address")
