"""Damaged files, as cameras and networks leave them: refused with the place where they stop; sound ones are read."""

import io
import re
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from experts.errors import ImageUnreadable
from experts.image_files.completeness import Completeness, completeness
from experts.images import decode_image, read_image
from tests.pictures import encoded

SIDE = 160
COARSE = np.random.default_rng(3).integers(0, 255, (12, 12, 3), dtype=np.uint8)
PICTURE = Image.fromarray(COARSE).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
END = b"\xff\xd9"


BASELINE = encoded(PICTURE, "JPEG", quality=92)
PROGRESSIVE = encoded(PICTURE, "JPEG", quality=92, progressive=True)
RESTARTS = encoded(PICTURE, "JPEG", quality=92, restart_marker_rows=1)
GREY = encoded(PICTURE.convert("L"), "JPEG", quality=92)
CMYK = encoded(PICTURE.convert("CMYK"), "JPEG", quality=92)
PNG = encoded(PICTURE, "PNG")


def scans(content):
    return [found.start() for found in re.finditer(b"\xff\xda", content)]


def middle(content):
    begun = scans(content)[0]
    return begun + (len(content) - begun) // 2


def half_lost(content):
    return content[: middle(content)] + END


def packet_lost(content, size=900):
    return content[: middle(content)] + content[middle(content) + size :]


def with_hole(content, start, size):
    return content[:start] + bytes(size) + content[start + size :]


def zeroed(content, size=500):
    return with_hole(content, middle(content), size)


def png_of(*parts):
    chunks = (
        len(data).to_bytes(4, "big") + name + data + zlib.crc32(name + data).to_bytes(4, "big") for name, data in parts
    )
    return PNG[:33] + b"".join(chunks)


ROWS = zlib.decompress(b"".join(PNG[at + 4 : at + 4 + int.from_bytes(PNG[at - 4 : at], "big")] for at in [37]))
SECOND_SCAN_ONLY = PROGRESSIVE[: scans(PROGRESSIVE)[2]] + PROGRESSIVE[scans(PROGRESSIVE)[4] :]
AT_ROW = rf"at row \d+ of {SIDE}"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (half_lost(BASELINE), AT_ROW), (half_lost(GREY), AT_ROW), (half_lost(RESTARTS), AT_ROW),
        (half_lost(CMYK), AT_ROW), (packet_lost(BASELINE), AT_ROW), (packet_lost(RESTARTS, 300), AT_ROW),
        (zeroed(BASELINE), AT_ROW), (packet_lost(PROGRESSIVE), r"at \d+ % of its data"),
        (SECOND_SCAN_ONLY, r"at \d+ % of its data"),
        (PROGRESSIVE[: scans(PROGRESSIVE)[1]] + END, "later scans are missing, 0 of 192 coefficients are complete"),
        (PROGRESSIVE[: scans(PROGRESSIVE)[-1]] + END, r"later scans are missing, \d+ of 192 coefficients"),
        (BASELINE[: middle(BASELINE)], f"the file is cut: its last bytes are missing, {AT_ROW}"),
        (with_hole(BASELINE, BASELINE.index(b"\xff\xdb") + 9, 30), "a table of its coefficients has zeros"),
        (BASELINE[:-2] + b"abc" * 7 + END, "extraneous bytes before marker 0xd9"),
    ],
    ids=[
        "half of the scan", "of a grey one", "with restarts", "of a CMYK one", "a packet", "a packet with restarts",
        "a packet of zeros", "a packet of a progressive one", "scans in the middle", "all scans but one",
        "the last scan", "the end", "divisors", "bytes too many",
    ],
)  # fmt: skip
def test_jpeg_that_lost_data_is_refused_with_the_place_despite_its_end_marker(content, reason):
    for least in (None, (16, 16)):  # also where it is decoded smaller
        with pytest.raises(ImageUnreadable, match=reason):
            decode_image(content, "it", least=least)


def mpo():
    return encoded(PICTURE, "MPO", save_all=True, append_images=[PICTURE.resize((32, 32))], quality=92)


SOS = BASELINE.index(b"\xff\xda")


@pytest.mark.parametrize(
    "content",
    [
        BASELINE + b"dhav\x59\x19\x01\x00", BASELINE + bytes(512), BASELINE + b"Image_UTC_DataSEFHj\0SEFT", mpo(),
        PROGRESSIVE + bytes(16), BASELINE[:-2] + bytes(7) + END,
        BASELINE[:11] + b"\x03" + BASELINE[12:], BASELINE[: SOS + 11] + b"\x00\x3e\x10" + BASELINE[SOS + 14 :],
        BASELINE[:20] + b"\xff\xe2\x00\x1aICC_PROFILE\0\x05\x02" + bytes(10) + BASELINE[20:],
    ],
    ids=["Dahua", "zeros", "Samsung", "MPO", "zeros progressive", "zeros inside", "revision", "scan", "profile"],
)  # fmt: skip
def test_sound_jpeg_with_a_trailer_or_odd_header_is_read(content):
    assert completeness(io.BytesIO(content)) is Completeness.WHOLE
    expected = Image.open(io.BytesIO(PROGRESSIVE if content.startswith(PROGRESSIVE) else BASELINE)).convert("RGB")
    assert np.array_equal(read_image(content, "it"), np.asarray(expected))


@pytest.mark.parametrize(
    "options", [{}, {"subsampling": 0}, {"progressive": True}, {"restart_marker_blocks": 3}], ids=str
)
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("smaller", [1, 2, 4, 8])
def test_pixels_of_a_jpeg_equal_pillows_bit_for_bit(options, mode, smaller):
    content = encoded(PICTURE.crop((0, 0, 151, 77)).convert(mode), "JPEG", quality=85, **options)
    with Image.open(io.BytesIO(content)) as image:
        if smaller > 1:
            image.draft(None, (151 // smaller, 77 // smaller))
        assert np.array_equal(
            decode_image(content, "it", least=(77 // smaller, 151 // smaller)).pixels, np.asarray(image.convert("RGB"))
        )


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (PNG[: len(PNG) // 2] + bytes(9) + PNG[len(PNG) // 2 + 9 :], r"between 0 and 9\d % of its data: a checksum"),
        (png_of((b"IDAT", zlib.compress(ROWS)[:9000]), (b"IEND", b"")), AT_ROW),
        (png_of((b"IDAT", zlib.compress(ROWS[: len(ROWS) // 2])), (b"IEND", b"")), f"stop at row 80 of {SIDE}"),
        (png_of((b"IDAT", zlib.compress(ROWS[: -1 - 3 * SIDE])), (b"IEND", b"")), f"stop at row 159 of {SIDE}"),
        (PNG[: len(PNG) // 2], "the file is cut"),
        (PNG[: len(PNG) // 2] + bytes(len(PNG) // 2), "the file is cut"),
    ],
    ids=["a wrong checksum", "data missing", "too few rows", "all but the last row", "cut", "its end not written yet"],
)
def test_damaged_png_is_refused_with_the_place(content, reason):
    with pytest.raises(ImageUnreadable, match=reason):
        read_image(content, "it")


@pytest.mark.parametrize(
    "content",
    [
        PNG + bytes(300),
        PNG + b"junk",
        encoded(PICTURE, "WEBP", lossless=True) + bytes(5000),
        encoded(Image.new("L", (9, 9)), "PNG"),
    ],
    ids=["PNG and zeros", "PNG and bytes", "WebP and zeros", "black rows"],
)
def test_trailing_bytes_and_black_rows_are_no_damage(content):
    assert completeness(io.BytesIO(content)) is Completeness.WHOLE
    expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
    assert np.array_equal(read_image(content, "it"), expected)


def test_hole_before_the_end_of_a_png_is_damage_and_no_growing_file():
    idat = 37 + 4 + int.from_bytes(PNG[33:37], "big")
    many = png_of(*((b"IDAT", each) for each in (PNG[41:9000], PNG[9000 : idat - 4])), (b"IEND", b""))
    for content in (many[: -12 - 300] + bytes(300) + many[-12:], with_hole(many, 8000, 2000), with_hole(many, 20, 60)):
        assert completeness(io.BytesIO(content)) in {Completeness.HOLED, Completeness.WHOLE}
        with pytest.raises(ImageUnreadable, match=r"is damaged between \d+ and \d+ % of its data: a ch"):
            read_image(content, "it")
    assert completeness(io.BytesIO(with_hole(many, 8000, 2000))) is Completeness.HOLED


def test_hole_in_a_jpeg_is_reported_where_it_begins():
    start = middle(BASELINE)
    with pytest.raises(ImageUnreadable, match=AT_ROW) as told:
        read_image(with_hole(BASELINE, start, 600), "it")
    assert 60 <= int(re.search(r"at row (\d+)", str(told.value))[1]) <= 88


@pytest.mark.parametrize("options", [{"quality": 90}, {"quality": 20}, {"lossless": True}], ids=str)
def test_webp_with_lost_data_is_damaged_and_a_sound_one_is_read(options):
    content = encoded(PICTURE, "WEBP", **options)
    expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
    assert np.array_equal(read_image(content, "it"), expected)
    with pytest.raises(ImageUnreadable, match="is damaged in its data"):
        read_image(with_hole(content, len(content) // 3, 200), "it")


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
@pytest.mark.parametrize("side", [1, 2, 16, 150])
def test_sound_webps_of_any_size_are_read(mode, side):
    for picture in (PICTURE.convert(mode).resize((side, side)), Image.new(mode, (side, side))):
        for options in ({"quality": 5}, {"quality": 100}, {"lossless": True}):
            assert read_image(encoded(picture, "WEBP", **options), "it").shape == (side, side, 3)


@pytest.mark.parametrize(
    ("order", "reason"),
    [("<", "its 16 bits go from white to black"), (">", "a TIFF whose layout of pixels is not read")],
)
def test_inverted_16_bit_image_is_refused(order, reason):
    pixels, tags = np.full((4, 4), 50_000, f"{order}u2").tobytes(), ((256, 4), (257, 4), (258, 16), (259, 1), (262, 0),
        (273, 8), (277, 1), (278, 4), (279, 32))  # fmt: skip
    entries = b"".join(struct.pack(f"{order}HHI", tag, 4, 1) + struct.pack(f"{order}I", value) for tag, value in tags)
    start = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", 8 + len(pixels))
    with pytest.raises(ImageUnreadable, match=reason):
        read_image(start + pixels + struct.pack(f"{order}H", len(tags)) + entries + bytes(4), "it")


@pytest.mark.parametrize("compression", ["tiff_lzw", "jpeg", "packbits", "tiff_adobe_deflate"])
def test_damaged_tiff_is_refused_and_trailing_zeros_are_accepted(compression):
    content = encoded(PICTURE, "TIFF", compression=compression)
    assert completeness(io.BytesIO(content + bytes(5000))) is Completeness.WHOLE
    assert np.array_equal(read_image(content + bytes(5000), "it"), read_image(content, "it"))
    for size in (300, 1500):
        with pytest.raises(ImageUnreadable, match=r"is damaged in part \d+ of"):
            read_image(with_hole(content, 3000, size), "it")
