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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("much", "--memory: 'much' is not understood - write a number and a unit, as in 2GiB"),
        ("-1GiB", "--memory: '-1GiB' is not understood"),
        ("", "--memory: '' is not understood"),
        ("0GiB", "--memory: '0GiB' is no memory at all - write a size such as 2GiB"),
        ("host=0B", "--memory host: '0B' is no memory at all"),
        ("host=much", "--memory host: 'much' is not understood"),
        ("hots=2GiB", "--memory: no memory 'hots' - did you mean 'host'"),
        ("host=2GiB,", "--memory: '' is not NAME=VALUE - write it as in host=2GiB,device=1GiB"),
        ("host=2GiB,1GiB", "--memory: '1GiB' is not NAME=VALUE"),
        ("host=", "--memory: 'host=' is not NAME=VALUE"),
        ("=2GiB", "--memory: '=2GiB' is not NAME=VALUE"),
        ("host=2GiB,host=1GiB", "--memory: host is there twice - keep one"),
        ("host=2GiB,device=1GiB", "--memory device: this box has one memory for all its processors - write host=SIZE"),
    ],
)
def test_a_memory_that_means_nothing_is_refused_with_what_to_write(text, said):
    with pytest.raises(ConfigError) as refused:
        memory_bytes(text, is_split=False)
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (None, None),
        ("cpu=1", {"cpu": 1}),
        ("cuda=3,cpu=1", {"cuda": 3, "cpu": 1}),
        ("cuda=3, cpu=0", {"cuda": 3, "cpu": 0}),
        (f"cpu={MAX_EXECUTORS}", {"cpu": MAX_EXECUTORS}),
    ],
)
def test_executors_are_counts_by_processor(text, meant):
    assert executor_counts(text) == meant


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("4", "--executors: '4' is not NAME=VALUE - write it as in cuda=3,cpu=1"),
        ("", "--executors: '' is not NAME=VALUE"),
        ("cdua=3", "--executors: no processor 'cdua' - did you mean 'cuda'"),
        ("cuda=three", f"--executors cuda: 'three' is not a count from 0 to {MAX_EXECUTORS}"),
        ("cuda=-1", "--executors cuda: '-1' is not a count"),
        ("cuda=1.5", "--executors cuda: '1.5' is not a count"),
        ("cuda=²", "--executors cuda: '²' is not a count"),
        (f"cpu={MAX_EXECUTORS + 1}", f"--executors cpu: '{MAX_EXECUTORS + 1}' is not a count"),
        ("cuda=0,cpu=0", "--executors: no executor at all - give one processor at least 1"),
        ("cpu=1,cpu=2", "--executors: cpu is there twice - keep one"),
    ],
)
def test_executors_that_mean_nothing_are_refused_with_what_to_write(text, said):
    with pytest.raises(ConfigError) as refused:
        executor_counts(text)
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize(
    ("text", "meant"),
    [(None, None), ("530MB/s", 530e6), ("530MB", 530e6), ("1GiB/s", float(GIB))],
)
def test_a_bandwidth_is_bytes_per_second_with_and_without_saying_so(text, meant):
    assert bytes_per_s(text) == meant


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fast", "--ssd-bandwidth: 'fast' is not understood - write a number and a unit, as in 530MB/s"),
        ("0MB/s", "--ssd-bandwidth: '0MB/s' lets nothing through - write a rate such as 530MB/s"),
    ],
)
def test_a_bandwidth_that_means_nothing_is_refused_with_what_to_write(text, said):
    with pytest.raises(ConfigError) as refused:
        bytes_per_s(text)
    assert str(refused.value).startswith(said)


def test_a_precision_is_one_of_them_or_auto_or_the_lines():
    assert [given_precision(text) for text in (None, "auto", "bf16")] == [None, "auto", Precision.BF16]
    assert [precision_without_profile(text) for text in ("auto", "fp16")] == [Precision.FP32, Precision.FP16]
    with pytest.raises(ConfigError, match="--precision: no precision 'AUTO'"):
        given_precision("AUTO")


@pytest.mark.parametrize(
    ("texts", "meant"),
    [
        ((), ()),
        (("auto",), ()),
        (("bf16", "auto"), ()),
        (("bf16, fp32", "bf16"), (Precision.BF16, Precision.FP32)),
    ],
)
def test_several_precisions_come_in_one_text_or_in_several_and_auto_is_all(texts, meant):
    assert given_precisions(texts) == meant


def test_sizes_of_images_and_batches():
    assert image_size("224x640") == (224, 640)
    assert batch_sizes("1, 8,16") == (1, 8, 16)
    for text in ("224", "0x3", "3x", "axb", "1x2x3"):
        with pytest.raises(ConfigError, match="is not HEIGHTxWIDTH - write it as in 224x224"):
            image_size(text)
    for text in ("", "1,", "0", "-1", "1.5"):
        with pytest.raises(ConfigError, match="are not numbers of images from 1 - write them as in 1,8"):
            batch_sizes(text)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (None, ()),
        ("bf16", (Precision.BF16,)),
        ("bf16, auto", (Precision.BF16, "auto")),
        ("auto,bf16,auto", ("auto", Precision.BF16)),
    ],
)
def test_precisions_that_are_run_in_turn_keep_their_order_and_are_run_once(text, meant):
    assert precisions_in_turn(text) == meant


@pytest.mark.parametrize("text", ["", "bf16,", "bf16;auto"])
def test_what_is_no_precision_is_refused_among_several(text):
    with pytest.raises(ConfigError, match="--precision: no precision"):
        precisions_in_turn(text)
