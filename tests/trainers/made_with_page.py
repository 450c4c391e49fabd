"""Run by an interpreter that has the trainer: `made_with_page.py TRAINER FOLDER`.

FOLDER gets a model, 20 images in val/, and answers.json: the trainer's own, written by the lines of docs/models.md.
"""

import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from telling_apart import LABELS, PREPARE, begin, finish

ROOT = Path(__file__).parents[2]
COUNT, SIZE = 20, 64


def lines_of(trainer):
    """The lines of the page that write the answers of this trainer."""
    page = (ROOT / "docs" / "models.md").read_text("utf-8").partition("## The trainer's own answers")[2]
    first, others = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[:2]
    sections = dict(re.findall(r"^# (\w+)\n(.*?)(?=^# |\Z)", others, re.DOTALL | re.MULTILINE))
    if trainer not in {name.lower() for name in sections}:
        return re.sub(rf"^# {trainer}: (?=\w+ = )", "", first, flags=re.MULTILINE | re.IGNORECASE)
    own = next(lines for name, lines in sections.items() if name.lower() == trainer)
    begin, end = first.partition("\n\n")[0], first[first.rindex("\npathlib.") :]
    return f"{begin}\nfiles, rows = {first.partition('files, rows = ')[2].partition(chr(10))[0]}\n{own}{end}"


def draw(folder):
    """Images with fine and coarse structure: wide and high ones, which a model's square shows in different ways."""
    random = np.random.default_rng(0)
    folder.mkdir()
    for number in range(COUNT):
        width, height = ((120 + number, 100), (100, 120 + number))[number % 2]
        coarse = Image.fromarray(random.integers(0, 200, (5, 6, 3), dtype=np.uint8)).resize((width, height), 0)
        fine = random.integers(0, 56, (height, width, 3), dtype=np.uint8)
        Image.fromarray(np.asarray(coarse) + fine).save(folder / f"{number:02}.png")
    return sorted(folder.iterdir())


def by_torchvision(folder, images):
    from tests.trainers.torchvision_models import trained

    network = trained("resnet18", images)
    torch.save({"model_state_dict": network.state_dict()}, "checkpoint.pt")
    return {"model": network, "transform": PREPARE, "classes": LABELS}


def by_lightning(folder, images):
    import made_by_lightning

    made_by_lightning.quick(folder, images)
    return {"Solder": made_by_lightning.Solder, "transform": PREPARE, "classes": LABELS}


def by_timm(folder, images):
    import made_by_timm

    network, _ = made_by_timm.with_numbers(images)
    torch.save(network, "whole.pt")
    return {"model": network, "timm": made_by_timm.timm, "classes": LABELS}


def by_transformers(folder, images):
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    torch.manual_seed(0)
    kind = ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, image_size=SIZE,
        patch_size=8, id2label=dict(enumerate(LABELS)), attn_implementation="eager",
    )  # fmt: skip
    network, processor = ViTForImageClassification(kind).eval(), ViTImageProcessor(size={"height": SIZE, "width": SIZE})
    pixels = processor([Image.open(image) for image in images], return_tensors="pt")["pixel_values"]
    finish(logits_of(network), network.classifier, pixels)
    network.save_pretrained("FOLDER")
    processor.save_pretrained("FOLDER")
    Path("exported").mkdir()  # as Optimum fills it
    for name in ("config.json", "preprocessor_config.json"):
        shutil.copy(Path("FOLDER") / name, "exported")
    torch.onnx.export(
        logits_of(network), (pixels[:1],), "exported/model.onnx", input_names=["pixel_values"], verbose=False
    )
    return {}


def logits_of(network):
    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network

        def forward(self, pixel_values):
            return self.network(pixel_values).logits

    return Logits().eval()


def by_anomalib(folder, images):
    import made_by_anomalib

    engine, model = made_by_anomalib.make("padim", folder, folder / "padim")
    for share, image in zip(np.linspace(0, 1, COUNT), images, strict=True):  # more and more of a defect
        good, bad = (Image.open(folder / kind / f"{kind}-0.png") for kind in ("other_good", "bad"))
        Image.blend(good, bad, share).resize((97, 80), Image.Resampling.BICUBIC).save(image)
    return {"engine": engine, "model": model}


def by_ultralytics(folder, images):
    from ultralytics import YOLO
    from ultralytics.data.augment import LetterBox

    from tests.trainers.ultralytics_models import train

    train("yolo11n", folder)
    whole, fit = YOLO("best.pt"), LetterBox((SIZE, SIZE), auto=False)
    pixels = np.stack([fit(image=np.asarray(Image.open(image))) for image in images]).transpose(0, 3, 1, 2)
    tell_boxes_apart(whole.model.float(), torch.from_numpy(pixels / np.float32(255)))
    whole.save("best.pt")
    return {}


def tell_boxes_apart(model, pixels):
    """Statistics as training on these images would leave them, and scores from little to much for each label."""
    seen = []
    with torch.no_grad():
        begin(model.train())
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.reset_running_stats()
        for _ in range(6):
            model(pixels)
        hooks = [
            branch[-1].register_forward_hook(lambda last, _, logits: seen.append((last, logits)))
            for branch in model.eval().model[-1].cv3
        ]
        model(pixels)
        for hook in hooks:
            hook.remove()
        for last, logits in seen:
            deviation, mean = torch.std_mean(logits.transpose(0, 1).flatten(1), dim=1)
            last.weight.div_(deviation[:, None, None, None])
            last.bias.sub_(mean).div_(deviation).sub_(3)
        for branch in model.model[-1].cv2:  # of small boxes
            branch[-1].bias.copy_(-torch.arange(16).repeat(4) / 2)


def main(trainer, folder):
    sys.path.append(str(ROOT))
    torch.set_num_threads(1)
    os.chdir(folder)
    names = globals()[f"by_{trainer}"](folder, draw(folder / "val"))
    exec(lines_of(trainer), names)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
