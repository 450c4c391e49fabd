"""An empty line, filled by `coserve experts add`, and images to judge."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image, ImageDraw

from experts.images import TAG
from tests.commands import coserve

TRAINERS = Path(sys.prefix) / "trainers" / "bin" / "python"  # as `make trainers` installs it
STORED, UPRIGHT = (60, 100), (100, 60)  # height, width
BEGUN = "line: top-side\nstate: ./state\ndevice: cpu\nmemory: {host: 200MiB, workspace: 60MiB}\n"


class AddedTo:
    """A line file, filled by ``experts add``."""

    def __init__(self, folder):
        self.file = folder / "line.yaml"
        self.file.write_text(BEGUN)

    def add(self, file, *words):
        """Output of ``experts add --json``, for the component ``part``."""
        return json.loads(self.run("experts", "add", self.file, file, "--component", "part", "--json", *words))

    def inspect(self, images):
        """One row per image, of the component ``part``."""
        return json.loads(self.run("inspect", self.file, *images, "--component", "part", "--json"))["results"]

    def run(self, *words):
        return coserve(*words, check=0).stdout

    def refused(self, file, *words):
        """Message of ``experts add`` that refuses a file; the line's folder stays as it was."""
        before = self.file.read_bytes(), set(os.listdir(self.file.parent))
        done = coserve("experts", "add", self.file, file, "--component", "part", *words, check=1)
        assert (self.file.read_bytes(), set(os.listdir(self.file.parent))) == before
        return done.stderr


@pytest.fixture
def line(tmp_path):
    folder = tmp_path / "line"
    folder.mkdir()
    return AddedTo(folder)


@pytest.fixture(scope="session")
def images(made_once):
    return sorted(made_once("images", draw_images).iterdir())


def draw_images(folder):
    for number, (width, height) in enumerate(((64, 64), (80, 60), (48, 96), (128, 100))):
        structure = Image.effect_mandelbrot((width, height), (-3 + number / 3, -2.5, 2, 2.5), 100).convert("L")
        image = Image.merge("RGB", (structure, structure.rotate(90, expand=False), structure.point(lambda v: 255 - v)))
        ImageDraw.Draw(image).rectangle((8 + 4 * number, 8, width // 2, height // 2), fill=(200, 200, 60 * number))
        image.save(folder / f"{number}.png")


def turn(image, folder):
    """A JPEG with an EXIF orientation, in the folder of its class: STORED before it is turned, UPRIGHT after."""
    (folder / "ok").mkdir(parents=True)
    exif = Image.Exif()
    exif[TAG] = 6
    Image.open(image).resize(STORED[::-1]).save(folder / "ok" / "turned.jpg", quality=95, exif=exif)
    return folder / "ok" / "turned.jpg"


@pytest.fixture(scope="session")
def made_by(made_once, images):
    """The folder that a module made_by_NAME fills, run by the Python with timm, Lightning and Anomalib.

    ``group``: which of the module's functions makes what is wanted. Without a name: the folder of all of a group.
    """
    if not TRAINERS.exists():
        pytest.skip("timm, Lightning and Anomalib are not installed: make trainers")

    def made(name="", group="quick"):
        def make(folder):
            script, turned = Path(__file__).with_name("made_by_trainers.py"), turn(images[1], folder / "turned")
            done = subprocess.run(
                [TRAINERS, script, group, folder, turned, *images],
                cwd=folder, capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr

        return made_once(f"made-by-trainers-{group}", make) / name

    return made
