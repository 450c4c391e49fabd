"""Images: what is whole, what is refused, which pixels come out, and how EXIF turns them."""

import io
import os
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from experts.errors import ImageError, ImageTooLarge, ImageUnreadable
from experts.expert import AnomalyMap, Orientation
from experts.image_files.completeness import Completeness, completeness
from experts.images import (
    ENDINGS,
    FORMATS,
    TAG,
    decode_image,
    read_image,
    reduction,
    upright,
    upright_corners,
    upright_map,
    upright_size,
)  # fmt: skip
from tests.pictures import encoded

SIDE = 96
NOISE = np.random.default_rng(7).integers(1, 255, (SIDE, SIDE, 3), dtype=np.uint8)
WHOLE = {
    "png": encoded(NOISE, "PNG"), "jpeg": encoded(NOISE, "JPEG", quality=95),
    "jpeg-progressive": encoded(NOISE, "JPEG", quality=95, progressive=True),
    "bmp": encoded(NOISE, "BMP"), "tiff": encoded(NOISE, "TIFF"),
    "tiff-lzw": encoded(NOISE, "TIFF", compression="tiff_lzw"),
    "webp": encoded(NOISE, "WEBP", lossless=True),
}  # fmt: skip
LOSSLESS = ("png", "bmp", "tiff", "tiff-lzw", "webp")
STORED = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)


def judged(content):
    return completeness(io.BytesIO(content))


@pytest.mark.parametrize("name", WHOLE)
def test_whole_file_is_recognised_and_gives_its_pixels(name):
    assert judged(WHOLE[name]) is Completeness.WHOLE
    pixels = read_image(WHOLE[name], name)
    assert pixels.dtype == np.uint8
    assert pixels.shape == (SIDE, SIDE, 3)
    if name in LOSSLESS:
        assert np.array_equal(pixels, NOISE)


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("kept", [0.01, 0.5, 0.99, None], ids=str)
def test_cut_file_is_recognised_and_refused(name, kept):
    """None: all but its last two bytes."""
    content = WHOLE[name][: -2 if kept is None else int(len(WHOLE[name]) * kept)]
    assert judged(content) is Completeness.CUT
    with pytest.raises(ImageUnreadable):
        read_image(content, name)


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.8])
def test_preallocated_file_is_never_whole_while_its_end_is_zeros(name, kept):
    size = len(WHOLE[name])
    content = WHOLE[name][: int(size * kept)].ljust(size, b"\0")
    expected = {Completeness.CUT}
    if name in {"bmp", "tiff"} and kept:
        expected = {Completeness.ZERO_TAILED}  # could be black pixels
    assert judged(content) in expected


def test_black_images_are_readable_and_whole_unless_their_tail_is_zeros():
    black = np.zeros((512, 512, 3), np.uint8)
    content = encoded(black, "BMP")
    assert judged(content) is Completeness.ZERO_TAILED
    assert not read_image(content, "black.bmp").any()
    for image_format, options in (("PNG", {}), ("JPEG", {}), ("WEBP", {}), ("TIFF", {"compression": "tiff_lzw"})):
        assert judged(encoded(black, image_format, **options)) is Completeness.WHOLE


def test_too_many_pixels_are_refused_undecoded_and_too_many_bytes_unread(tmp_path):
    with pytest.raises(ImageTooLarge, match="96 x 96 pixels are more than max_pixels 9000") as caught:
        read_image(WHOLE["png"], "big.png", max_pixels=9000)
    assert caught.value.image == "big.png"
    for side in (10_000, 30_000):
        header = b"IHDR" + side.to_bytes(4, "big") * 2 + b"\x08\x02\x00\x00\x00"
        bomb = WHOLE["png"][:12] + header + zlib.crc32(header).to_bytes(4, "big") + WHOLE["png"][33:]
        with pytest.raises(ImageTooLarge):
            read_image(bomb, "bomb.png")
    (tmp_path / "bomb.png").write_bytes(bomb)
    with pytest.raises(ImageUnreadable, match="decompression bomb"):
        upright_size(tmp_path / "bomb.png")
    (tmp_path / "huge.png").touch()
    os.truncate(tmp_path / "huge.png", 50_000_000_000)
    with pytest.raises(ImageTooLarge, match="50000000000 bytes"):
        read_image(tmp_path / "huge.png", "huge.png")


def test_absent_file_folder_or_pipe_is_unreadable(tmp_path):
    pipe = tmp_path / "pipe.png"
    os.mkfifo(pipe)
    for path in (tmp_path / "absent.png", tmp_path, pipe):
        with pytest.raises(ImageUnreadable):
            read_image(path, path.name)


def test_grey_is_repeated_and_16_bits_are_scaled_from_their_full_range():
    grey16 = np.array([[0, 255, 256], [32768, 65280, 65535]], np.uint16)
    for image_format in ("PNG", "TIFF"):
        pixels = read_image(encoded(grey16, image_format), "grey16")
        assert pixels[:, :, 0].tolist() == [[0, 0, 1], [128, 255, 255]]
        assert np.array_equal(pixels[:, :, 0], pixels[:, :, 2])
    grey8 = np.arange(9, dtype=np.uint8).reshape(3, 3)
    assert np.array_equal(read_image(encoded(grey8, "PNG"), "grey8")[:, :, 1], grey8)


def test_palettes_and_alpha_become_their_stored_colours():
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 10, 20, 30])
    for options in ({}, {"transparency": b"\xff\x00"}, {"transparency": 1}):
        assert read_image(encoded(image, **options), "palette")[0, 0].tolist() == [10, 20, 30]
    clear = np.zeros((2, 2, 4), np.uint8)
    clear[:, :, 0] = 200
    assert read_image(encoded(clear, "PNG"), "alpha")[:, :, 0].min() == 200


@pytest.mark.parametrize("mode", ["1", "LA", "CMYK", "YCbCr"])
def test_other_colour_modes_become_rgb(mode):
    image_format = {"CMYK": "TIFF", "YCbCr": "JPEG"}.get(mode, "PNG")
    assert read_image(encoded(Image.new(mode, (40, 30)), image_format), mode).shape == (30, 40, 3)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "the file is empty"),
        (b"hello, world", "not an image in any of PNG"),
        (encoded(NOISE, "GIF"), "not an image in any of PNG"),
        (encoded(np.ones((4, 4), np.float32), "TIFF"), "floating-point pixels: export the image with 8 or 16 bits"),
        (encoded(np.full((4, 4), 70_000, np.int32), "TIFF"), "32-bit pixels: export the image with 8 or 16 bits"),
        (encoded(NOISE, "TIFF", save_all=True, append_images=[Image.fromarray(NOISE)]), "holds 2 images"),
    ],
    ids=["empty", "text", "another format", "floats", "32 bits", "several images"],
)
def test_unsupported_content_is_refused_with_its_reason(content, reason):
    with pytest.raises(ImageUnreadable, match=reason):
        read_image(content, "it")


@given(
    name=st.sampled_from(sorted(WHOLE)),
    flips=st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), min_size=1, max_size=12),
    in_header=st.booleans(),
)
def test_broken_bytes_are_pixels_or_an_image_error(name, flips, in_header):
    content = bytearray(WHOLE[name])
    reach = 200 if in_header else len(content)
    for where, value in flips:
        content[int(where * reach)] = value
    judged(bytes(content))
    try:
        pixels = read_image(bytes(content), name, max_pixels=1_000_000)
    except ImageError:
        return
    assert pixels.dtype == np.uint8


@pytest.mark.parametrize(
    ("size", "least", "expected"),
    [
        ((800, 1600), None, 1), ((800, 1600), (100, 100), 8), ((800, 1600), (101, 100), 4),
        ((800, 1600), (100, 900), 1), ((800, 1600), (400, 800), 2), ((90, 90), (100, 100), 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_jpeg_is_decoded_smaller_but_never_below_the_least_size(size, least, expected, mode):
    content = encoded(Image.fromarray(np.zeros((*size, 3), np.uint8)).convert(mode), "jpeg")
    decoded = decode_image(content, "it", least=least)
    assert decoded.reduction == expected == reduction(*size, least)
    assert (decoded.height, decoded.width) == size
    assert decoded.pixels.shape == (-(-size[0] // expected), -(-size[1] // expected), 3)
    assert decoded.serves(least)
    assert decoded.serves(None) == (expected == 1)
    assert decode_image(WHOLE["png"], "it", least=(10, 10)).pixels.shape == (SIDE, SIDE, 3)  # as all other formats


def test_image_endings_are_pillows_for_the_supported_formats():
    assert {ending for ending, kind in Image.registered_extensions().items() if kind in {*FORMATS, "DIB"}} == ENDINGS


def turned(orientation, form="PNG"):
    exif = Image.Exif()
    exif[TAG] = orientation
    return encoded(STORED, form, exif=exif)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_image_is_turned_as_pillow_turns_it(orientation):
    content = turned(orientation)
    decoded = decode_image(content, "it")
    assert (decoded.pixels == STORED).all()
    assert (decoded.turned(Orientation.STORED) == STORED).all()
    with Image.open(io.BytesIO(content)) as image:
        assert (decoded.turned(Orientation.EXIF) == np.asarray(ImageOps.exif_transpose(image))).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_box_and_map_are_turned_with_their_image(orientation):
    marked = np.zeros((4, 6), np.uint8)
    marked[1:3, 4:5] = 255
    seen = upright(marked, orientation)
    left, top, right, bottom = upright_corners((4, 1, 5, 3), 4, 6, orientation)
    assert (seen[top:bottom, left:right] == 255).all()
    assert (right - left) * (bottom - top) == 2
    shown = upright_map(AnomalyMap(4, 6, 0.0, 1.0, marked.tobytes()), orientation)
    assert ((shown.height, shown.width), shown.values) == (seen.shape, seen.tobytes())


def test_undefined_orientation_or_broken_exif_turns_nothing():
    assert [decode_image(turned(each), "it").orientation for each in (0, 9, 60_000)] == [1, 1, 1]
    content = turned(6, "JPEG")
    start = content.index(b"Exif\x00\x00") + 6
    broken = content[:start] + b"\xff" * 12 + content[start + 12 :]
    assert decode_image(broken, "it").turned(Orientation.EXIF).shape == (4, 6, 3)
    tiff = decode_image(turned(6, "TIFF"), "it")  # Pillow turns it, and so it is for torchvision's loader, too
    assert (tiff.pixels.shape, tiff.orientation) == ((6, 4, 3), 1)
