"""Records of a device profile, frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from agent.device_profile.columns import (
    Count,
    Form,
    MaybeCount,
    Number,
    NumberByName,
    Numbers,
    Positive,
    PositiveCount,
    Text,
    TextByName,
    Texts,
)

SOURCE = "source"  # in ``StoredProfile.packed``, in the place of a precision


@dataclass(frozen=True, slots=True)
class BoxIdentity:
    """``versions``: libraries that run experts. ``forms``: oneDNN's that run on the CPU, joined by commas."""

    device: Text  # Box.name: cpu, cuda, jetson, mps, emulated
    model: Text
    processors: Texts
    cores: PositiveCount
    host_bytes: Count
    device_bytes: MaybeCount
    versions: TextByName
    forms: Text = ""


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """One batch size: seconds of each repeat, and the most bytes beside the weights."""

    batch_size: PositiveCount
    seconds: Numbers
    workspace_bytes: Count


@dataclass(frozen=True, slots=True)
class KindProfile:
    """One kind of experts on one processor in one precision (CoServe, section 4.5).

    ``kind``: experts that run alike (``kind_name``). A batch of n takes ``K_s * n + B_s``; ``fit_error``: largest
    relative distance of a size's mean from that line, up to ``max_batch``. ``load_s``: of all its bytes, shared ones
    too, by source: "ssd", and where memory is split "host". ``samples``: what was run.

    Language models: seconds per token read and written, bytes of its keys and values; ``batches`` are iterations of so
    many texts that write a token each.
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
    """Comparison of one expert in a precision on one processor with fp32, on the same samples.

    ``labels_differ``: images whose labels, boxes or way along a route differ. ``least``: images that a proof takes.
    ``of_sha256``: the samples and how they were judged (``verdict_sha256``).
    """

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

    @property
    def agrees(self) -> bool:
        return self.labels_differ == 0 and self.largest_score_difference <= self.tolerance

    @property
    def proves(self) -> bool:
        return self.agrees and self.images >= self.least


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """The form of ``precision: auto`` for one expert on one processor. With another ``verdict_sha256``, of thresholds
    and routes, it is not proven."""

    expert: Text
    processor: Text
    kind: Text
    precision: Form
    why: Text
    verdict_sha256: Text


class UsageOrigin(StrEnum):
    """Origin of the usage, as text in the file."""

    COMPUTED = "computed from quantities"
    COUNTED = "counted on samples"
    SERVED = "served"


@dataclass(frozen=True, slots=True)
class UsageProfile:
    """Usage probabilities. ``pass_rates``: how often a request passed on. ``requests``: how many were counted."""

    probabilities: Mapping[str, float]
    pass_rates: Mapping[str, float]
    origin: UsageOrigin
    requests: int = 0


@dataclass(frozen=True, slots=True)
class PoolAllocation:
    """Split of one memory (section 4.4). ``experts``: how many of the most used ones fit."""

    pool: Text
    expert_bytes: Count
    workspace_bytes: Count
    experts: Count


@dataclass(frozen=True, slots=True)
class Allocation:
    """Memory split and executors by processor, for budgets by pool. ``origin``: "casual", or how it was searched."""

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
    """Decoding of one expert's samples on one thread, and its outputs on images that were decoded smaller.

    ``full_s``, ``scaled_s``: all ``images`` together; ``smaller``: those large enough to decode smaller, whose outputs
    are compared (``Agreement``). ``of_sha256``: weights and samples.
    """

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

    @property
    def agrees(self) -> bool:
        return self.smaller > 0 and self.labels_differ == 0 and self.largest_score_difference <= self.tolerance

    @property
    def image_s(self) -> float:
        return (self.scaled_s if self.agrees else self.full_s) / self.images


@dataclass(frozen=True, slots=True)
class StoredProfile:
    """A whole profile. ``precisions``: (kind, processor) -> precision of experts without a form of their own.

    ``forms``: (expert, processor) -> its own. ``packed``: (expert, precision) -> ``packed_sha256``, and (expert,
    SOURCE) -> sha256 of the owner's file. ``speedups[processor][n - 1]``: n executors together against one alone.
    """

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
    decodings: tuple[ImageDecoding, ...] = ()  # of experts that have samples
    forms: Mapping[tuple[str, str], ExpertForm] = field(default_factory=dict)

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
