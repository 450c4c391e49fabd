"""The drawing of each package as rows of shapes: what the board shows under a part, the part, what is on top.

Lengths are sums of terms: ``w`` and ``h`` are half the part's width and height, ``p`` the pitch of its pins, a bare
number is in board pixels. ``at`` names the places of a shape, x and y from the part's centre, groups parted by ``;``.
There ``±`` is a place on either side, ``?`` on the side that chance picks once for a part, ``~`` a random place up to
this far off, and ``n:`` the part's number of pins (or ``7:``, seven) evenly spread. Marks for pin 1, cathode or plus
are on the left, or at the upper left.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from agent.demo.rendering.components import Colour

SILK = (226, 230, 222)
GOLD = (206, 176, 98)
SOLDER = (176, 180, 184)
METAL = (196, 198, 200)
INK = (214, 216, 214)
FAINT = (175, 186, 178)
GREY = (60, 58, 56)
FLUX = (190, 132, 44)
PASTE = (150, 152, 152)
GROUND_PLANE = (28, 104, 62)


class Shape(NamedTuple):
    """One row. ``form``: see ``agent.demo.rendering.parts``; ``size``: half sides, corners, or what the form takes.

    ``colour``: a factor is one of the part's own. ``spread``: random difference of the colour. ``when``: labels that
    show it, or after a ``!`` those that do not. ``layer``: a footprint belongs to the board and never moves, the body
    moves with the part, the cover lies on top and never moves; a part that is missing has the footprint alone.
    """

    form: str
    size: str
    colour: Colour | float = 1.0
    shade: str = "tilt"
    at: str = "0 0"
    radius: str = "0"
    when: str = ""
    spread: float = 0.07
    words: str = ""
    layer: str = "body"


box, disc, text, polygon, segment = (partial(Shape, form) for form in ("box", "disc", "text", "polygon", "segment"))
ground_box, ground_disc = (partial(Shape, form, layer="footprint") for form in ("box", "disc"))
silk, silk_disc, silk_polygon, silk_text = (
    partial(Shape, form, colour=SILK, shade="flat", spread=0.0, layer="footprint")
    for form in ("box", "disc", "polygon", "text")
)
crack = partial(Shape, "crack", when="cracked")
dent = partial(Shape, "dent", when="dented")
blot = partial(Shape, "blot", layer="cover")
bridge = partial(Shape, "bridge", "0", (206, 210, 214), "dome", when="bridge", layer="cover")
CONTAMINATED = tuple(blot(size, FLUX, at="~.5w ~.4h", when="contaminated") for size in (".74h", ".5h"))


def bare_pads(half: str, at: str, when: str = "") -> tuple[Shape, ...]:
    """Pads that carry dull paste."""
    x, y = half.split()
    return (
        ground_box(half, GOLD, "flat", at, "1.5", when, 0.04),
        ground_box(f"{x}-2.5 {y}-2.5", PASTE, at=at, radius="2", when=when, spread=0.12),
    )


def pads(half: str, at: str) -> tuple[Shape, ...]:
    """Pads with a shining fillet of solder where the part is present."""
    x, y = half.split()
    return *bare_pads(half, at), ground_box(f"{x}-1 {y}-1", SOLDER, "dome", at, "2", "!missing", 0.12)


def outline(margin: str) -> Shape:
    return silk(".55w+4 .8", at=f"0 ±h+{margin}")


def polarity_bar(x: str) -> Shape:
    """The silkscreen bar at the cathode, plus or pin 1 side."""
    return silk("1.5 h", at=f"{x} 0", radius="1")


def integrated_circuit(width: float, height: float, dot: str, dot_at: str) -> tuple[Shape, ...]:
    """Body with pin 1's dot, marking and date code; width and height as fractions of the part's."""
    return (
        box(f"{width}w {height}h", radius="2.5"),
        disc(dot, (186, 186, 182), at=dot_at),
        text(f"{0.4 * height:.2f}h", FAINT, at="0 -.1h"),
        text(f"{0.26 * height:.2f}h", (142, 152, 146), at="0 .32h", words="date"),
    )


CHIP_PADS = pads(".24w+.2h 1.08h", "±.76w+.2h 0")
CHIP = (
    *CHIP_PADS,
    ground_box(".24w+.2h 1.08h", GOLD, at="?-.76w-.2h 0", radius="1.5", spread=0.05, when="tombstone"),
    box("w h", METAL, radius="2", when="!tombstone"),
    box(".62w h", when="!tombstone flipped"),
    text(".95h", FAINT, when="!tombstone flipped"),
    box(".62w h", (232, 232, 226), when="flipped"),
    crack(".62w h"),
    box(".75h h", at="?.95w 0", radius="1", when="tombstone"),  # it stands upright on one pad
    box(".55h .8h", (222, 224, 226), "dome", "?.95w 0", "1.5", when="tombstone"),
)


def tantalum(bar: Colour, ink: Colour) -> tuple[Shape, ...]:
    return (
        *pads(".17w+4.5 1.08h", "±.83w+4.5 0"),
        polarity_bar("-w-13.5"),
        silk_text("14", at="-w-7 -h-7", words="+"),
        box("w h", radius="3"),
        box(".16w-1 h", bar, at="-.84w+1 0"),
        text(".8h", ink, at=".16w -.1h"),
        crack(".7w h"),
    )


def transistor(tab: str) -> tuple[Shape, ...]:
    """Legs below, a tab or the third leg above."""
    return (
        *pads(".13w+2 .15h+8", "n:.68w .85h+8"),
        *pads(f"{tab}+3 .15h+8", "0 -.85h-8"),
        outline("21"),
        box(".12w .5h+4.5", METAL, at="n:.68w .5h+4.5"),
        box(f"{tab} .5h+4.5", METAL, at="0 -.5h-4.5", radius="1"),
        box("w .8h", radius="2"),
        text(".41w", FAINT, when="!flipped"),
        box(".8w .5h", (168, 140, 110), "dome", radius="2", when="flipped"),
        bridge(at="n:.68w h+10"),
        *CONTAMINATED,
    )


PACKAGES: dict[str, tuple[Shape, ...]] = {
    "small-chip": CHIP,
    "chip": (*CHIP, outline("5")),
    "diode": (
        *pads(".19w+4 .6h", "±.81w+4 0"),
        polarity_bar("-w-11.5"),
        box(".2w .32h", METAL, at="±.8w 0"),
        box(".74w h", radius="2"),
        box(".13w h", (206, 206, 202), at="-.47w 0"),
        text(".8h", FAINT, at=".2w 0"),
        crack(".5w h"),
    ),
    "melf": (
        *pads(".2w+3.5 1.08h", "±.8w+3.5 0"),
        polarity_bar("-w-11.5"),
        box("w h", (206, 208, 210), "lying", radius="3"),
        box(".66w h", shade="lying"),
        box(".14w h", (40, 38, 40), "lying", at="-.42w 0"),
        crack(".5w h"),
    ),
    "led": (
        *pads(".24w+4 1.08h", "±.76w+4 0"),
        polarity_bar("-w-12.5"),
        box("w h", (206, 192, 150), radius="2"),
        box(".7w h", (234, 234, 228), "flat", radius="2"),
        disc(".46w .62h", shade="dome", at=".08w 0"),
        polygon("-w -h -.3w -h -w .6h", (28, 120, 70)),
        crack(".6w h"),
    ),
    "tantalum": tantalum((126, 70, 22), (88, 48, 18)),
    "tantalum-dark": tantalum((204, 204, 198), INK),
    "electrolytic": (
        *pads(".25w+6 12", "±.75w+6 0"),
        silk_text("20", at="-w-8 -.5h", words="+"),
        silk("w+4 .8", at="0 ±h+4"),
        silk(".8 h+4", at="w+4 0"),
        polygon("-w -.7h -.7w -h w -h w h -.7w h -w .7h", (46, 46, 48)),
        disc(".94w .94h", (150, 152, 156)),
        disc(".86w .86h", shade="dome"),
        segment(".85w .85h", (34, 34, 38), "flat"),  # the minus side is black, opposite to the plus on the board
        text(".42h", GREY, at="-.22w -.12h"),
        text(".3h", GREY, at="-.22w .28h", words="16V"),
        blot(".48w", (120, 70, 26), at="~.5w ?.8h", when="leaking"),
    ),
    "sot": transistor(".2w"),
    "transistor": transistor(".62w"),
    "gullwing": (  # two rows of legs, above and below; pin 1 is at the lower left
        *pads(".246p+1 13", "n:.82w ±h+5"),
        silk_disc("4 4", at="-w-8 h+4"),
        silk(".8 .6h", at="-w-5 0"),
        box(".246p h+10", METAL, "lying", "n:.82w 0"),
        *integrated_circuit(1.0, 0.8, "6.2 6.2", "-.74w .5h"),
        disc(".16h .16h", (70, 70, 74), "flat", "-w 0"),
        bridge(at="n:.82w ±h+10"),
    ),
    "quad": (  # legs on all four sides; pin 1 is at the upper left
        *pads(".207p+1 12", "n:.74w ±h+3"),
        *pads("12 .207p+1", "±w+3 n:.74h"),
        silk_polygon("-w-14 -h-14 -w+4 -h-14 -w-14 -h+4"),
        box(".207p .15h+4.5", METAL, at="n:.74w ±.85h+4.5"),
        box(".15w+4.5 .207p", METAL, at="±.85w+4.5 n:.74h"),
        *integrated_circuit(0.86, 0.86, "9 9", "-.66w -.66h"),
        bridge(at="n:.74w ±h+9;±w+9 n:.74h"),
    ),
    "qfn": (
        *pads("4 9", "n:.74w ±h"),
        *pads("9 4", "±w n:.74h"),
        silk_polygon("-w-15 -h-15 -w-1 -h-15 -w-15 -h-1"),
        *bare_pads(".55w .55h", "0 0", "missing"),
        *integrated_circuit(1.0, 1.0, "7 7", "-.7w -.7h"),
        *CONTAMINATED,
    ),
    "crystal": (
        *bare_pads(".16w 9", "±.46w 0"),
        silk(".6w .8", at="0 ±h+6"),
        box("w h", (150, 152, 154), radius="h"),
        box(".93w .86h", shade="lying", radius=".86h"),
        text(".55h", (70, 70, 74)),
        dent(".88h .52h", (70, 70, 74)),
    ),
    "oscillator": (
        *pads("15 12", "±.66w ±.66h"),
        silk_disc("3.5 3.5", at="-w-10 h+8"),
        box("w h", (92, 76, 52), "flat", radius="3"),
        box(".86w .82h", radius="4"),
        text(".62h", GREY),
        disc("4 4", GREY, "flat", "-.66w .56h"),
        *CONTAMINATED,
    ),
    "coil": (
        *pads(".225w+4 .5h", "±.775w+4 0"),
        outline("6"),
        box("w h", radius=".32w"),
        disc(".8w .8h", (104, 74, 50)),
        disc(".7w .7h", (64, 64, 68), "dome"),
        text(".46h", INK),
        crack(".9w .96h"),
    ),
    "switch": (
        *pads("14 9", "±w+2 ±.62h"),
        outline("5"),
        box("w h", (44, 44, 46), "flat", radius="4"),
        box(".92w .92h", radius="3"),
        disc("5.5 5.5", (60, 60, 62), "flat", "±.7w ±.7h"),
        disc(".52w .52h", (30, 30, 34), "dome", when="!no-cap"),
        disc(".5w .5h", (120, 106, 84), "flat", when="no-cap"),
        disc(".2w .2h", (210, 200, 170), "dome", when="no-cap"),
    ),
    "trimmer": (
        *pads("11 11", "±.55w h;0 -h"),
        outline("15"),
        box("w h", radius="3"),
        disc(".68w .68h", (214, 208, 190), "dome"),
        Shape("cross", ".46w .16w", (56, 52, 46)),
        *CONTAMINATED,
    ),
    "header": (
        silk("w+4 h+4", radius="2"),
        ground_box("w+2 h+2", (24, 92, 54), "flat", radius="2", spread=0.0),
        ground_disc("15 15", GOLD, at="n:.64w ±.5h"),
        ground_disc("8 8", (30, 26, 22), "flat", "n:.64w ±.5h"),
        box("w h", radius="5"),
        box("13 13", (20, 20, 22), "flat", "n:.64w ±.5h", "2"),
        box("6 6", (222, 190, 104), "dome", "n:.64w ±.5h", "1"),
        Shape("bent-pin", "46 15", (236, 206, 122), at="n:.64w ±.5h", when="bent-pin", layer="cover"),
    ),
    "fpc": (  # contacts below, a dark latch above that stands off when it is open
        *pads("4.5 9", "n:.76w h+4"),
        *pads("10 12", "±w-4 0"),
        box("3.5 .5h+3.5", METAL, at="n:.76w .5h+3.5"),
        box("w .59h", at="0 .19h", radius="2"),
        box("2.5 .3h", (176, 150, 90), "flat", "n:.76w .2h"),
        box("1.02w .29h", (52, 44, 38), at="0 -.49h", radius="3", when="!open-latch"),
        box("1.02w .29h", (52, 44, 38), at="0 -1.11h", radius="3", when="open-latch"),
    ),
    "shield": (  # a stamped can on a frame of solder, amid a plane of copper, which hides all traces
        ground_box("67 67", GROUND_PLANE, "flat", spread=0.0),
        ground_disc("3 3", (12, 40, 26), "flat", "7:w+16 ±h+18"),
        ground_box("w+7 h+7", GOLD, "flat", radius="4", spread=0.04),
        ground_box("w+5 h+5", SOLDER, radius="4", spread=0.06),
        ground_box("w-3 h-3", GROUND_PLANE, "flat", spread=0.0, when="missing"),
        ground_box(".4w .5h", (38, 38, 42), when="missing"),
        box("w h", radius="6"),
        box(".88w .84h", 0.9, "flat", radius="5"),
        box(".85w .8h", 1.05, radius="5"),
        disc("4 4", (46, 46, 50), "flat", "5:.62w ±.5h", spread=0.0),
        Shape("scratch", ".42h", (112, 108, 104), at="~.55w ~.5h", when="scratched"),
        dent(".31h .24h", (128, 130, 134)),
        blot(".36h", FLUX, at="~.55w ~.5h", when="stained"),
    ),
}
