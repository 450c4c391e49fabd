"""A JPEG with an EXIF orientation: this project decodes it for a trainer's models as that trainer's loader does."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets import ImageFolder
from ultralytics.cfg import get_cfg
from ultralytics.data.augment import LetterBox
from ultralytics.data.dataset import ClassificationDataset, YOLODataset
from ultralytics.data.loaders import LoadImagesAndVideos

from agent.config import read_line
from agent.runtime.images.preparation import prepare
from experts.expert import Orientation
from experts.images import TAG, decode_image
from tests.trainers.conftest import TRAINERS
from tests.trainers.test_ultralytics import require_same
from tests.trainers.ultralytics_models import LABELS, SIZE, export, own_boxes, train

STORED, UPRIGHT = (60, 100), (100, 60)  # height, width
DECODERS = 4 / 255  # largest difference of two JPEG decoders, also after scaling


@pytest.fixture
def turned(tmp_path, images):
    folder = tmp_path / "turned" / "ok"
    folder.mkdir(parents=True)
    exif = Image.Exif()
    exif[TAG] = 6
    Image.open(images[1]).resize(STORED[::-1]).save(folder / "turned.jpg", quality=95, exif=exif)
    return folder / "turned.jpg"


def test_torchvision_shows_what_is_stored(turned):
    image, _ = ImageFolder(turned.parents[1])[0]
    assert (image.height, image.width) == STORED
    assert (np.asarray(image) == decode_image(turned, "it").turned(Orientation.STORED)).all()


def test_timm_and_anomalib_show_what_is_stored(turned):
    if not TRAINERS.exists():
        pytest.skip("timm and Anomalib are not installed: make trainers")
    script = Path(__file__).with_name("shown_by_loaders.py")
    told = subprocess.run(
        [TRAINERS, script, turned.parents[1], turned], capture_output=True, text=True, check=True
    ).stdout
    assert json.loads(told.splitlines()[-1]) == {"timm": list(STORED), "anomalib": list(STORED)}


def test_ultralytics_turns_what_it_predicts_and_what_it_trains_on(turned):
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


@pytest.mark.parametrize("form", ["best.pt", "best.onnx"])
def test_boxes_of_a_turned_image_are_ultralytics_own(line, made_once, turned, form):
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
