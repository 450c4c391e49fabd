"""Run by the trainers' interpreter: `shown_by_loaders.py FOLDER IMAGE` prints what timm and Anomalib show their models.

FOLDER holds the image in the folder of its class. JSON: height and width by loader.
"""

import json
import sys

from anomalib.data.utils.image import read_image
from timm.data import ImageDataset


def main(folder, image):
    shown, _ = ImageDataset(folder)[0]
    json.dump({"timm": [shown.height, shown.width], "anomalib": list(read_image(image).shape[:2])}, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
