"""Fixtures: a clip, an MJPEG camera, a failing camera, an RTSP server, and takers of their frames."""

import subprocess
from pathlib import Path

import cv2
import pytest

from tests.agent.sources.cameras.stand_ins import SIZE, WAIT_S, FailingCamera, MjpegCamera, Taker, picture, section

SYSTEM_PYTHON = "/usr/bin/python3"  # the one that Debian's bindings of GStreamer are for
RTSP_SERVER = Path(__file__).with_name("rtsp_server.py")


@pytest.fixture(scope="session")
def rtsp():
    """Address of a real RTSP server with two live streams; skips the test without one."""
    try:
        server = subprocess.Popen(
            [SYSTEM_PYTHON, str(RTSP_SERVER)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    except OSError as error:
        pytest.skip(f"no RTSP server: {SYSTEM_PYTHON}: {error.strerror}")
    with server:
        port = server.stdout.readline().strip()
        if not port:
            why = (server.stderr.read().strip().splitlines() or ["it says nothing"])[-1]
            pytest.skip(f"no RTSP server ({why}): `make tools` installs it")
        yield f"rtsp://127.0.0.1:{port}"
        server.kill()


@pytest.fixture
def mjpeg():
    camera = MjpegCamera()
    yield camera
    camera.close()


@pytest.fixture
def failing(tmp_path):
    return FailingCamera(tmp_path / "word")


@pytest.fixture(scope="session")
def clip(tmp_path_factory):
    """Ten pictures of motion JPEG, at 50 a second."""
    path = tmp_path_factory.mktemp("clip") / "clip.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 50, SIZE[::-1])
    for number in range(1, 11):
        writer.write(picture(20 * number))
    writer.release()
    return path


@pytest.fixture
def watched():
    """Makes takers. At the end of a test all cameras and their processes have ended."""
    takers = []

    def watch(url, *, password=None, has_room=True, is_open=True, **given):
        takers.append(Taker(section(url, **given), password, has_room, is_open))
        return takers[-1]

    yield watch
    for taker in takers:
        taker.door.set()
        taker.camera.stop(0.0)
    for taker in takers:
        assert taker.camera.stop(WAIT_S)
        assert taker.process is None
