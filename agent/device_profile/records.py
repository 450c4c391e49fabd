"""Records of a device profile, frozen. A field's type is its column's type, with its text for a refusal.

SQLite columns take text as well, and text compares above any number: so the types are strict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from experts.expert import Precision

SOURCE = "source"  # in ``StoredProfile.packed``, in the place of a precision
SHARE_ROUNDING = 1e-9  # shares are sums of quotients


def one_of(*words: str) -> Any:  # noqa: ANN401  # as pydantic types its fields
    return Field(strict=True, pattern=f"^({'|'.join(words)})$", description=f"one of {', '.join(words)}")


Text = Annotated[str, Field(strict=True, description="text")]
MaybeText = Annotated[Text | None, Field(description="text, or nothing")]
Count = Annotated[int, Field(strict=True, ge=0, description="a whole number from 0")]
MaybeCount = Annotated[Count | None, Field(description="a whole number from 0, or nothing")]
PositiveCount = Annotated[int, Field(strict=True, ge=1, description="a whole number from 1")]
Number = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False, description="a finite number from 0")]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False, description="a finite number above 0")]
Share = Annotated[float, Field(strict=True, ge=0, le=1 + SHARE_ROUNDING, description="a number from 0 to 1")]
MaybeShare = Annotated[Share | None, Field(description="a number from 0 to 1, or nothing")]
Form = Annotated[str, one_of(*Precision)]

# JSON in the file.
Texts = Annotated[tuple[Text, ...], Field(min_length=1, description="a list, each text")]
Numbers = Annotated[tuple[Number, ...], Field(min_length=1, description="a list, each a finite number from 0")]
Positives = Annotated[tuple[Positive, ...], Field(min_length=1, description="a list, each a finite number above 0")]
TextByName = Annotated[Mapping[str, Text], Field(description="names, each with text")]
NumberByName = Annotated[Mapping[str, Number], Field(description="names, each with a finite number from 0")]


@dataclass(frozen=True, slots=True)
class BoxIdentity:
    """The box of a profile. ``versions``: by library that runs experts. ``forms``: oneDNN's on this CPU.

    ``cpu``: beside a device; ``drive``: holds the packed weights. Empty: unknown.
    """

    device: Text  # Box.name: cpu, cuda, jetson, mps, emulated
    model: Text
    processors: Texts
    cores: PositiveCount
    host_bytes: Count
    device_bytes: MaybeCount
    versions: TextByName
    forms: Text = ""
    cpu: Text = ""
    drive: Text = ""


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """Measurement of one batch size: seconds of each repeat, and the largest workspace."""

    batch_size: PositiveCount
    seconds: Numbers
    workspace_bytes: Count


@dataclass(frozen=True, slots=True)
class KindProfile:
    """One kind of experts on one processor in one precision (CoServe, section 4.5).

    ``kind``: name of experts that run alike (``kind_name``). A batch of n takes ``K_s * n + B_s``. ``fit_error``: the
    largest relative distance of a mean from that line, up to ``max_batch``. ``load_s``: seconds to load all bytes,
    shared ones too, by source: "ssd", and with split memory "host". ``samples``: the images or texts that ran.

    Language models: seconds per token read and written, bytes of a token's keys and values. One of their ``batches``
    is an iteration in which each text writes a token.
    """

    kind: Text
    architecture: Text
    processor: Text
    precision: Form
    threads: PositiveCount
    K_s: Number
    B_s: Number
    fit_error: Number
    max_batch: PositiveCount
    weight_bytes: Count
    workspace_base_bytes: Count
    workspace_bytes: Count
    load_s: NumberByName
    batches: tuple[BatchTimes, ...]
    samples: Text
    K_prompt_s: Number = 0.0
    K_output_s: Number = 0.0
    lease_bytes: Count = 0


@dataclass(frozen=True, slots=True)
class Agreement:
    """Comparison of one expert's precision on one processor with fp32, on the same samples. ``labels_differ``: images
    whose labels, boxes or next steps differ. ``least``: images that a proof needs. ``of_sha256``: digest of the samples
    and of ``verdict_sha256``. ``failing``: images that fp32 judges NG (without any: of another label than the most
    frequent one); a proof needs ``least_each`` of them and of the others, none in a profile from before."""

    expert: Text
    kind: Text
    processor: Text
    precision: Form
    images: Count
    labels_differ: Count
    largest_score_difference: Number
    tolerance: Number
    of_sha256: Text
    least: PositiveCount
    failing: Count = 0
    least_each: Count = 0

    @property
    def agrees(self) -> bool:
        return self.labels_differ == 0 and self.largest_score_difference <= self.tolerance

    @property
    def passing(self) -> int:
        return self.images - self.failing

    @property
    def proves(self) -> bool:
        is_enough = self.images >= self.least and min(self.failing, self.passing) >= self.least_each
        return self.agrees and is_enough


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """The form of ``precision: auto`` for one expert on one processor. Proven for this ``verdict_sha256`` alone."""

    expert: Text
    processor: Text
    kind: Text
    precision: Form
    why: Text
    verdict_sha256: Text


class UsageOrigin(StrEnum):
    COMPUTED = "computed from quantities"
    COUNTED = "counted on samples"
    SERVED = "served"


@dataclass(frozen=True, slots=True)
class UsageProfile:
    """Usage probabilities by expert. ``pass_rates``: share of requests that passed on. ``requests``: number counted."""

    probabilities: Mapping[str, float]
    pass_rates: Mapping[str, float]
    origin: UsageOrigin
    requests: int = 0


@dataclass(frozen=True, slots=True)
class PoolAllocation:
    """Split of one memory (section 4.4). ``experts``: number of the most used experts that fit."""

    pool: Text
    expert_bytes: Count
    workspace_bytes: Count
    experts: Count


@dataclass(frozen=True, slots=True)
class Allocation:
    """Memory split and executors by processor, for budgets by pool. ``origin``: "casual", or the kind of search."""

    origin: str
    budget_bytes: Mapping[str, int]
    pools: tuple[PoolAllocation, ...]
    executors: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class SearchTrial:
    """One configuration that a search tried. ``search``: "memory:<pool>" or "executors"."""

    search: Text
    number: Count
    setting: Text
    images_per_s: Number
    note: Text = ""


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """Measured bytes per second of one link, "ssd" or "host" (host memory to device memory)."""

    link: Text
    bytes_per_s: Positive


@dataclass(frozen=True, slots=True)
class ImageDecoding:
    """Decoding of one expert's samples on one thread, and the expert's outputs on images decoded smaller. ``full_s``,
    ``scaled_s``: seconds of all ``images``. ``smaller``: number of images large enough to decode smaller; their outputs
    are compared as in ``Agreement``, with ``failing``, ``least`` and ``least_each`` as there. ``of_sha256``: digest of
    weights and samples; ``bound_sha256``: ``decoding_sha256``, without which the proof does not hold."""

    expert: Text
    images: PositiveCount
    megapixels: Positive
    full_s: Positive
    scaled_s: Positive
    smaller: Count
    labels_differ: Count
    largest_score_difference: Number
    tolerance: Number
    of_sha256: Text
    failing: Count = 0
    least: Count = 0
    least_each: Count = 0
    bound_sha256: Text = ""

    @property
    def is_enough(self) -> bool:
        return self.smaller >= self.least and min(self.failing, self.smaller - self.failing) >= self.least_each

    @property
    def agrees(self) -> bool:
        is_same = self.labels_differ == 0 and self.largest_score_difference <= self.tolerance
        return self.smaller > 0 and is_same and self.is_enough

    @property
    def is_refuted(self) -> bool:
        return self.smaller > 0 and self.is_enough and not self.agrees

    @property
    def image_s(self) -> float:
        return (self.scaled_s if self.agrees else self.full_s) / self.images


@dataclass(frozen=True, slots=True)
class StoredProfile:
    """A whole profile. ``precisions``: (kind, processor) -> precision of experts that are not in ``forms``. ``forms``:
    (expert, processor) -> form. ``packed``: (expert, precision) -> ``packed_sha256``, and (expert, SOURCE) -> sha256 of
    the owner's file. ``speedups[processor][n - 1]``: throughput of n executors over that of one.
    ``graphs[processor]``: seconds of small batches without CUDA graphs over those with them."""

    line: str
    written_at: str
    box: BoxIdentity
    links: tuple[LinkSpeed, ...]
    kinds: tuple[KindProfile, ...]
    agreements: tuple[Agreement, ...]
    precisions: Mapping[tuple[str, str], str]
    packed: Mapping[tuple[str, str], str]
    usage: UsageProfile
    allocation: Allocation
    speedups: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    trials: tuple[SearchTrial, ...] = ()
    decodings: tuple[ImageDecoding, ...] = ()  # one for each expert with samples
    forms: Mapping[tuple[str, str], ExpertForm] = field(default_factory=dict)
    graphs: Mapping[str, float] = field(default_factory=dict)

    @property
    def link_bytes_per_s(self) -> dict[str, float]:
        return {link.link: link.bytes_per_s for link in self.links}

    @property
    def kinds_run(self) -> frozenset[str]:
        return frozenset(kind for kind, _ in self.precisions) | {each.kind for each in self.forms.values()}

    def agreements_of(self, kind: KindProfile) -> list[Agreement]:
        """Comparisons of the kind's experts in its precision with fp32."""
        key = (kind.kind, kind.processor, kind.precision)
        return [each for each in self.agreements if (each.kind, each.processor, each.precision) == key]

    @property
    def chosen_kinds(self) -> list[KindProfile]:
        """Kinds in the precisions that the agent runs on each processor."""
        own = {(each.kind, each.processor, each.precision) for each in self.forms.values()}
        others = {key: form for key, form in self.precisions.items() if key not in {each[:2] for each in own}}
        run = own | {(kind, processor, form) for (kind, processor), form in others.items()}
        return [kind for kind in self.kinds if (kind.kind, kind.processor, kind.precision) in run]
