"""Which ONNX graphs can be generated. Needs no runtime: a command's options name them."""

from __future__ import annotations

from enum import StrEnum


class GraphKind(StrEnum):
    """Kind of graph that is exported for an expert of architecture onnx."""

    DETECTOR = "detector"
    ANOMALY = "anomaly"
