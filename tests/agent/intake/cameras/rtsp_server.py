"""An RTSP server with two live streams, /h264 and /jpeg. For the system's Python: GStreamer's bindings are Debian's."""

from __future__ import annotations

import gi

gi.require_version("Gst", "1.0")
gi.require_version("GstRtspServer", "1.0")
from gi.repository import GLib, Gst, GstRtspServer  # noqa: E402 - the versions are chosen first

PICTURES = "videotestsrc is-live=true pattern=ball ! video/x-raw,format=I420,width=64,height=48,framerate=25/1"
STREAMS = {
    "/h264": "x264enc tune=zerolatency key-int-max=10 ! rtph264pay name=pay0 pt=96",
    "/jpeg": "jpegenc ! rtpjpegpay name=pay0 pt=26",
}


def main() -> None:
    Gst.init(None)
    server = GstRtspServer.RTSPServer()
    server.set_address("127.0.0.1")
    server.set_service("0")
    for place, ending in STREAMS.items():
        factory = GstRtspServer.RTSPMediaFactory()
        factory.set_launch(f"( {PICTURES} ! {ending} )")
        factory.set_shared(True)
        server.get_mount_points().add_factory(place, factory)
    server.attach(None)
    print(server.get_bound_port(), flush=True)  # noqa: T201 - whoever started it waits for this
    GLib.MainLoop().run()


main()
