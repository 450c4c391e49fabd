"""Images of tests, as files of their formats."""

import io

import numpy as np
from PIL import Image


def encoded(image, form="PNG", **options):
    """``image``: pixels, or Pillow's."""
    file = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(file, form, **options)
    return file.getvalue()


def saved(file, colour=0, size=(8, 8)):
    """The file, an image of one colour; its folders are made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(file)
    return file
