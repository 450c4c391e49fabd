"""Run by the trainers' interpreter: `made_by_trainers.py GROUP FOLDER TURNED IMAGE...`; GROUP is quick or more.

One process makes all files of a group, because importing the trainers takes longer. FOLDER/NAME is filled by
made_by_NAME; FOLDER/shown.json has the height and width of TURNED as the trainers' loaders give it to their models.
"""

import json
import sys
from pathlib import Path

import made_by_anomalib
import made_by_lightning
import made_by_timm
import torch
from anomalib.data.utils.image import read_image
from timm.data import ImageDataset


def main(group, folder, turned, *images):
    torch.set_num_threads(1)
    for module in (made_by_anomalib, made_by_lightning, made_by_timm):
        own = folder / module.__name__.removeprefix("made_by_")
        own.mkdir()
        getattr(module, group)(own, images)
    shown, _ = ImageDataset(turned.parents[1])[0]
    sizes = {"timm": [shown.height, shown.width], "anomalib": list(read_image(turned).shape[:2])}
    (folder / "shown.json").write_text(json.dumps(sizes))


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))
