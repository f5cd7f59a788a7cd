"""Trains a tiny language model with transformers' Trainer, with hvdlite as the backend.

    hvdlite-run -np 2 python examples/21_transformers.py
    torchrun --nproc-per-node 2 examples/21_transformers.py

The model is made from its configuration, so nothing is downloaded. It learns to count, modulo 32, from the first number
of a row. It needs transformers and Accelerate: pip install "hvdlite[trainers]"
"""

import tempfile

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from hvdlite.trainers.transformers import StepLoggerCallback

WORDS, LENGTH, STEPS, SEED = 32, 16, 150, 1


def rows() -> "list[dict[str, torch.Tensor]]":
    """Rows that begin anywhere and count on."""
    counted = (torch.arange(WORDS).view(-1, 1) + torch.arange(LENGTH)) % WORDS
    return [{"input_ids": row, "labels": row} for row in counted.repeat(8, 1)]


def train(folder: str) -> None:
    set_seed(SEED)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": WORDS, "n_positions": LENGTH}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    arguments = TrainingArguments(
        folder, use_cpu=True, max_steps=STEPS, per_device_train_batch_size=8, learning_rate=0.01, logging_steps=50,
        ddp_find_unused_parameters=False, report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows(), eval_dataset=rows()[:WORDS])
    trainer.add_callback(StepLoggerCallback(trainer.log, every=50))
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"loss {loss:.4f}")


if __name__ == "__main__":
    dist.init_process_group("hvdlite")
    with tempfile.TemporaryDirectory() as folder:
        train(folder)
    dist.destroy_process_group()
