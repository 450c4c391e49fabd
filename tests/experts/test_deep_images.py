"""Images of more than 8 bits: what becomes 0 to 255 is stated by the expert's input or by the file, never guessed."""

import io
import struct
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from agent.runtime.images.sources import EncodedImage, Frame, FramePart, decoded
from experts.backends import prepare
from experts.errors import ImageUnreadable
from experts.expert import Expert, InputSpec, Orientation
from experts.image_files.depth import deep_png
from experts.images import decode_image, read_image

VALUES = np.array([[0, 200, 1999, 2000], [2001, 3800, 3801, 4095]], np.uint16)


def expert(**depth):
    return Expert("cls/x", "resnet18", Path("x"), ("ok", "bad"), InputSpec(2, 4, "unit", **depth))


def encoded(values, image_format="PNG"):
    """As cameras' programs write values: nothing is stated."""
    return cv2.imencode(f".{image_format.lower()}", values if values.ndim == 2 else values[:, :, ::-1])[1].tobytes()


def seen(content, **depth):
    return decode_image(content, "it.png").seen_by(expert(**depth))[:, :, 0].tolist()


@pytest.mark.parametrize("image_format", ["PNG", "TIFF"])
def test_twelve_bits_in_16_are_refused_unless_the_key_declares_them(image_format):
    content = encoded(VALUES, image_format)
    with pytest.raises(ImageUnreadable, match=r"up to 4095, in 16 bits.*write `bits: 12`.* experts.cls/x.input"):
        prepare(expert(), decode_image(content, "it.png"))
    assert seen(content, bits=12) == [[0, 12, 124, 125], [125, 237, 237, 255]]
    assert seen(content, window=(200, 3800)) == [[0, 0, 127, 128], [128, 255, 255, 255]]
    tensor = prepare(expert(bits=12), decode_image(content, "it.png")).tensor
    assert np.allclose(tensor[1].numpy() * 255, VALUES >> 4)


def test_value_beyond_the_written_bits_is_refused():
    with pytest.raises(ImageUnreadable, match=r"values up to 4095, which are more than 10 bits: correct `bits`"):
        seen(encoded(VALUES), bits=10)


def test_used_16th_bit_shows_that_all_16_count():
    for values in (VALUES << 4, np.repeat((VALUES << 4)[:, :, None], 3, axis=2)):
        for image_format in ("PNG", "TIFF"):
            assert seen(encoded(values, image_format)) == (VALUES >> 4).tolist()
    with pytest.raises(ImageUnreadable, match="write `bits: 9`"):
        seen(encoded(VALUES >> 8))  # 0 to 15: a dark one of 8 bits, or of more


def test_bits_stated_by_the_file_count_and_a_contradiction_is_refused():
    content = deep_png(VALUES, 12)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(content))), VALUES << 4)
    assert seen(content) == seen(content, bits=12) == (VALUES >> 4).tolist()
    assert seen(content, window=(200, 3800))[0] == [0, 0, 127, 128]
    with pytest.raises(ImageUnreadable, match="its file states 12 bits, and `bits: 10` is written"):
        seen(content, bits=10)
    with pytest.raises(ImageUnreadable, match="its file states 12 bits, and the window goes up to 5000"):
        seen(content, window=(0, 5000))


def test_tiff_of_12_packed_bits_states_them():
    rows = b"".join(bytes([a >> 4, (a & 15) << 4 | b >> 8, b & 255]) for a, b in VALUES.reshape(-1, 2).tolist())
    tags = [(256, 3, 1, 4), (257, 3, 1, 2), (258, 3, 1, 12), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, 1, 8)]
    tags += [(277, 3, 1, 1), (278, 3, 1, 2), (279, 4, 1, len(rows))]
    entries = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    content = b"II*\0" + struct.pack("<I", 8 + len(rows)) + rows + struct.pack("<H", len(tags)) + entries + bytes(4)
    assert seen(content) == (VALUES >> 4).tolist()


@pytest.mark.parametrize("image_format", ["PNG", "TIFF"])
def test_colours_of_16_bits_keep_them_all(image_format):
    colours = np.stack([VALUES, VALUES // 2, VALUES // 4], axis=2)
    content = encoded(colours, image_format)
    found = decode_image(content, "it").seen_by(expert(bits=12))
    assert found.tolist() == (colours >> 4).tolist()
    with pytest.raises(ImageUnreadable, match="write `bits: 12`"):
        seen(content)


def test_parts_of_a_frame_are_scaled_for_each_expert():
    frame = Frame(EncodedImage(encoded(VALUES), "frame", 100), (2, 4))
    part = decoded(FramePart(frame, (1, 0, 3, 2), "R1"), "R1")
    assert part.seen_by(expert(bits=12))[:, :, 1].tolist() == (VALUES[:, 1:3] >> 4).tolist()
    assert part.seen_by(expert(window=(0, 4080)))[0, 0, 0] == 13
    with pytest.raises(ImageUnreadable, match=r"R1: its values go up to 3801"):
        part.seen_by(expert())


def test_eight_bit_image_is_used_unchanged_and_refused_for_a_window():
    content = encoded((VALUES >> 4).astype(np.uint8))
    assert seen(content) == seen(content, bits=12) == (VALUES >> 4).tolist()
    with pytest.raises(ImageUnreadable, match=r"it.png: 8 bits, of which `window: \[200, 3800\]` says nothing"):
        seen(content, window=(200, 3800))


def test_people_see_a_deep_image_without_stated_bits_and_turned():
    assert read_image(encoded(VALUES), "it")[:, :, 0].tolist() == (VALUES >> 4).tolist()  # by the brightest
    image = replace(decode_image(encoded(VALUES), "it"), orientation=6)
    assert image.turned(Orientation.EXIF).shape == (4, 2, 3)
    assert image.seen_by(expert(bits=12, orientation=Orientation.EXIF)).shape == (4, 2, 3)
