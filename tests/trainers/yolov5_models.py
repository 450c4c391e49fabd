"""Checkpoints as YOLOv5's own repository writes them: its classes by their names there, and a head with anchors.

Its code cannot be installed beside ultralytics' package, so the few layers here are ours. The file has the
repository's format: a pickled ``models.yolo.DetectionModel`` of half floats under ``model``, with names and options.
"""

import sys
from types import ModuleType

import torch
from torch import nn

from tests.trainers.ultralytics_models import LABELS


class Conv(nn.Module):
    def __init__(self, taken, given):
        super().__init__()
        self.conv = nn.Conv2d(taken, given, 3, 2, 1, bias=False)
        self.bn = nn.BatchNorm2d(given)


class Detect(nn.Module):
    def __init__(self, label_count, channels):
        super().__init__()
        self.register_buffer("anchors", torch.rand(len(channels), 3, 2))
        self.m = nn.ModuleList(nn.Conv2d(each, 3 * (5 + label_count), 1) for each in channels)


class DetectionModel(nn.Module):
    def __init__(self, names):
        super().__init__()
        self.model = nn.Sequential(Conv(3, 16), Conv(16, 32), Detect(len(names), (16, 32)))
        self.names, self.yaml = names, {"nc": len(names), "depth_multiple": 0.33, "width_multiple": 0.25}
        self.stride = torch.tensor([2.0, 4.0])


PLACES = {"models.common": (Conv,), "models.yolo": (Detect, DetectionModel)}  # of the repository's classes


def save(file, names=LABELS):
    """best.pt, as train.py strips it at its end."""
    model = DetectionModel(list(names)).half()
    modules = {"models": ModuleType("models")} | {place: ModuleType(place) for place in PLACES}
    before = {kind: kind.__module__ for kinds in PLACES.values() for kind in kinds}
    for place, kinds in PLACES.items():
        for kind in kinds:
            setattr(modules[place], kind.__name__, kind)
            kind.__module__ = place
    sys.modules |= modules
    try:
        torch.save({"epoch": -1, "model": model, "ema": None, "optimizer": None, "opt": {"imgsz": 640}}, file)
    finally:
        for kind, place in before.items():
            kind.__module__ = place
        for place in modules:
            del sys.modules[place]
