"""Checkpoints as trainers write them."""

from __future__ import annotations

import pytest
import torch
from PIL import Image, ImageDraw

LABELS = ("aligned", "shifted", "tilted")


def draw_dataset(folder):
    """A data set of ultralytics': a few pictures with a square on each, and where it is."""
    for part in ("train", "val"):
        (folder / "images" / part).mkdir(parents=True)
        (folder / "labels" / part).mkdir(parents=True)
        for number in range(4):
            image = Image.new("RGB", (64, 64), (30, 90 + 10 * number, 40))
            ImageDraw.Draw(image).rectangle((16, 16, 47, 40 + number), fill=(200, 200, 60 * (number % 3)))
            image.save(folder / "images" / part / f"{number}.png")
            (folder / "labels" / part / f"{number}.txt").write_text(f"{number % 3} 0.5 0.45 0.5 0.4\n")
    names = "".join(f"  {number}: {label}\n" for number, label in enumerate(LABELS))
    (folder / "data.yaml").write_text(f"path: {folder}\ntrain: images/train\nval: images/val\nnames:\n{names}")
    return folder / "data.yaml"


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The folder of ultralytics' weights after one epoch: best.pt, and last.pt as it is while training goes on."""
    from ultralytics import YOLO

    folder = tmp_path_factory.mktemp("ultralytics")
    model = YOLO("yolov8n.yaml", verbose=False)
    kept = folder / "unfinished.pt"
    model.add_callback("on_model_save", lambda trainer: kept.write_bytes(trainer.last.read_bytes()))
    with torch.random.fork_rng():
        model.train(
            data=str(draw_dataset(folder / "data")), epochs=1, imgsz=64, batch=4, device="cpu", workers=0, plots=False,
            val=False, project=str(folder), name="run", verbose=False, seed=0, amp=False,
        )  # fmt: skip
    (folder / "best.pt").write_bytes(model.trainer.best.read_bytes())
    return folder
