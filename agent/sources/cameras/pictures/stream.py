"""Network cameras (RTSP, motion JPEG over HTTP) and cameras of this box (Video4Linux), read by FFmpeg.

Guarantees: each picture has its arrival time, even after long buffering; pictures without a known time, as the first
ones, are skipped. Only the url's protocol is allowed, and a camera with TLS must present a certificate for its name.
The login is passed only to FFmpeg, inside this process.
"""

from __future__ import annotations

import socket
import ssl
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from av import error as av_error
from av.error import ExitError, FFmpegError, InvalidDataError

from agent.faults.errors import CameraFailed
from agent.sources.cameras.pictures.capture import Capture
from agent.sources.cameras.pictures.presentation import LONG_AGO

if TYPE_CHECKING:
    from agent.sources.cameras.pictures.source import CameraConnection, Snapshot

READ_PATIENCE = 2.0  # times the stall timeout: the supervisor notices a stall first
CATCHING_UP_SHARE = 0.8  # of the stall timeout: the reason is reported before the stall is noticed
UNTIMED = (
    "it is not known when its frames came: they come faster than they are read, or seldom, or their times jump - lower "
    "the camera's rate or resolution, or raise stall_timeout_s"
)
PORTS = {"http": 80, "https": 443, "rtsp": 554, "rtsps": 322}
PROTOCOLS = {"http": "http,tcp", "https": "https,tls,tcp", "rtsp": "rtsp,rtp,udp,tcp", "rtsps": "rtsp,rtp,tls,tcp"}
AUTHORITIES = (  # of Debian and Ubuntu, Fedora and Red Hat, SUSE
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
)
ADVICE: dict[type[FFmpegError], str] = {
    av_error.HTTPUnauthorizedError: "it wants a login, or another one - correct user: and password:",
    av_error.HTTPForbiddenError: "this user may not see it - correct user: and password:, or permit it at the camera",
    av_error.HTTPNotFoundError: "there is no such stream - correct the path in url:",
    av_error.PermissionError: "add the agent's user to the group video",
    av_error.FileNotFoundError: "is the camera plugged in?",
    InvalidDataError: "it sends no video of this kind - correct the scheme, port or path in url:",
    ExitError: "it does not answer - is the camera on, and in this network?",
}


class StreamSource:
    def __init__(self, connection: CameraConnection) -> None:
        self._connection = connection
        self._capture: Capture | None = None
        self._behind_since: float | None = None

    def open(self, deadline: float) -> None:
        timeouts_s = (max(deadline - time.monotonic(), 0.1), READ_PATIENCE * self._connection.stall_timeout_s)
        is_device = self._connection.scheme == "v4l2"
        place = self._connection.place if is_device else _with_login(self._connection)
        try:
            options, kind = _options(self._connection), "v4l2" if is_device else None
            self._capture = Capture(place, options, timeouts_s, self._connection.max_pixels, kind)
        except FFmpegError as error:
            is_late = time.monotonic() >= deadline
            raise CameraFailed(_why_not(self._connection, ExitError(0, "no answer") if is_late else error)) from None

    def read(self, deadline: float) -> Snapshot | None:
        assert self._capture is not None, "open it first"
        while True:
            try:
                snapshot = self._capture.read(deadline)
            except EOFError as error:
                raise CameraFailed(f"the camera ended the stream, or fell silent ({error})") from None
            if snapshot is None or snapshot.came_at > LONG_AGO:
                self._behind_since = None
                return snapshot
            now = time.monotonic()
            self._behind_since = self._behind_since or now
            if now - self._behind_since >= CATCHING_UP_SHARE * self._connection.stall_timeout_s:
                raise CameraFailed(UNTIMED)
            if now >= deadline:
                return None

    def close(self) -> None:
        if self._capture is not None:
            self._capture.close()


def _options(connection: CameraConnection) -> dict[str, str]:
    scheme = connection.scheme
    if scheme == "v4l2":
        return {}
    options = {"protocol_whitelist": PROTOCOLS[scheme]}
    if scheme in {"http", "https"}:
        options |= {"format_whitelist": "mpjpeg,mjpeg", "max_redirects": "0"}
    else:
        options |= {"allowed_media_types": "video"}
        transport = "tcp" if scheme == "rtsps" else connection.rtsp_transport
        options |= {"rtsp_flags": "prefer_tcp"} if transport is None else {"rtsp_transport": transport}
    if scheme in {"https", "rtsps"} and not connection.insecure_ok:
        options |= {"tls_verify": "1", "ca_file": connection.ca or _system_authorities()}
    return options


def _system_authorities() -> str:
    named = ssl.get_default_verify_paths().cafile
    found = next((place for place in (named, *AUTHORITIES) if place and Path(place).is_file()), None)
    if found is None:
        raise CameraFailed("this box trusts no authorities - install ca-certificates, or name a file in ca:")
    return found


def _with_login(connection: CameraConnection) -> str:
    if connection.user is None:
        return connection.url
    login = ":".join(quote(part, safe="") for part in (connection.user, connection.password) if part is not None)
    parts = urlsplit(connection.url)
    return parts._replace(netloc=f"{login}@{parts.netloc.rpartition('@')[2]}").geturl()


def _why_not(connection: CameraConnection, error: FFmpegError) -> str:
    """Reason as text, without the url, which may contain a login."""
    text = error.strerror or str(error)
    text = f"{text[:1].lower()}{text[1:]}"
    parts = urlsplit(connection.url)
    host, port = parts.hostname or "", parts.port or PORTS.get(parts.scheme, 0)
    where = connection.place if connection.scheme == "v4l2" else f"{host}:{port}"
    for kind, advice in ADVICE.items():
        if isinstance(error, kind):
            return f"{where}: {text}: {advice}"
    if connection.scheme == "v4l2":
        return f"{where}: {text} - is it a camera, or in use by another program?"
    try:
        socket.getaddrinfo(host, port)
    except socket.gaierror:
        return f"no host of the name {host} is known - correct url:, or the box's name resolution"
    if parts.scheme in {"https", "rtsps"} and not isinstance(error, ConnectionError):
        return f"{where}: no TLS connection - is its certificate for {host}, and from an authority of ca:?"
    return f"{where}: {text} - is the camera on, and is the port right?"
