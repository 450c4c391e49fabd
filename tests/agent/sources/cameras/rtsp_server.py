"""An RTSP server with two live streams of H.264: /h264, small, and /drawn, 1080p.

Each picture of /drawn shows when it was drawn: the milliseconds of CLOCK_MONOTONIC as BITS squares in its first rows,
white for 1, the lowest bit first. For the system's Python: GStreamer's bindings are Debian's.
"""

import gi

gi.require_version("Gst", "1.0")
gi.require_version("GstRtspServer", "1.0")
from gi.repository import GLib, Gst, GstRtspServer  # noqa: E402 - the versions are chosen first

PICTURES = "videotestsrc is-live=true pattern=ball ! video/x-raw,format=I420,width=64,height=48,framerate=25/1"
WIDTH, HEIGHT, BITS, SQUARE, PERIOD_MS = 1920, 1080, 40, 48, 40
DRAWN = (
    "appsrc name=drawn format=time is-live=true "
    f"caps=video/x-raw,format=I420,width={WIDTH},height={HEIGHT},framerate=25/1"
)
H264 = "rtph264pay name=pay0 pt=96"
STREAMS = {
    "/h264": f"{PICTURES} ! x264enc tune=zerolatency key-int-max=10 ! {H264}",
    "/drawn": f"{DRAWN} ! x264enc tune=zerolatency speed-preset=ultrafast key-int-max=25 ! {H264}",
}
REST = b"\x80" * (WIDTH * (HEIGHT - SQUARE) + WIDTH * HEIGHT // 2)


def draw(source):
    """One picture, as soon as the stream has a clock; False once nobody watches any more."""
    clock = source.get_clock()
    if clock is None:
        return True
    now_ns = clock.get_time()
    row = b"".join((b"\xeb" if now_ns // 10**6 >> bit & 1 else b"\x10") * SQUARE for bit in range(BITS))
    buffer = Gst.Buffer.new_wrapped(row * SQUARE + REST)
    buffer.pts = now_ns - source.get_base_time()
    return source.emit("push-buffer", buffer) == Gst.FlowReturn.OK


def feed(_, media):
    GLib.timeout_add(PERIOD_MS, draw, media.get_element().get_by_name("drawn"))


def main():
    Gst.init(None)
    server = GstRtspServer.RTSPServer()
    server.set_address("127.0.0.1")
    server.set_service("0")
    for place, pipeline in STREAMS.items():
        factory = GstRtspServer.RTSPMediaFactory()
        factory.set_launch(f"( {pipeline} )")
        factory.set_shared(True)
        if place == "/drawn":
            factory.connect("media-configure", feed)
        server.get_mount_points().add_factory(place, factory)
    server.attach(None)
    print(server.get_bound_port(), flush=True)  # noqa: T201 - whoever started it waits for this
    GLib.MainLoop().run()


main()
