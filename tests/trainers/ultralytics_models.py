"""Detectors of ultralytics: trained by its trainer, exported by its exporter."""

import warnings
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageDraw

import experts.backends.vision.detector  # noqa: F401  # before ultralytics: then it neither calls home nor writes there
from tests.experts.conftest import spread_scores, trained_looking

LABELS = ("aligned", "shifted", "tilted")
SIZE = 64
OVERLAP = 0.45  # of two boxes, above which only the surer is kept: the line's; ultralytics' default is 0.7


def draw_dataset(folder):
    """A data set of ultralytics': a few pictures with a square on each, and where it is."""
    for part in ("train", "val"):
        (folder / "images" / part).mkdir(parents=True)
        (folder / "labels" / part).mkdir(parents=True)
        for number in range(4):
            image = Image.new("RGB", (SIZE, SIZE), (30, 90 + 10 * number, 40))
            ImageDraw.Draw(image).rectangle((16, 16, 47, 40 + number), fill=(200, 200, 60 * (number % 3)))
            image.save(folder / "images" / part / f"{number}.png")
            (folder / "labels" / part / f"{number}.txt").write_text(f"{number % 3} 0.5 0.45 0.5 0.4\n")
    names = "".join(f"  {number}: {label}\n" for number, label in enumerate(LABELS))
    (folder / "data.yaml").write_text(f"path: {folder}\ntrain: images/train\nval: images/val\nnames:\n{names}")
    return folder / "data.yaml"


def train(architecture, folder):
    """best.pt after one epoch, and unfinished.pt: last.pt during training.

    Training begins with scores that make boxes; one epoch of four pictures would not reach them.
    """
    from ultralytics import YOLO

    model = YOLO(f"{architecture}.yaml", verbose=False)
    model.add_callback("on_pretrain_routine_end", _begin_with_boxes)
    model.add_callback(
        "on_model_save", lambda trainer: (folder / "unfinished.pt").write_bytes(trainer.last.read_bytes())
    )
    with torch.random.fork_rng():
        model.train(
            data=str(draw_dataset(folder / "data")), epochs=1, imgsz=SIZE, batch=4, device="cpu", workers=0,
            plots=False, val=False, project=str(folder), name="run", verbose=False, seed=0, amp=False,
        )  # fmt: skip
    (folder / "best.pt").write_bytes(model.trainer.best.read_bytes())


def _begin_with_boxes(trainer):
    spread_scores(trainer.model.eval())
    trainer.model.train()
    trainer.ema.ema.load_state_dict(trainer.model.state_dict())


def export(best, file, *, nms):
    """Its ONNX export, which leaves boxes out by itself with ``nms``."""
    from ultralytics import YOLO

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own exporter
        written = Path(YOLO(best).export(format="onnx", imgsz=SIZE, simplify=False, nms=nms, iou=OVERLAP))
    written.rename(file)


def own_boxes(file, images):
    """Boxes that ultralytics finds in each image, in pixels of the image.

    Images are padded with grey to a square, as exports and the line do; with its weights ultralytics pads less.
    """
    from ultralytics import YOLO

    found = YOLO(file, task="detect").predict(
        [str(image) for image in images],
        imgsz=SIZE, conf=0.25, iou=OVERLAP, max_det=1000, rect=False, device="cpu", verbose=False,
    )  # fmt: skip
    return [each.boxes for each in found]


def export_rtdetr(folder, labels, *, is_former=False):
    """rtdetr.onnx, which finds boxes of all sizes. ``is_former``: as it was before ultralytics 8.4."""
    from ultralytics import RTDETR
    from ultralytics.nn.modules.head import RTDETRDecoder
    from ultralytics.nn.tasks import RTDETRDetectionModel

    torch.manual_seed(0)
    model = trained_looking(RTDETRDetectionModel(_small_rtdetr(), nc=len(labels), verbose=False), 0)
    _spread_queries(model)
    model.names, model.task, model.pt_path = dict(enumerate(labels)), "detect", folder / "rtdetr.pt"
    facade = RTDETR("yolov8n-rtdetr.yaml")
    model.args, facade.model = facade.model.args, model
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        if is_former:
            patch.setattr(RTDETRDecoder, "postprocess", _as_rtdetr_was)
        facade.export(format="onnx", imgsz=160, simplify=False)


def _small_rtdetr():
    """Ultralytics' own, whose decoder has three of six layers: they take most of an export's time."""
    from ultralytics.nn.tasks import yaml_model_load

    document = yaml_model_load("yolov8n-rtdetr.yaml")
    width, queries, points, heads, layers = 256, 300, 4, 8, 3
    assert document["head"][-1][2:] == ["RTDETRDecoder", ["nc"]]
    document["head"][-1][3] += [width, queries, points, heads, layers]
    return document


def _as_rtdetr_was(self, boxes, scores):
    return torch.cat((boxes, scores), dim=-1)


def _spread_queries(model):
    """Give it scores around the confidence that a box needs."""
    last = model.model[-1].dec_score_head[-1]
    seen = []
    with torch.no_grad(), last.register_forward_hook(lambda _, __, logits: seen.append(logits)):
        model(torch.rand((1, 3, 160, 160), generator=torch.Generator().manual_seed(0)))
        deviation, mean = torch.std_mean(seen[0])
        last.weight.mul_(1.5 / deviation)
        last.bias.sub_(mean).mul_(1.5 / deviation).sub_(3)


def save(name, file):
    from ultralytics import RTDETR, YOLO

    (RTDETR if "rtdetr" in name else YOLO)(f"{name}.yaml").save(file)
    return file
