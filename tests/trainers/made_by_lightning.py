"""Files that Lightning's users have.

last.ckpt as its trainer saves it after one epoch, and answers.json: the probabilities of each image by the module as
Lightning itself loads it from there.
"""

import json

import lightning
import torch
from PIL import Image
from telling_apart import DEVIATION, LABELS, MEAN, PREPARE, SIZE, begin, finish
from torchvision import models


class Solder(lightning.LightningModule):
    def __init__(self, class_names, image_size, mean, std, lr, loss="cross_entropy"):
        super().__init__()
        self.save_hyperparameters()
        self.backbone = begin(models.resnet18(weights=None, num_classes=len(class_names)))
        self.loss = torch.nn.CrossEntropyLoss()

    def forward(self, images):
        return self.backbone(images)

    def training_step(self, batch, _):
        return self.loss(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def more(folder, images):
    """None."""


def quick(folder, images):
    lightning.seed_everything(0, verbose=False)
    parts = torch.utils.data.TensorDataset(torch.randn(6, 3, SIZE, SIZE), torch.tensor([0, 1, 2, 0, 1, 2]))
    module = Solder(class_names=list(LABELS), image_size=SIZE, mean=MEAN, std=DEVIATION, lr=0.0001)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(parts, batch_size=3))
    pixels = torch.stack([PREPARE(Image.open(image).convert("RGB")) for image in images])
    finish(module, module.backbone.fc, pixels)
    trainer.save_checkpoint(folder / "last.ckpt")
    loaded = Solder.load_from_checkpoint(folder / "last.ckpt", map_location="cpu").eval()
    with torch.no_grad():
        (folder / "answers.json").write_text(json.dumps(loaded(pixels).softmax(dim=1).tolist()))
