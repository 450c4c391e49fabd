"""A JPEG with an EXIF orientation: this project decodes it for a trainer's models as that trainer's loader does."""

import json
from dataclasses import replace

import numpy as np
import pytest
from torchvision.datasets import ImageFolder
from ultralytics.cfg import get_cfg
from ultralytics.data.augment import LetterBox
from ultralytics.data.dataset import ClassificationDataset, YOLODataset
from ultralytics.data.loaders import LoadImagesAndVideos

from agent.config import read_line
from experts.backends import prepare
from experts.expert import Orientation
from experts.images import decode_image
from tests.trainers.conftest import STORED, UPRIGHT, turn
from tests.trainers.test_ultralytics import require_same
from tests.trainers.ultralytics_models import LABELS, SIZE, export, own_boxes, train

DECODERS = 4 / 255  # largest difference of two JPEG decoders, also after scaling


@pytest.fixture
def turned(tmp_path, images):
    return turn(images[1], tmp_path / "turned")


def test_torchvision_shows_the_stored_orientation(turned):
    image, _ = ImageFolder(turned.parents[1])[0]
    assert (image.height, image.width) == STORED
    assert (np.asarray(image) == decode_image(turned, "it").turned(Orientation.STORED)).all()


def test_timm_and_anomalib_show_the_stored_orientation(made_by):
    shown = json.loads((made_by() / "shown.json").read_text())
    assert shown == {"timm": list(STORED), "anomalib": list(STORED)}


def test_ultralytics_turns_what_it_predicts_and_trains_on(turned):
    ((_, (image,), _),) = LoadImagesAndVideos(str(turned))
    assert image.shape[:2] == UPRIGHT
    pixels = decode_image(turned, "it").turned(Orientation.EXIF)
    assert np.abs(image[..., ::-1].astype(int) - pixels).max() <= DECODERS * 255
    (turned.parent / "turned.txt").write_text("0 0.5 0.5 0.2 0.2\n")
    data = {"names": {0: "ok"}, "channels": 3}
    detection = YOLODataset(str(turned.parent), data=data, imgsz=96, hyp=get_cfg(), augment=False)
    assert detection.load_image(0)[1] == UPRIGHT  # its size before it was scaled


def test_ultralytics_turns_what_its_classifiers_see(turned):
    seen = []
    arguments = get_cfg(overrides={"imgsz": 32, "cache": False})
    dataset = ClassificationDataset(str(turned.parents[1]), arguments, augment=False)
    dataset.torch_transforms = lambda image: seen.append((image.height, image.width))
    dataset[0]
    assert seen == [UPRIGHT]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["best.pt", "best.onnx"])
def test_boxes_of_a_turned_image_equal_ultralytics(line, made_once, turned, form):
    def exported(folder):
        best = made_once("yolo11n", lambda inner: train("yolo11n", inner)) / "best.pt"
        if form == "best.onnx":
            export(best, folder / form, nms=False)
        else:
            (folder / form).write_bytes(best.read_bytes())

    file = made_once(f"turned-{form}", exported) / form
    line.add(file, "--pass", "aligned")
    (expert,) = read_line(line.file, {}).catalog.experts.values()
    assert expert.pixels.orientation is Orientation.EXIF
    (row,) = line.inspect([turned])
    (own,) = own_boxes(file, [turned])
    assert len(own)
    assert own.orig_shape == UPRIGHT
    require_same(row["boxes"], own)
    assert (len(LABELS), expert.pixels.height) == (3, SIZE)
    ((_, (image,), _),) = LoadImagesAndVideos(str(turned))
    seen = LetterBox((SIZE, SIZE), auto=False)(image=image)[..., ::-1].transpose(2, 0, 1) / 255
    decoded = decode_image(turned, "it")
    assert np.abs(prepare(expert, decoded).tensor.numpy() - seen).max() <= DECODERS
    stored = replace(expert, input=replace(expert.pixels, orientation=Orientation.STORED))
    assert np.abs(prepare(stored, decoded).tensor.numpy() - seen).max() > 10 * DECODERS
