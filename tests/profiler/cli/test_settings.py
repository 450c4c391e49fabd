"""What the offline commands take as text: what each form means, and what is said of one that means nothing."""

from __future__ import annotations

import pytest

from agent.line_file.machine import MAX_EXECUTORS
from experts.errors import ConfigError
from experts.expert import Precision
from profiler.cli.settings import (
    batch_sizes,
    bytes_per_s,
    executor_counts,
    given_precision,
    given_precisions,
    image_size,
    memory_bytes,
    precision_without_profile,
    precisions_in_turn,
)

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "is_split", "meant"),
    [
        ("2GiB", False, {"host": 2 * GIB}),
        ("2GiB", True, {"device": 2 * GIB}),
        ("500MB", False, {"host": 500_000_000}),
        ("host=2GiB", True, {"host": 2 * GIB}),
        ("host=2GiB,device=1GiB", True, {"host": 2 * GIB, "device": GIB}),
        (" host = 2GiB , workspace = 512MiB ", False, {"host": 2 * GIB, "workspace": GIB // 2}),
    ],
)
def test_a_memory_is_bytes_by_name_and_a_bare_size_is_where_experts_run_from(text, is_split, meant):
    assert memory_bytes(text, is_split=is_split) == meant


def refusal(read, text, **options):
    with pytest.raises(ConfigError) as refused:
        read(text, **options)
    return str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("much", "--memory: 'much' is not understood - write a number and a unit, as in 2GiB"),
        ("-1GiB", "--memory: '-1GiB' is not understood"),
        ("0GiB", "--memory: '0GiB' is no memory at all - write a size such as 2GiB"),
        ("host=0B", "--memory host: '0B' is no memory at all"),
        ("hots=2GiB", "--memory: no memory 'hots' - did you mean 'host'"),
        ("host=2GiB,", "--memory: '' is not NAME=VALUE - write it as in host=2GiB,device=1GiB"),
        ("=2GiB", "--memory: '=2GiB' is not NAME=VALUE"),
        ("host=2GiB,host=1GiB", "--memory: host is there twice - keep one"),
        ("host=2GiB,device=1GiB", "--memory device: this box has one memory for all its processors - write host=SIZE"),
    ],
)
def test_a_memory_without_meaning_is_refused_with_what_to_write(text, said):
    assert refusal(memory_bytes, text, is_split=False).startswith(said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("4", "--executors: '4' is not NAME=VALUE - write it as in cuda=3,cpu=1"),
        ("cdua=3", "--executors: no processor 'cdua' - did you mean 'cuda'"),
        ("cuda=three", f"--executors cuda: 'three' is not a count from 0 to {MAX_EXECUTORS}"),
        ("cuda=-1", "--executors cuda: '-1' is not a count"),
        ("cuda=²", "--executors cuda: '²' is not a count"),
        (f"cpu={MAX_EXECUTORS + 1}", f"--executors cpu: '{MAX_EXECUTORS + 1}' is not a count"),
        ("cuda=0,cpu=0", "--executors: no executor at all - give one processor at least 1"),
        ("cpu=1,cpu=2", "--executors: cpu is there twice - keep one"),
    ],
)
def test_executors_without_meaning_are_refused_with_what_to_write(text, said):
    assert refusal(executor_counts, text).startswith(said)


def test_a_bandwidth_is_bytes_per_second_with_and_without_saying_so():
    meant = {None: None, "530MB/s": 530e6, "530MB": 530e6, "1GiB/s": float(GIB)}
    assert {text: bytes_per_s(text) for text in meant} == meant
    assert refusal(bytes_per_s, "fast").startswith("--ssd-bandwidth: 'fast' is not understood - write a number and a")
    assert refusal(bytes_per_s, "0MB/s").startswith("--ssd-bandwidth: '0MB/s' lets nothing through - write a rate such")


def test_a_precision_is_one_of_them_or_auto_or_the_lines():
    assert [given_precision(text) for text in (None, "auto", "bf16")] == [None, "auto", Precision.BF16]
    assert [precision_without_profile(text) for text in ("auto", "fp16")] == [Precision.FP32, Precision.FP16]
    assert "--precision: no precision 'AUTO'" in refusal(given_precision, "AUTO")


def test_several_precisions_come_in_one_text_or_in_several_and_auto_is_all():
    meant = {(): (), ("bf16", "auto"): (), ("bf16, fp32", "bf16"): (Precision.BF16, Precision.FP32)}
    assert {texts: given_precisions(texts) for texts in meant} == meant


def test_precisions_that_are_run_in_turn_keep_their_order_and_are_run_once():
    meant = {None: (), "bf16, auto": (Precision.BF16, "auto"), "auto,bf16,auto": ("auto", Precision.BF16)}
    assert {text: precisions_in_turn(text) for text in meant} == meant
    for text in ("", "bf16,", "bf16;auto"):
        assert "--precision: no precision" in refusal(precisions_in_turn, text)


def test_sizes_of_images_and_batches():
    assert image_size("224x640") == (224, 640)
    assert batch_sizes("1, 8,16") == (1, 8, 16)
    for text in ("224", "0x3", "3x", "axb", "1x2x3"):
        assert "is not HEIGHTxWIDTH - write it as in 224x224" in refusal(image_size, text)
    for text in ("", "1,", "0", "-1", "1.5"):
        assert "are not numbers of images from 1 - write them as in 1,8" in refusal(batch_sizes, text)
