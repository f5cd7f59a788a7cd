"""Trains with Lightning's Trainer: hvdlite is the backend, and logs the cost of each step.

    hvdlite-run -np 2 python examples/19_lightning.py
    torchrun --nproc-per-node 2 examples/19_lightning.py          # started by torchrun, or by Lightning itself:
    python examples/19_lightning.py

It needs Lightning: pip install "hvdlite[trainers]" scikit-learn
"""

import torch
import torch.nn.functional as F
from lightning import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from hvdlite.trainers.lightning import StepLoggerCallback

RANKS, EPOCHS, BATCH, SEED = 2, 10, 32, 1


class Digits(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: "list[torch.Tensor]", _: int) -> torch.Tensor:
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def validation_step(self, batch: "list[torch.Tensor]", _: int) -> None:
        images, labels = batch
        right = (self.net(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.002)


if __name__ == "__main__":
    torch.manual_seed(SEED)
    digits = load_digits()
    rows = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target).long())
    train, test = random_split(rows, [0.8, 0.2], torch.Generator().manual_seed(SEED))
    trainer = Trainer(
        accelerator="cpu", devices=RANKS, strategy=DDPStrategy(process_group_backend="hvdlite"), max_epochs=EPOCHS,
        logger=CSVLogger("logs"), callbacks=[StepLoggerCallback()], log_every_n_steps=10, enable_progress_bar=False,
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Digits(), DataLoader(train, BATCH, shuffle=True), DataLoader(test, BATCH))
    if trainer.is_global_zero:
        print(f"test accuracy {trainer.callback_metrics['accuracy']:.2%}; the steps are in {trainer.logger.log_dir}")
