"""Images are decoded once for all steps of their routes, and nothing is held longer than somebody needs it."""

import io
import math
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

import agent.runtime.images.preparation
from agent.runtime.expert_copy import kind_name, prepared_form
from agent.runtime.images.preparation import ByteGate, Order, Preparation, least_pixels
from agent.runtime.images.sources import EncodedImage, Frame, FramePart, decoded
from experts.backends import backend_for, prepare
from experts.backends.base import Prepared
from experts.backends.vision.boxes import prediction
from experts.expert import Expert, Fit, InputSpec, Normalization, Orientation
from experts.images import TAG, decode_image
from tests.pictures import encoded
from tests.waiting import until

PATIENCE_S = 30.0
LAST = ("last awaited", "last ahead")


def expert(name, size, architecture="resnet18", **spec):
    return Expert(name, architecture, None, ("ok",), InputSpec(size, size, **spec))


SMALL, ALIKE, OTHER = expert("cls/a", 32), expert("cls/b", 32), expert("cls/c", 48)
DETECTOR = expert("det/a", 64, "yolov8n")


def stored(pixels, form, **options):
    return EncodedImage(encoded(pixels, form, **options), f"it.{form}", 10_000_000)


def png(height, width, seed=0):
    return stored(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8), "png")


def bytes_of(*experts):
    return sum({form.name: form.size_bytes for form in map(prepared_form, experts)}.values())


LARGE = np.zeros((1000, 1000, 3), dtype=np.uint8)


class Workplace:
    """A preparation whose decodings are counted, and may be held up."""

    def __init__(self, monkeypatch):
        self.begun, self.decoded = [], []
        self.may_decode = threading.Event()
        self.may_decode.set()
        monkeypatch.setattr(agent.runtime.images.preparation, "LEAST_THREADS", 1)
        self.preparation = Preparation(1)
        monkeypatch.setattr(agent.runtime.images.preparation, "decoded", self._decode)

    def _decode(self, source, name, *limits):
        self.begun.append(name)
        if name not in LAST:
            assert self.may_decode.wait(PATIENCE_S)
            self.decoded.append(name)
        return decoded(source, name, *limits)

    def prepare(self, request, source, expert, *later, due_s=0.0):
        order = Order(expert, later, bytes_of(*later) if later else 0, due_s)
        self.preparation.prepare(request, source, str(request), order)

    def result(self, request, source, expert):
        return self.preparation.take(request, source, str(request), expert).future.result(PATIENCE_S)

    def held_bytes(self):
        """Memory for later steps, the present answer included where one has its form."""
        held = {}
        for image in self.preparation._images.values():
            own = image.task.future.result(0.0)
            arrays = [each.tensor for each in image.held.values()]
            arrays += [own.tensor] if image.form in image.wanted.later else []
            arrays += [] if image.pixels is None else [image.pixels.pixels]
            held |= {id(each): each.nbytes for each in arrays}
        return sum(held.values())

    def settle(self):
        """What is under way for later steps has been done, too: there is one thread for what a batch waits for, one
        for crops that are due later, and one for photographs."""
        nothing, (awaited, ahead) = np.zeros((4, 4, 3), dtype=np.uint8), LAST
        self.preparation.take(-1, nothing, awaited, SMALL).future.result(PATIENCE_S)
        self._settle_ahead(nothing, ahead)
        self.settle_photographs()

    def settle_photographs(self):
        self._settle_ahead(LARGE, LAST[1])

    def _settle_ahead(self, image, name):
        before = self.begun.count(name)
        self.preparation.prepare(-1, image, name, Order(SMALL, due_s=math.inf))
        until(lambda: self.begun.count(name) > before)
        self.preparation.forget(-1)


@pytest.fixture
def workplace(monkeypatch):
    workplace = Workplace(monkeypatch)
    yield workplace
    workplace.may_decode.set()
    workplace.preparation.stop()


def assert_prepared(prepared, source, expert):
    alone = backend_for(expert.architecture).prepare(expert, decoded(source, "it").pixels)
    assert torch.equal(prepared.tensor, alone.tensor)
    assert (prepared.image_height, prepared.pad_top) == (alone.image_height, alone.pad_top)


@pytest.mark.parametrize("later", [(OTHER,), (DETECTOR,), (ALIKE,), (ALIKE, OTHER), (OTHER, ALIKE, DETECTOR)])
@pytest.mark.parametrize("side", [20, 90, 130, 800])  # pixels that would fit beside nothing, beside one form, and not
def test_image_is_decoded_once_for_all_steps_and_held_within_the_counted_bytes(workplace, later, side):
    image = png(side, side)
    workplace.prepare(1, image, SMALL, *later)
    assert_prepared(workplace.result(1, image, SMALL), image, SMALL)
    workplace.settle()
    assert 0 < workplace.held_bytes() <= bytes_of(*later)
    for number, step in enumerate(later):
        workplace.prepare(1, image, step, *later[number + 1 :])
        assert_prepared(workplace.result(1, image, step), image, step)
        workplace.settle()
        assert workplace.held_bytes() <= (bytes_of(*later[number + 1 :]) if later[number + 1 :] else 0)
    assert workplace.decoded == ["1"]
    workplace.preparation.forget(1)
    assert workplace.preparation.requests == 0


def test_device_does_not_wait_for_a_thread_that_gives_way_at_the_same_image(workplace):
    image, entered, is_late, may_go_on = png(400, 400), [], threading.Event(), threading.Event()

    @contextmanager
    def preparing(request):
        entered.append(request)
        if len(entered) == 2:  # its first step is answered, and the later one is worked on
            is_late.set()
            assert may_go_on.wait(PATIENCE_S)
        yield

    workplace.preparation.watch = preparing
    workplace.prepare(1, image, SMALL, OTHER, due_s=1.0)
    assert is_late.wait(PATIENCE_S)
    workplace.result(1, image, SMALL)
    workplace.preparation.prepare(1, image, "1", Order(OTHER, due_s=2.0, gives_way=False))
    assert_prepared(workplace.result(1, image, OTHER), image, OTHER)
    may_go_on.set()
    workplace.settle()
    assert workplace.held_bytes() == 0


def test_forgotten_image_is_not_decoded_and_an_awaited_one_is_first(workplace):
    workplace.may_decode.clear()
    images = {number: png(20, 20, number) for number in range(1, 5)}
    for number, image in images.items():
        workplace.prepare(number, image, SMALL, due_s=float(number))
        until(lambda: workplace.begun)
    workplace.preparation.forget(2)
    taken = workplace.preparation.take(4, images[4], "4", SMALL)
    workplace.preparation.prioritise(4)
    workplace.preparation.prioritise(5)  # of nobody
    until(lambda: "4" in workplace.begun)
    workplace.may_decode.set()
    taken.future.result(PATIENCE_S)
    workplace.settle()
    workplace.result(3, images[3], SMALL)
    assert sorted(workplace.decoded) == ["1", "3", "4"]


def test_crops_wait_while_an_executor_computes_but_photographs_do_not(workplace):
    crop, photograph = png(20, 20), png(400, 400)
    with workplace.preparation.computing(1):
        workplace.prepare(1, crop, SMALL, due_s=1.0)
        workplace.prepare(2, photograph, SMALL, due_s=2.0)
        assert_prepared(workplace.result(2, photograph, SMALL), photograph, SMALL)
        with workplace.preparation.computing(1):
            pass  # that another one is over leaves the first
        workplace.settle_photographs()
        taken = workplace.preparation.take(1, crop, "1", SMALL)
        assert (workplace.decoded, taken.is_open, taken.is_short) == (["2"], True, True)
        taken.begin()  # by the batch itself
        assert_prepared(taken.future.result(0.0), crop, SMALL)
        workplace.prepare(3, crop, SMALL, due_s=3.0)
    assert_prepared(workplace.result(3, crop, SMALL), crop, SMALL)
    assert workplace.decoded == ["2", "1", "3"]


def test_memory_that_was_short_once_is_asked_for_again(workplace, monkeypatch):
    image, none = png(20, 20), Mock(side_effect=MemoryError)
    with monkeypatch.context() as short:
        short.setattr(agent.runtime.images.preparation, "decoded", none)
        workplace.prepare(1, image, SMALL)
        with pytest.raises(MemoryError):
            workplace.result(1, image, SMALL)
    assert_prepared(workplace.result(1, image, SMALL), image, SMALL)


def test_different_pixels_are_another_prepared_form():
    half = Normalization((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    specs = [
        {}, {"orientation": Orientation.EXIF}, {"normalize": half}, {"normalize": replace(half, scale=255)},
        {"normalize": replace(half, channels="bgr")}, {"fit": Fit.CROPPED, "resize": 40},
        {"fit": Fit.CROPPED, "resize": (40, 40)}, {"fit": Fit.CROPPED, "resize": 40, "interpolation": "bicubic"},
    ]  # fmt: skip
    assert len({prepared_form(expert("cls/a", 32, **spec)).name for spec in specs}) == len(specs)


def test_experts_of_one_kind_run_alike():
    plain = expert("x/y", 64)
    assert kind_name(plain, None) == kind_name(plain, "f" * 64) == "resnet18 64x64 imagenet"
    assert kind_name(replace(plain, stem="3x3", id="a/b"), None) == "resnet18 64x64 imagenet stem=3x3"
    program = kind_name(replace(plain, architecture="onnx"), "0123456789abcdef")
    assert program == "onnx 64x64 imagenet program=0123456789ab"


@pytest.mark.parametrize("wanted", Orientation)
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("least", [None, (64, 64)])
def test_box_lies_where_viewers_show_it_for_any_orientation(wanted, orientation, least):
    """The white part of an image, found in the pixels of a detector."""
    exif, pixels = Image.Exif(), np.zeros((240, 480, 3), np.uint8)
    exif[TAG] = orientation
    pixels[:120, :120] = 255
    content = stored(pixels, "jpeg", exif=exif, quality=95).content
    expert_of_it = expert("det/a", 96, "yolov8n", orientation=wanted)
    prepared = prepare(expert_of_it, decode_image(content, "it", least=least))
    rows, columns = np.nonzero(prepared.tensor.numpy().min(axis=0) > 0.7)
    row = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1, 0.9, 0)
    (box,) = prediction(expert_of_it, [tuple(map(float, row))], prepared).boxes
    with Image.open(io.BytesIO(content)) as image:
        seen = np.asarray(ImageOps.exif_transpose(image)).min(axis=2) > 127
    rows, columns = np.nonzero(seen)
    expected = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
    assert np.abs(np.subtract((box.left, box.top, box.right, box.bottom), expected)).max() <= 480 / 96


def test_jpeg_is_decoded_large_enough_for_the_cut():
    assert least_pixels(expert("cls/a", 32, fit=Fit.CROPPED, resize=40)) == (80, 80)
    assert least_pixels(expert("cls/a", 32, fit=Fit.CROPPED, resize=(40, 50))) == (80, 100)
    tall = replace(SMALL, input=InputSpec(32, 64, orientation=Orientation.EXIF))
    assert least_pixels(tall) == (128, 128)


def test_watcher_hears_of_a_batchs_request_before_its_preparation(workplace):
    told = []

    @contextmanager
    def preparing(request):
        told.append(request)
        yield

    with workplace.preparation.computing(1):
        workplace.prepare(7, png(20, 20), SMALL, due_s=1.0)
        taken = workplace.preparation.take(7, png(20, 20), "7", SMALL)
        workplace.preparation.watch = preparing
        taken.begin()
    assert isinstance(taken.future.result(PATIENCE_S), Prepared)
    assert told == []


def photograph(height=900, width=1200):
    y, x = np.mgrid[:height, :width]
    pixels = np.stack([(y // 5) % 256, (x // 7) % 256, (x + y) // 9 % 256], axis=2).astype(np.uint8)
    return stored(pixels, "jpeg", quality=92)


class TestSmallerDecoding:
    """JPEGs that are made smaller while they are decoded, for experts that were found to say the same of them."""

    @pytest.mark.parametrize("second", [ALIKE, OTHER, expert("cls/large", 200), DETECTOR])
    def test_later_step_sees_equal_pixels_held_or_decoded_again(self, workplace, second):
        image = photograph()
        workplace.preparation.scaled = frozenset({SMALL.id, second.id})
        workplace.prepare(1, image, SMALL, second)
        workplace.result(1, image, SMALL)
        workplace.settle()
        workplace.prepare(1, image, second)
        held, anew = workplace.result(1, image, second), workplace.result(2, image, second)
        assert torch.equal(held.tensor, anew.tensor)
        assert held.scale_x == anew.scale_x

    @pytest.mark.parametrize("proven", [SMALL, ALIKE])
    @pytest.mark.parametrize("size", [(300, 400), (900, 1200)])
    def test_image_is_not_decoded_smaller_for_two_experts_of_one_size(self, workplace, proven, size):
        image = photograph(*size)
        workplace.preparation.scaled = frozenset({proven.id})
        alone = {each.id: workplace.result(number, image, each).tensor for number, each in ((7, SMALL), (8, ALIKE))}
        assert not torch.equal(alone[SMALL.id], alone[ALIKE.id])
        workplace.prepare(1, image, SMALL, ALIKE)
        assert torch.equal(workplace.result(1, image, SMALL).tensor, alone[SMALL.id])
        workplace.settle()
        workplace.prepare(1, image, ALIKE)
        assert torch.equal(workplace.result(1, image, ALIKE).tensor, alone[ALIKE.id])

    def test_part_of_a_frame_is_not_decoded_smaller(self, workplace):
        workplace.preparation.scaled = frozenset({SMALL.id})
        part = FramePart(Frame(photograph(), None), (0, 0, 1000, 800), "R1")
        prepared = workplace.result(1, part, SMALL)
        alone = backend_for("resnet18").prepare(SMALL, decoded(photograph(), "it").pixels[:800, :1000].copy())
        assert torch.equal(prepared.tensor, alone.tensor)


def test_images_in_decoding_share_a_byte_budget_and_a_larger_one_goes_alone():
    gate = ByteGate(100)

    def decode():
        with gate.room_for(1000):
            return "alone"

    with ThreadPoolExecutor(1) as other:
        with gate.room_for(60), gate.room_for(40):
            larger = other.submit(decode)
            assert not wait([larger], timeout=0.05).done
        assert larger.result(PATIENCE_S) == "alone"
