"""Checkpoints as trainers write them."""

from functools import partial

import pytest

from tests.trainers.ultralytics_models import train


@pytest.fixture(scope="session")
def trained(made_once):
    """The folder of ultralytics' weights after one epoch: best.pt, and last.pt as it is while training goes on."""
    return made_once("yolov8n", partial(train, "yolov8n"))
