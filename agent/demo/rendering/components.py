"""The component types of the demo line: their looks, their number on a board, their defects.

Sizes are in pixels of the rendered board, at about 24 pixels per millimetre.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

Colour: TypeAlias = "tuple[int, int, int]"

OK = "ok"


class Detector(StrEnum):
    """The two questions that a shared detector answers after a classifier has passed the part."""

    ALIGNMENT = "alignment"
    POLARITY = "polarity"

    @property
    def labels(self) -> tuple[str, str]:
        return ("aligned", "shifted") if self is Detector.ALIGNMENT else ("correct", "reversed")

    @property
    def defect(self) -> str:
        return self.labels[1]


@dataclass(frozen=True, slots=True)
class ComponentType:
    """One component type. ``package`` names its drawing; ``defects`` are those that its classifier tells from ok.

    A part with a ``detector`` has one more defect, the detector's, that its classifier passes as ok. A ``measured``
    part has an anomaly expert instead, which learns from good parts and does not tell one defect from another.
    """

    name: str
    package: str
    width_px: int
    height_px: int
    quantity: int
    defects: tuple[str, ...]
    prefix: str
    colour: Colour
    detector: Detector | None = None
    marking: str = ""
    pins: int = 0
    measured: bool = False

    @property
    def own_labels(self) -> tuple[str, ...]:
        return (OK, *self.defects)

    @property
    def labels(self) -> tuple[str, ...]:
        return (*self.own_labels, *((self.detector.defect,) if self.detector else ()))

    @property
    def window_px(self) -> int:
        """The side of the square around its place that a camera would crop."""
        return round(max(self.width_px, self.height_px) * 1.25 + 24)


_BLACK = (38, 38, 42)
_BROWN = (150, 112, 78)
_ALIGN = Detector.ALIGNMENT
_POLAR = Detector.POLARITY
_CHIP = ("missing", "tombstone")
_BLEMISHES = ("missing", "scratched", "dented", "stained")

COMPONENTS = (
    ComponentType("resistor-0402", "small-chip", 32, 17, 7, _CHIP, "R", _BLACK, _ALIGN),
    ComponentType("resistor-0603", "chip", 42, 23, 5, (*_CHIP, "flipped"), "R", _BLACK, _ALIGN, "103"),
    ComponentType("resistor-0805", "chip", 52, 32, 2, ("missing", "flipped"), "R", _BLACK, _ALIGN, "472"),
    ComponentType("resistor-1206", "chip", 76, 38, 1, ("missing", "cracked"), "R", _BLACK, _ALIGN, "R100"),
    ComponentType("capacitor-0402", "small-chip", 32, 17, 8, _CHIP, "C", _BROWN, _ALIGN),
    ComponentType("capacitor-0603", "chip", 42, 23, 5, (*_CHIP, "cracked"), "C", (168, 130, 92), _ALIGN),
    ComponentType("capacitor-0805", "chip", 52, 32, 2, ("missing", "cracked"), "C", (138, 98, 64), _ALIGN),
    ComponentType("ferrite-0603", "chip", 42, 23, 2, _CHIP, "FB", (70, 72, 78), _ALIGN),
    ComponentType("inductor-0805", "chip", 52, 32, 1, _CHIP, "L", (222, 222, 214), _ALIGN),
    ComponentType("fuse-1206", "chip", 76, 38, 1, ("missing", "cracked"), "F", (60, 120, 96), _ALIGN, "F 2A"),
    ComponentType("diode-sod123", "diode", 66, 34, 2, ("missing", "cracked"), "D", _BLACK, _POLAR, "A7"),
    ComponentType("diode-melf", "melf", 76, 30, 1, ("missing", "cracked"), "D", (186, 92, 62), _POLAR),
    ComponentType("led-red", "led", 48, 30, 1, ("missing", "cracked"), "LD", (232, 96, 70), _POLAR),
    ComponentType("led-green", "led", 48, 30, 2, ("missing", "cracked"), "LD", (226, 222, 110), _POLAR),
    ComponentType("tantalum-a", "tantalum", 72, 40, 1, ("missing", "cracked"), "C", (232, 164, 52), _POLAR, "107"),
    ComponentType("tantalum-b", "tantalum-dark", 84, 56, 1, ("missing", "cracked"), "C", (46, 46, 50), _POLAR, "476"),
    ComponentType(
        "electrolytic-6mm", "electrolytic", 136, 136, 2, ("missing", "leaking"), "C", (196, 198, 202), _POLAR, "220"
    ),
    ComponentType("transistor-sot23", "sot", 66, 34, 2, ("missing", "flipped"), "Q", _BLACK, None, "1AM", 2),
    ComponentType("regulator-sot223", "transistor", 140, 78, 1, ("missing", "bridge"), "U", _BLACK, None, "AMS 33", 3),
    ComponentType("mosfet-dpak", "transistor", 138, 118, 1, ("missing", "contaminated"), "Q", _BLACK, None, "N08", 2),
    ComponentType("ic-soic8", "gullwing", 104, 88, 1, ("missing", "bridge"), "U", _BLACK, _POLAR, "LM358", 4),
    ComponentType("ic-tssop16", "gullwing", 116, 100, 1, ("missing", "bridge"), "U", _BLACK, _POLAR, "74HC595", 8),
    ComponentType("ic-qfp32", "quad", 168, 168, 1, ("missing", "bridge"), "U", _BLACK, _POLAR, "STM8S", 8),
    ComponentType("ic-qfn24", "qfn", 96, 96, 1, ("missing", "contaminated"), "U", _BLACK, _POLAR, "RP21", 6),
    ComponentType("crystal-hc49", "crystal", 146, 64, 1, ("missing", "dented"), "Y", (188, 190, 192), None, "16.000"),
    ComponentType(
        "oscillator-3225", "oscillator", 78, 60, 1, ("missing", "contaminated"), "Y", (200, 190, 160), None, "25.0"
    ),
    ComponentType("inductor-power", "coil", 128, 128, 1, ("missing", "cracked"), "L", (58, 58, 60), None, "100"),
    ComponentType("switch-tact", "switch", 116, 116, 1, ("missing", "no-cap"), "SW", (190, 188, 184)),
    ComponentType("trimmer-3mm", "trimmer", 84, 84, 1, ("missing", "contaminated"), "RV", (48, 92, 190)),
    ComponentType("header-2x3", "header", 132, 90, 1, ("missing", "bent-pin"), "J", (34, 34, 36), None, "", 3),
    ComponentType("connector-fpc", "fpc", 184, 74, 1, ("missing", "open-latch"), "J", (226, 220, 200), None, "", 10),
    ComponentType("shield-can", "shield", 88, 80, 2, _BLEMISHES, "SH", (198, 200, 204), measured=True),
)
