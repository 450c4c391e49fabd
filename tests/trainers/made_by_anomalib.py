"""Files that Anomalib's users have: models fitted by its engine to drawn parts, without pretrained weights.

MODEL/weights/onnx/model.onnx, and of PaDiM weights/torch/model.pt; MODEL is patchcore or padim. parts/ has unseen
images, and MODEL/answers.json Anomalib's prediction for each: name, score and whether it is anomalous.
"""

import json

import numpy as np
import torch
from anomalib.data import Folder
from anomalib.engine import Engine
from anomalib.models import Padim, Patchcore
from PIL import Image

SIZE = 64
PARTS = {"good": 8, "bad": 4, "other_good": 4, "parts/good": 3, "parts/bad": 4}
MODELS = {
    "padim": (Padim, {"layers": ["layer1", "layer2"], "n_features": 20}),
    "patchcore": (Patchcore, {"layers": ["layer2", "layer3"], "coreset_sampling_ratio": 0.1, "num_neighbors": 3}),
}


def quick(folder, images):
    make("patchcore", folder, folder / "patchcore")


def more(folder, images):
    engine, model = make("padim", folder, folder / "padim")
    engine.export(model, "torch", export_root=folder / "padim")


def make(name, parts, folder):
    draw_parts(parts)
    torch.manual_seed(0)
    build, options = MODELS[name]
    model = build(
        backbone="resnet18", pre_trained=False, visualizer=False,
        pre_processor=build.configure_pre_processor((SIZE, SIZE)), **options,
    )  # fmt: skip
    engine = Engine(
        default_root_dir=folder / "run", accelerator="cpu", devices=1, max_epochs=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    seen = Folder(
        name="parts", root=parts, normal_dir="good", abnormal_dir="bad", normal_test_dir="other_good",
        train_batch_size=4, eval_batch_size=4, num_workers=0,
    )  # fmt: skip
    engine.fit(model, datamodule=seen)
    engine.export(model, "onnx", export_root=folder, input_size=(SIZE, SIZE))
    answers = [answer for kind in ("good", "bad") for answer in own_answers(engine, model, parts / "parts" / kind)]
    (folder / "answers.json").write_text(json.dumps(answers))
    return engine, model


def draw_parts(folder):
    """Boards with a pad; bad ones have a bright spot as well."""
    random = np.random.default_rng(0)
    for place, count in PARTS.items():
        (folder / place).mkdir(parents=True)
        for number in range(count):
            pixels = random.integers(60, 90, (SIZE, SIZE, 3)).astype(np.uint8)
            pixels[16:48, 16:48, 1] += 60
            if place.endswith("bad"):
                top, left = random.integers(4, 40, 2)
                pixels[top : top + 16, left : left + 16] = (250, 240, 30)
            Image.fromarray(pixels).save(folder / place / f"{place.replace('/', '-')}-{number}.png")


def own_answers(engine, model, images):
    found = engine.predict(model, data_path=images)
    return [
        {"image": str(path), "score": float(score), "is_anomalous": bool(label)}
        for batch in found
        for path, score, label in zip(
            batch.image_path, batch.pred_score.flatten(), batch.pred_label.flatten(), strict=True
        )
    ]
