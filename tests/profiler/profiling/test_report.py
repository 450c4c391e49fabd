"""What `coserve profile` shows: the keys that scripts read, the table, charts; all by hand, nothing is measured."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from agent.device_profile.records import (
    Agreement,
    Allocation,
    BatchTimes,
    BoxIdentity,
    LinkSpeed,
    PoolAllocation,
    SearchTrial,
    UsageProfile,
)
from profiler.profiling.report import profile_charts, profile_json, profile_table, usage_cdf
from profiler.tables import WIDTH
from tests.profiler.lines import kind_of, profile_of

LARGE = "resnet101 224x224 imagenet"
SMALL = "resnet101 64x64 imagenet stem=3x3"


def kind(name=LARGE, processor="cuda", precision="bf16", **changes):
    batches = (BatchTimes(1, (0.010, 0.012, 0.020), 5_000_000), BatchTimes(4, (0.030, 0.032, 0.031), 11_000_000))
    found = {
        "architecture": name.split()[0],
        "processor": processor,
        "K_s": 0.006,
        "B_s": 0.005,
        "fit_error": 0.08,
        "weight_bytes": 85 * 2**20,
        "load_s": {"ssd": 0.12, "host": 0.01},
        "batches": batches,
        "samples": "24 images from inbox/done",
    }
    return kind_of(name, precision, **found | changes)


@pytest.fixture
def profile():
    return profile_of(
        box=BoxIdentity("cuda", "RTX 3080 Ti", ("cuda", "cpu"), 8, 2**35, 2**33, {"torch": "2.10.0"}),
        links=(LinkSpeed("ssd", 7e8), LinkSpeed("host", 1.2e10)),
        kinds=(kind(), kind(precision="fp32"), kind(processor="cpu", precision="fp32", load_s={"ssd": 0.2})),
        agreements=(
            Agreement("cls/a", LARGE, "cuda", "bf16", 48, 0, 0.004, 0.02, "5a", 30),
            Agreement("cls/a", LARGE, "cuda", "fp16", 48, 3, 0.1, 0.02, "5a", 30),
        ),
        precisions={(LARGE, "cuda"): "bf16", (LARGE, "cpu"): "fp32"},
        packed={("cls/a", "bf16"): "1", ("cls/b", "bf16"): "2"},
        usage=UsageProfile({"cls/a": 0.9, "cls/b": 0.1}, {"cls/a": 0.8}, "counted on samples", 240),
        allocation=Allocation(
            "searched in simulation",
            {"host": 2**34, "device": 2**33},
            (PoolAllocation("host", 2**33, 2**33, 80), PoolAllocation("device", 3 * 2**31, 2**31, 60)),
            {"cuda": 3, "cpu": 1},
        ),
        speedups={"cuda": (1.0, 1.4, 1.5)},
        trials=(
            SearchTrial("executors", 1, "1 cuda + 0 cpu", 80.0),
            SearchTrial("executors", 2, "3 cuda + 1 cpu", 120.0, "best"),
            SearchTrial("memory:device", 1, "40 experts", 110.0, "window 25-40"),
            SearchTrial("memory:device", 2, "60 experts", 125.0, "window 40-55, chosen"),
        ),
    )


def test_json_profile_has_the_documented_keys(profile):
    found = json.loads(json.dumps(profile_json(profile)))
    assert found.keys() >= {"device", "architectures", "usage", "allocation", "executors"}
    assert (found["device"]["name"], found["device"]["versions"]) == ("cuda", {"torch": "2.10.0"})
    assert {name: each.keys() for name, each in found["architectures"].items()} == {"resnet101": {"cuda", "cpu"}}
    row = found["architectures"]["resnet101"]["cuda"]
    assert (row["precision"], row["K_s"], row["B_s"], row["max_batch"]) == ("bf16", 0.006, 0.005, 4)
    assert row["weight_bytes"] == 85 * 2**20
    assert (row["batch_sizes"], row["workspace_bytes"]) == ([1, 4], [5_000_000, 11_000_000])
    assert row["load_s"] == {"ssd": 0.12, "host": 0.01}
    assert found["architectures"]["resnet101"]["cpu"]["load_s"] == {"ssd": 0.2, "host": None}
    forms = {(each["processor"], each["precision"]): (each["is_chosen"], each["agrees"]) for each in found["forms"]}
    assert forms == {("cuda", "bf16"): (True, True), ("cuda", "fp32"): (False, None), ("cpu", "fp32"): (True, None)}
    assert found["usage"] == {"cls/a": 0.9, "cls/b": 0.1}
    assert found["usage_origin"] == "counted on samples"
    pool = {"expert_bytes": 3 * 2**31, "workspace_bytes": 2**31, "experts": 60}
    assert found["allocation"]["pools"]["device"] == pool
    assert found["executors"] == {"cuda": 3, "cpu": 1}


def test_report_distinguishes_kinds_of_an_architecture_and_omits_unused_ones(profile):
    small = kind(SMALL)
    left = replace(profile, kinds=(*profile.kinds, small))
    assert profile_json(left) == profile_json(profile)
    assert SMALL.split()[1] not in profile_table(left)
    both = replace(left, precisions=profile.precisions | {(SMALL, "cuda"): "bf16"})
    assert profile_json(both)["architectures"].keys() == {LARGE, SMALL}


def test_profile_table_has_every_value_and_fits(profile):
    text = profile_table(profile)
    assert max(len(line) for line in text.splitlines()) <= WIDTH
    for part in (
        "cuda: RTX 3080 Ti, 8 cores; torch 2.10.0",
        "yes, 1 of 1 experts",
        "24 images from inbox/done",
        "ssd 700 MB/s, host 12,000 MB/s",
        "cuda executors against one: 1 x1.00, 2 x1.40, 3 x1.50",
        "counted on samples, 240 requests: 1 of 2 experts take half of all uses",
        "3 cuda, 1 cpu (searched in simulation)",
        "device: 6,144.0 MiB for the 60 most used experts, 2,048.0 MiB for batches",
        "memory:device, images/s: 40 experts 110.0, 60 experts 125.0",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("images", "differ", "score", "told"),
    [
        (29, 0, 0.0, "not proven"),
        (30, 0, 0.0, "yes, 1 of 1 experts"),
        (48, 3, 0.0, "NO: 1 of 1 experts"),
        (48, 0, 0.5, "NO: 1 of 1 experts"),
    ],
)
def test_report_shows_for_how_many_experts_a_precision_is_proven(profile, images, differ, score, told):
    agreement = Agreement("cls/a", LARGE, "cuda", "bf16", images, differ, score, 0.02, "5a", 30)
    assert told in profile_table(replace(profile, agreements=(agreement,)))
    beside = replace(agreement, expert="cls/b", images=48, labels_differ=0, largest_score_difference=0.0)
    both = told.replace("1 of 1", "1 of 2") if "NO" in told else f"yes, {1 + (images == 30)} of 2 experts"
    assert both in profile_table(replace(profile, agreements=(agreement, beside)))


def test_charts_are_pngs(profile, tmp_path):
    charts = profile_charts(profile, tmp_path / "profile")
    assert [chart.stem for chart in charts] == [
        "average-latency",
        "batch-latency",
        "footprint",
        "usage",
        "memory-device",
    ]
    for chart in charts:
        with Image.open(chart) as image:
            assert (image.format, image.width >= 800) == ("PNG", True)
    assert sorted(tmp_path.rglob("*.*")) == sorted(charts)


@given(st.dictionaries(st.text(max_size=3), st.floats(0, 1), min_size=1))
def test_cdf_rises_ever_more_slowly_to_one(probabilities):
    cdf = usage_cdf(probabilities)
    steps = [after - before for before, after in zip((0.0, *cdf), cdf, strict=False)]
    assert cdf[-1] == pytest.approx(1.0)
    assert all(step >= -1e-12 for step in steps)
    assert all(later <= earlier + 1e-9 for earlier, later in pairwise(steps))
