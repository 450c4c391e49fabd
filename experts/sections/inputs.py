"""Input of an expert in a line file: size, normalisation, fit, orientation and depth of its pixels."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from experts.backends import family
from experts.expert import NAMED, RESAMPLERS, Fit, InputSpec, Normalization, Orientation, Padding, named_normalization
from experts.sections.values import Section

LARGEST_SIDE_PX = 8192
Sample = Annotated[int, Field(strict=True, ge=0, le=0xFFFF)]
Pixels = Annotated[int, Field(strict=True, ge=1, le=LARGEST_SIDE_PX)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Channel = Annotated[int, Field(strict=True, ge=0, le=255)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]


class NormalizeSection(Section):
    """Normalisation of pixels: minus the mean, divided by the standard deviation, per channel."""

    mean: tuple[Number, Number, Number] = Field(description="three numbers, one for each channel")
    std: tuple[Positive, Positive, Positive] = Field(description="three numbers over 0, one for each channel")
    scale: Literal[1, 255] = Field(1, description="mean and std are of pixels from 0 to 1 or from 0 to 255; default 1")
    channels: Literal["rgb", "bgr", "grey"] = Field(
        "rgb",
        description="order in which the model takes the channels, mean and std; grey: of a grey image, in one or "
        "three; default rgb",
    )

    @model_validator(mode="after")
    def _consistent(self) -> NormalizeSection:
        if not all(0 <= each <= self.scale for each in self.mean):
            advice = "write `scale: 255` beside it, or correct it" if self.scale == 1 else "correct it"
            raise ValueError(f"mean {list(self.mean)} is not of pixels from 0 to {self.scale} - {advice}")
        return self


def _by_name(value: object) -> object:
    if isinstance(value, str):
        if value not in NAMED:
            raise ValueError(f"{value!r} is no name - write imagenet, unit, or {{mean: [...], std: [...]}}")
        return {"mean": NAMED[value].mean, "std": NAMED[value].std}
    return value


def _side_or_sides(value: object) -> object:
    sides = value if isinstance(value, list) and len(value) == 2 else [value]
    if value is not None and not all(type(side) is int and 1 <= side <= LARGEST_SIDE_PX for side in sides):
        raise ValueError(f"{value!r} is neither pixels nor [height, width] - write 1 to {LARGEST_SIDE_PX}")
    return value


class FitSection(Section):
    """Scaling of an image: stretched without `resize` and `pad`, else cut from its middle, or padded."""

    resize: Annotated[int | tuple[int, int] | None, BeforeValidator(_side_or_sides)] = Field(
        None,
        description="length of the shorter side before the cut, or [height, width]; not less than the size; default: "
        "not cut, the whole image is stretched to the size",
    )
    crop: Annotated[int | tuple[int, int] | None, BeforeValidator(_side_or_sides)] = Field(
        None, description="what is cut from the middle: as `size` says; default that"
    )
    pad: Literal["center", "top-left", "right"] | None = Field(
        None,
        description="instead of resize: the whole image in its proportions, placed center, top-left, or, padded on the "
        "right alone, right; default: not padded",
    )
    color: Channel | tuple[Channel, Channel, Channel] | Literal["mean"] = Field(
        0, description="of the padding: 0 to 255, [red, green, blue], or mean (0 once normalised); default 0"
    )
    rounding: Literal["nearest", "down", "up", "longer-nearest"] | None = Field(
        None,
        description="of the cut's place where half a pixel is left, and of a padded image's size; longer-nearest: "
        "down, and the longer side of the scaled image to the nearest pixel; default nearest",
    )
    interpolation: Literal[RESAMPLERS] = Field(  # type: ignore[valid-type]
        "bilinear",
        description="how pixels are scaled: Pillow's nearest, box, bilinear, hamming, bicubic or lanczos, or the "
        "function of another library, such as opencv-linear or torch-bilinear; default bilinear",
    )

    @model_validator(mode="after")
    def _consistent(self) -> FitSection:
        if self.pad is None and "color" in self.model_fields_set:
            raise ValueError("color is of the padding - write `pad:` beside it, or remove it")
        if self.pad is not None and (self.resize or self.crop):
            raise ValueError("an image is either cut or padded - remove `pad`, or `resize` and `crop`")
        if self.resize is None and self.crop is not None:
            raise ValueError("crop is cut from a scaled image - write `resize:` beside it, or remove it")
        return self

    @property
    def sides(self) -> tuple[int, int] | None:
        return None if self.resize is None else _sides(self.resize)

    def applied(self, spec: InputSpec) -> InputSpec:
        spec = replace(spec, interpolation=self.interpolation, rounding=self.rounding)
        if self.pad is not None:
            return replace(spec, fit=Fit.PADDED, padding=Padding(self.pad, self.color))
        return spec if self.resize is None else replace(spec, fit=Fit.CROPPED, resize=self.resize)


class PreparationSection(Section):
    """Preparation of an image's pixels for an expert."""

    normalize: (
        Annotated[
            NormalizeSection,
            BeforeValidator(_by_name, json_schema_input_type=Literal["imagenet", "unit"] | NormalizeSection),
        ]
        | None
    ) = Field(
        None,
        description="imagenet (torchvision's mean and deviation), unit (0 to 1) or {mean: [...], std: [...]}; default: "
        "unit for detectors, else imagenet",
    )
    fit: Annotated[
        FitSection | None,
        BeforeValidator(
            lambda value: None if value == Fit.STRETCHED else value,
            json_schema_input_type=Literal["stretched"] | FitSection | None,
        ),
    ] = Field(
        None,
        description="{resize: 256, crop: 224, interpolation: bicubic} cuts the middle of the scaled image; {pad: "
        "center} keeps its proportions; default: as a detector's graph implies, else stretched: the whole image, "
        "proportions not kept; not of ultralytics' weights",
    )


class InputSection(PreparationSection):
    """Input of an expert: size and preparation."""

    size: tuple[Pixels, Pixels] = Field(description="[height, width] in pixels, 1 to 8192; detectors: multiples of 32")
    orientation: Orientation | None = Field(
        None,
        description="stored (as the file has its pixels) or exif (turned as its EXIF entry says); default: as the "
        "trainer's loader does, exif for models of ultralytics', else stored",
    )

    bits: Annotated[int, Field(strict=True, ge=9, le=16)] | None = Field(
        None,
        description="of images of more than 8 bits: the bits that their values have, 9 to 16; the upper 8 count; "
        "default: as the file states, else it is refused",
    )
    window: tuple[Sample, Sample] | None = Field(
        None,
        description="of images of more than 8 bits: [low, high], the values that become 0 and 255; values beyond are "
        "cut; default: see bits",
    )

    @property
    def named(self) -> str | Normalization | None:
        return None if self.normalize is None else named_normalization(Normalization(**dict(self.normalize)))

    @model_validator(mode="after")
    def _consistent(self) -> InputSection:
        if self.window is not None and self.bits is not None:
            raise ValueError("bits and window both say what becomes 0 to 255 - remove one of them")
        if self.window is not None and self.window[0] >= self.window[1]:
            raise ValueError(f"window {list(self.window)} is empty - write [low, high], the lower value first")
        if self.fit is None:
            return self
        crop, resize, size = self.fit.crop, self.fit.resize, self.size
        if crop is not None and _sides(crop) != size:
            raise ValueError(f"fit.crop {crop} is not the size {list(size)} - make them the same")
        pairs = [(resize, min(size))] if isinstance(resize, int) else zip(resize or size, size, strict=True)
        if any(scaled < seen for scaled, seen in pairs):
            raise ValueError(f"fit.resize {resize} is less than the size {list(size)} - raise it")
        return self


def _sides(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value


def input_spec(section: InputSection, architecture: str) -> InputSpec:
    """Input of an expert; ultralytics' loader applies EXIF orientation to a detector's images."""
    is_detector = family(architecture) == "detector"
    normalize, orientation = ("unit", Orientation.EXIF) if is_detector else ("imagenet", Orientation.STORED)
    spec = InputSpec(
        *section.size, section.named or normalize, orientation=section.orientation or orientation, bits=section.bits,
        window=section.window,
    )  # fmt: skip
    return spec if section.fit is None else section.fit.applied(spec)
