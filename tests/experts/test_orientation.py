"""Orientation: what Pillow makes of the same EXIF entry, of pixels and of what is found in them."""

import io

import numpy as np
import pytest
from PIL import Image, ImageOps

from experts.expert import AnomalyMap, Orientation
from experts.images import TAG, decode_image, upright, upright_corners, upright_map
from tests.pictures import encoded

STORED = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)


def turned(orientation, form="PNG"):
    exif = Image.Exif()
    exif[TAG] = orientation
    return encoded(STORED, form, exif=exif)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_as_pillow_turns_it(orientation):
    content = turned(orientation)
    decoded = decode_image(content, "it")
    assert (decoded.pixels == STORED).all()
    assert (decoded.turned(Orientation.STORED) == STORED).all()
    with Image.open(io.BytesIO(content)) as image:
        assert (decoded.turned(Orientation.EXIF) == np.asarray(ImageOps.exif_transpose(image))).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_what_is_found_lies_where_it_is_seen(orientation):
    marked = np.zeros((4, 6), np.uint8)
    marked[1:3, 4:5] = 255
    seen = upright(marked, orientation)
    left, top, right, bottom = upright_corners((4, 1, 5, 3), 4, 6, orientation)
    assert (seen[top:bottom, left:right] == 255).all()
    assert (right - left) * (bottom - top) == 2
    shown = upright_map(AnomalyMap(4, 6, 0.0, 1.0, marked.tobytes()), orientation)
    assert ((shown.height, shown.width), shown.values) == (seen.shape, seen.tobytes())


def test_an_entry_that_is_not_defined_turns_nothing_nor_does_a_broken_exif_block():
    assert [decode_image(turned(each), "it").orientation for each in (0, 9, 60_000)] == [1, 1, 1]
    content = turned(6, "JPEG")
    start = content.index(b"Exif\x00\x00") + 6
    broken = content[:start] + b"\xff" * 12 + content[start + 12 :]
    assert decode_image(broken, "it").turned(Orientation.EXIF).shape == (4, 6, 3)
    tiff = decode_image(turned(6, "TIFF"), "it")  # Pillow turns it, and so it is for torchvision's loader, too
    assert (tiff.pixels.shape, tiff.orientation) == ((6, 4, 3), 1)
