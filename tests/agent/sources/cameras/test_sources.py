"""The contract of picture sources, the behaviour of each kind, and the page about cameras."""

import importlib.util
import io
import re
import resource
import shutil
import time
from collections import deque
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import av
import cv2
import numpy as np
import pytest
import yaml

from agent.faults.errors import CameraFailed
from agent.line_file.boards import LayoutSections
from agent.line_file.intake import CAMERA_SCHEMES, CameraSection
from agent.sources.cameras.grabber import encode
from agent.sources.cameras.pictures.capture import whole_jpeg
from agent.sources.cameras.pictures.genicam import pixels_of, producers_in
from agent.sources.cameras.pictures.source import CameraConnection
from agent.sources.cameras.supervision import CameraState
from experts.expert import Orientation
from experts.images import decode_image, read_image
from tests.agent.sources.cameras.fault import source_of
from tests.agent.sources.cameras.stand_ins import WAIT_S, MjpegCamera, TlsFront, picture

NOTHING = "127.0.0.1:1"  # nobody listens there
has_genicam = importlib.util.find_spec("harvesters") is not None


def connection(url, open_timeout_s=WAIT_S, **given):
    return CameraConnection(url=url, open_timeout_s=open_timeout_s, stall_timeout_s=5.0, max_pixels=10**7, **given)


def opened(url, **given):
    source = source_of(connection(url, **given))
    source.open(time.monotonic() + WAIT_S)
    return source


def next_picture(source):
    deadline = time.monotonic() + WAIT_S
    while (found := source.read(time.monotonic() + 1)) is None:
        assert time.monotonic() < deadline
    return found.picture


def pixels(found):
    return read_image(encode(found, 10**7), "a picture")


@pytest.fixture(params=["clip", "mjpeg", "rtsp", "virtual_genicam", "failing"])
def url(request):
    """One camera of each kind that can run on this machine."""
    made = request.getfixturevalue(request.param)
    if request.param in ("mjpeg", "failing"):
        return made.url
    return {"clip": f"file:{made}", "rtsp": f"{made}/h264"}.get(request.param, made)


@pytest.fixture
def virtual_genicam(monkeypatch):
    """The virtual camera of the genicam package, through the real harvesters."""
    if not has_genicam:
        pytest.skip("harvesters is not installed: pip install 'coserve[genicam]'")
    monkeypatch.setenv("GENICAM_GENTL64_PATH", str(Path(importlib.util.find_spec("genicam").origin).parent))
    return "genicam:1"


@pytest.fixture
def source(url):
    with closing(opened(url)) as one:
        yield one


class TestContract:
    def test_pictures_are_ones_that_an_expert_can_see(self, source):
        for _ in range(3):
            seen = pixels(next_picture(source))
            assert seen.dtype == np.uint8
            assert seen.shape in {(48, 64, 3), (400, 400, 3)}

    def test_picture_does_not_change_after_it_was_handed_out(self, source):
        first = next_picture(source)
        before = encode(first, 10**7)
        for _ in range(5):
            next_picture(source)
        assert encode(first, 10**7) == before

    def test_read_past_its_deadline_returns(self, source):
        next_picture(source)
        source.read(time.monotonic() - 1)  # whatever it says: that it returns is what is asked

    def test_source_may_be_closed_unopened_and_reopened(self, url):
        source_of(connection(url)).close()
        for _ in range(2):
            with closing(opened(url)) as one:
                next_picture(one)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("file:/no/such/clip.avi", "No such file"),
        (f"http://{NOTHING}/video", "connection refused"),
        (f"rtsp://{NOTHING}/video", "connection refused"),
        ("rtsp://no-such-host.invalid/video", "no host of the name"),
        ("v4l2:/dev/no-such-video", "plugged in"),
        ("unheard-of:", "nothing reads from"),
    ],
)
def test_source_that_cannot_be_opened_names_the_reason(url, words):
    with pytest.raises(CameraFailed, match=words):
        opened(url, open_timeout_s=5.0)


@pytest.mark.skipif(has_genicam, reason="harvesters is installed: nothing is missing")
def test_genicam_without_its_extra_names_the_extra():
    with pytest.raises(CameraFailed, match=r"coserve\[genicam\]"):
        opened("genicam:12345")


def test_genicam_error_lists_the_cameras_or_the_missing_producer(virtual_genicam, monkeypatch):
    with pytest.raises(CameraFailed, match="there are 0, 1, 2"):
        opened("genicam:12345")
    monkeypatch.setenv("GENICAM_GENTL64_PATH", "/no/such/folder")
    with pytest.raises(CameraFailed, match="no GenTL producer"):
        opened(virtual_genicam)


class TestClips:
    def test_clip_ends_for_good(self, clip):
        with closing(opened(f"file:{clip}", frames_per_s=1000.0)) as one:
            seen = [next_picture(one) for _ in range(10)]
            with pytest.raises(CameraFailed, match="loop: true") as told:
                next_picture(one)
        assert told.value.is_final
        assert [round(float(pixels(each).mean()) / 20) for each in seen] == list(range(1, 11))

    def test_looping_clip_begins_again(self, clip):
        with closing(opened(f"file:{clip}", frames_per_s=1000.0, loop=True)) as one:
            seen = [pixels(next_picture(one)) for _ in range(25)]
        assert np.array_equal(seen[0], seen[10])
        assert np.array_equal(seen[4], seen[24])

    @pytest.mark.parametrize(("frames_per_s", "period_s"), [(None, 1 / 50), (10.0, 1 / 10)])
    def test_clip_frames_never_come_early(self, clip, frames_per_s, period_s):
        with closing(opened(f"file:{clip}", frames_per_s=frames_per_s)) as one:
            began = time.monotonic()
            for _ in range(4):
                next_picture(one)
        assert time.monotonic() - began >= 3 * period_s - 0.005

    def test_clip_without_a_decodable_picture_is_an_error(self, tmp_path):
        path = tmp_path / "clip.avi"
        with closing(av.open(str(path), "w")) as clip:
            stream = clip.add_stream("mpeg4", rate=5)
            stream.width = stream.height = 64
            clip.mux(stream.encode(av.VideoFrame(64, 64, "yuv420p")))
            clip.mux(stream.encode(None))
        for content, words in (
            (path.read_bytes().replace(b"FMP4", b"ZZZZ"), "a codec that is known"),
            (b"no video", "not a video"),
        ):
            path.write_bytes(content)
            with pytest.raises(CameraFailed, match=words):
                opened(f"file:{path}")


class TestMotionJpeg:
    def test_mjpeg_frame_is_passed_through_unchanged(self, mjpeg):
        with closing(opened(mjpeg.url)) as one:
            seen = next_picture(one)
        assert any(seen == cv2.imencode(".jpg", picture(number))[1].tobytes() for number in range(1, 250))

    def test_ended_mjpeg_connection_is_an_error(self, mjpeg):
        with closing(opened(mjpeg.url)) as one:
            next_picture(one)
            mjpeg.word = "drop"
            with pytest.raises(CameraFailed, match="ended the stream"):
                list(iter(lambda: next_picture(one), None))  # what was sent before still comes

    def test_mjpeg_login_reaches_the_camera(self, mjpeg):
        mjpeg.word = "lock"
        login = {"user": "line", "password": "p@ss:word/?#"}
        opened(mjpeg.url, **login).close()
        assert mjpeg.login == "Basic bGluZTpwQHNzOndvcmQvPyM="  # line:p@ss:word/?#
        assert "p@ss" not in repr(connection(mjpeg.url, **login))

    @pytest.mark.parametrize(
        ("word", "scheme", "words"),
        [
            ("refuse", "http:", "404.*correct the path"),
            ("lock", "http:", "401.*user: and password"),
            ("stream", "rtsp:", "no video of this kind - correct the scheme"),
        ],
    )
    def test_error_of_the_camera_names_status_and_remedy(self, mjpeg, word, scheme, words):
        mjpeg.word = word
        with pytest.raises(CameraFailed, match=words):
            opened(mjpeg.url.replace("http:", scheme))

    def test_redirect_of_a_camera_is_not_followed(self, mjpeg):
        with closing(MjpegCamera()) as other:
            mjpeg.word, mjpeg.moved_to = "move", other.url
            with pytest.raises(CameraFailed):
                opened(mjpeg.url)
            assert other.viewers == 0

    def test_truncated_jpeg_is_dropped_and_a_padded_one_is_whole(self):
        whole = cv2.imencode(".jpg", picture(7))[1].tobytes()
        assert whole_jpeg(whole + bytes(5), 10**7) == whole
        assert [whole_jpeg(cut, 10**7) for cut in (whole[:-2], whole[2:], b"")] == [None] * 3

    def test_damaged_jpeg_frame_is_dropped(self):
        whole = cv2.imencode(".jpg", np.random.default_rng(1).integers(0, 255, (64, 64, 3), np.uint8))[1].tobytes()
        assert encode(whole, 10**7) == whole
        assert encode(whole[: len(whole) // 2] + whole[-2:], 10**7) is None
        assert whole_jpeg(without_tables(whole[:-900] + whole[-2:]), 10**7) is None

    def test_trailer_of_a_camera_is_no_part_of_its_frame(self):
        whole = cv2.imencode(".jpg", picture(7))[1].tobytes()
        assert whole_jpeg(whole + b"dhav\x59\x19\x01\x00", 10**7) == whole

    def test_jpeg_without_its_tables_is_decoded(self):
        whole = cv2.imencode(".jpg", picture(90))[1].tobytes()
        bare = without_tables(whole)
        assert b"\xff\xc4" not in bare
        seen = whole_jpeg(bare, 10**7)
        assert isinstance(seen, np.ndarray)
        assert np.array_equal(seen, cv2.imdecode(np.frombuffer(whole, np.uint8), cv2.IMREAD_COLOR))


class TestLargePictures:
    """Small files of many pixels, which take gigabytes once they are decoded."""

    @pytest.mark.parametrize("side", [4_000, 20_000], ids=["readable", "more than Pillow opens"])
    @pytest.mark.parametrize("has_tables", [True, False])
    def test_large_jpeg_is_refused_by_its_header_undecoded(self, side, has_tables):
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        jpeg = cv2.imencode(".jpg", picture(7))[1].tobytes()
        at = jpeg.index(b"\xff\xc0") + 5  # height and width
        large = jpeg[:at] + side.to_bytes(2) * 2 + jpeg[at + 4 :]
        read, sent = (encode, large) if has_tables else (whole_jpeg, without_tables(large))
        with pytest.raises(CameraFailed, match="max_pixels:, or lower"):
            read(sent, 10**7)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 40_000  # of 48 and 1,200 MB

    def test_large_video_is_refused_when_opened(self, clip):
        source = source_of(replace(connection(f"file:{clip}"), max_pixels=100))
        with (
            closing(source),
            pytest.raises(CameraFailed, match=r"frames of \d+ x \d+ pixels are more than max_pixels 100"),
        ):
            source.open(time.monotonic() + WAIT_S)

    def test_video_whose_frames_grow_beyond_max_pixels_is_not_decoded(self, tmp_path):
        with closing(grown(tmp_path / "grown.h264")) as source:
            source.open(time.monotonic() + WAIT_S)
            with pytest.raises(CameraFailed, match="640 x 640 pixels are more than max_pixels 4096"):
                deque(iter(lambda: source.read(time.monotonic() + 1), "never"), 0)


def grown(place):
    """A stream of H.264 whose second half has larger frames."""
    halves = []
    for side in (64, 640):
        with av.open(halves.append(io.BytesIO()) or halves[-1], "w", format="h264") as file:
            stream = file.add_stream("libx264", rate=25, width=side, height=side, pix_fmt="yuv420p")
            for shade in range(10):
                frame = av.VideoFrame.from_ndarray(np.full((side, side, 3), shade * 20, np.uint8), format="rgb24")
                file.mux(stream.encode(frame))
            file.mux(stream.encode())
    place.write_bytes(b"".join(half.getvalue() for half in halves))
    return source_of(replace(connection(f"file:{place}"), max_pixels=64 * 64))


def without_tables(jpeg):
    """A baseline JPEG whose Huffman tables, the standard's own, are left out."""
    kept, at = jpeg[:2], 2
    while jpeg[at + 1] != 0xDA:
        end = at + 2 + int.from_bytes(jpeg[at + 2 : at + 4])
        kept += b"" if jpeg[at + 1] == 0xC4 else jpeg[at:end]
        at = end
    return kept + jpeg[at:]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
class TestTls:
    """A camera whose certificate, of an authority of our own, is for localhost and 127.0.0.1."""

    @pytest.fixture(params=["mjpeg", "rtsp"])
    def plain(self, request):
        made = request.getfixturevalue(request.param)
        return made.url if request.param == "mjpeg" else f"{made}/h264"

    def sees(self, url, **given):
        with closing(opened(url, **given)) as one:
            return pixels(next_picture(one)).shape == (48, 64, 3)

    def test_camera_with_a_trusted_certificate_is_read(self, plain, authority, monkeypatch):
        with closing(TlsFront(authority, plain)) as front:
            assert self.sees(front.url, ca=str(authority / "ca.pem"))
            monkeypatch.setenv("SSL_CERT_FILE", str(authority / "ca.pem"))  # as the system's
            assert self.sees(front.url)

    @pytest.mark.parametrize(("host", "names_authority"), [("127.0.0.1", False), ("127.0.0.2", True)])
    def test_camera_with_an_untrusted_certificate_gets_no_password(self, plain, authority, host, names_authority):
        ca = str(authority / "ca.pem") if names_authority else None
        with closing(TlsFront(authority, plain, host)) as front:
            with pytest.raises(CameraFailed, match="no TLS connection - is its certificate for 127"):
                opened(front.url, ca=ca, user="line", password="secret")
            assert front.heard == 0
            assert self.sees(front.url, insecure_ok=True)


class TestEncoding:
    @pytest.mark.parametrize("shape", [(5, 7), (5, 7, 3)])
    def test_encoding_loses_nothing(self, shape):
        original = np.random.default_rng(1).integers(0, 255, shape).astype(np.uint8)
        decoded = cv2.imdecode(np.frombuffer(encode(original, 100), np.uint8), cv2.IMREAD_UNCHANGED)
        assert np.array_equal(decoded, original)

    def test_jpeg_is_encoded_as_it_is_and_a_large_one_refused(self):
        content = cv2.imencode(".jpg", picture(3))[1].tobytes()
        assert encode(content, 10_000) == content
        assert encode(content[: len(content) // 2], 10_000) is None
        for large in (content, picture(3)):
            with pytest.raises(CameraFailed, match="64 x 48 pixels are more than max_pixels 3000"):
                encode(large, 3000)


class TestGenicamPixels:
    @pytest.mark.parametrize(
        ("data_format", "rows", "seen"),
        [
            ("Mono8", np.array([[0, 1, 255]], np.uint8), [[0, 1, 255]]),
            ("RGB8", np.array([[1, 2, 3] * 2], np.uint8), [[[3, 2, 1]] * 2]),
            ("BGR8", np.array([[3, 2, 1] * 2], np.uint8), [[[3, 2, 1]] * 2]),
            ("RGBa8", np.array([[1, 2, 3, 9] * 2], np.uint8), [[[3, 2, 1]] * 2]),
        ],
    )
    def test_genicam_grey_is_scaled_and_colours_become_bgr_in_a_copy(self, data_format, rows, seen):
        found = np.asarray(pixels_of(rows, data_format, len(seen[0])))
        rows[:] = 0
        assert found.tolist() == seen

    @pytest.mark.parametrize("bits", [10, 12, 14, 16])
    def test_genicam_grey_of_more_than_8_bits_keeps_its_values_and_bits(self, bits):
        rows = np.array([[0, 1, 300, (1 << bits) - 1]], np.uint16)
        found = decode_image(encode(pixels_of(rows, f"Mono{bits}", 4), 100), "it")
        assert (found.pixels[:, :, 0].tolist(), found.bits) == (rows.tolist(), bits)
        assert found.turned(Orientation.STORED)[:, :, 0].tolist() == (rows >> (bits - 8)).tolist()

    @pytest.mark.parametrize("data_format", ["BayerRG8", "BayerGR8", "BayerGB8", "BayerBG8"])
    def test_genicam_bayer_mosaics_are_decoded_by_their_order(self, data_format):
        mosaic = np.zeros((8, 8), np.uint8)
        row, column = {"RG": (0, 0), "GR": (0, 1), "GB": (1, 0), "BG": (1, 1)}[data_format[5:7]]
        mosaic[row::2, column::2] = 200
        blue, green, red = np.moveaxis(np.asarray(pixels_of(mosaic, data_format, 8))[2:-2, 2:-2].astype(int), 2, 0)
        assert (blue.max(), green.max()) == (0, 0)
        assert red.min() == 200

    def test_unsupported_genicam_format_is_an_error_that_lists_the_supported_ones(self):
        with pytest.raises(CameraFailed, match=r"YUV422_8 - set its PixelFormat to one of Mono8"):
            pixels_of(np.zeros((2, 4), np.uint8), "YUV422_8", 2)

    def test_genicam_producers_are_found_in_folders_and_by_name(self, tmp_path):
        (tmp_path / "maker.cti").touch()
        (tmp_path / "readme.txt").touch()
        named = str(tmp_path / "maker.cti")
        assert producers_in([str(tmp_path), named, "/no/such/folder", ""]) == [tmp_path / "maker.cti"]


PAGE = Path(__file__).parents[4] / "docs" / "cameras.md"
TEXT = PAGE.read_text("utf-8")
EXAMPLES = [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)]
CAMERAS = [camera for example in EXAMPLES if isinstance(example, list) for camera in example]


@pytest.mark.parametrize("camera", CAMERAS, ids=lambda camera: str(camera["url"]))
def test_camera_of_the_page_is_valid_in_a_line_file(camera):
    CameraSection.model_validate(camera, context={"folder": Path("/line")})


def test_layout_of_the_page_is_valid():
    (layout,) = (LayoutSections.model_validate(example) for example in EXAMPLES if isinstance(example, dict))
    assert (layout.size, list(layout.parts)) == ((3000, 4000), ["R1", "R2"])


def test_each_kind_and_state_of_a_camera_is_on_the_page():
    assert [scheme for scheme in CAMERA_SCHEMES if f"`{scheme}:" not in TEXT] == []
    assert [state for state in CameraState if f"| {state} |" not in TEXT] == []
