"""Experts and decoded images that a trace needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from experts.images import read_image
from profiler.workload.generated_line import synthetic_pixels

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from experts.catalog import Catalog
    from profiler.workload.traces import TracedArrival


def experts_of(trace: Iterable[TracedArrival], catalog: Catalog) -> set[str]:
    """Every expert that a trace may need: named ones, and all on the routes of its components."""
    arrivals = tuple(trace)
    named = {arrival.expert for arrival in arrivals if arrival.expert is not None}
    components = {arrival.component for arrival in arrivals if arrival.component is not None}
    return named | {step.expert for component in components for step in catalog.graph.routes[component]}


def images_of(trace: Sequence[TracedArrival], catalog: Catalog) -> tuple[NDArray[np.uint8], ...]:
    """Decoded image of every arrival: its own, or a synthetic one of its first expert's input size.

    Each file is decoded once. Raises ImageError for one that cannot be.
    """
    decoded: dict[Path, NDArray[np.uint8]] = {}
    synthetic: dict[str, NDArray[np.uint8]] = {}
    images = []
    for arrival in trace:
        if arrival.image is not None:
            if arrival.image not in decoded:
                decoded[arrival.image] = read_image(arrival.image, str(arrival.image))
            images.append(decoded[arrival.image])
            continue
        expert = arrival.expert or catalog.graph.routes[str(arrival.component)][0].expert
        if expert not in synthetic:
            wanted = catalog.experts[expert].pixels
            chance = np.random.default_rng(list(expert.encode()))
            synthetic[expert] = synthetic_pixels(chance, wanted.height, wanted.width)
        images.append(synthetic[expert])
    return tuple(images)
