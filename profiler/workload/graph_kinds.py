"""Kinds of ONNX graphs that can be generated, named by a command's options; loads no runtime."""

from __future__ import annotations

from enum import StrEnum


class GraphKind(StrEnum):
    """Kind of graph that is exported for an expert of architecture onnx."""

    DETECTOR = "detector"
    ANOMALY = "anomaly"
