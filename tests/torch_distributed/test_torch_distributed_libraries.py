"""Accelerate, Lightning and transformers train over backend "hvdlite", on two ranks, to Gloo's weights, bit by bit.

None of them knows the backend. Lightning is told its name; the others use the process group that the script has begun.
Models are tiny and random, and nothing is downloaded. test_trainers.py has a shorter form, for every check: here are
also BatchNorm, clipping, accumulation and the trainers' own means.
"""

import sys

import overlays
import pytest
from launching import Launch
from ranks import everything

torch = pytest.importorskip("torch")

SCRIPT = """
import os, sys, torch, torch.distributed as dist
path, name = sys.argv[1:]
rows = torch.utils.data.TensorDataset(*torch.randn(2, 64, 8, generator=torch.Generator().manual_seed(1)))
torch.manual_seed(2)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
BODY
assert dist.get_backend() == name and dist.get_world_size() == 2
if dist.get_rank() == 0:
    torch.save(torch.cat([each.reshape(-1).double() for each in model.state_dict().values()]), path)
dist.destroy_process_group()
"""
ACCELERATE = """
from accelerate import Accelerator
dist.init_process_group(name)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
loader = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True)
wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2):
    for x, y in loader:
        with accelerator.accumulate(wrapped):
            accelerator.backward((wrapped(x) - y).square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
assert accelerator.gather_for_metrics([accelerator.process_index], True) == [0, 1]
"""
LIGHTNING = """
import lightning
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model
    def training_step(self, batch, _):
        loss = (self.model(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy=lightning.pytorch.strategies.DDPStrategy(process_group_backend=name),
    max_epochs=2, logger=False, default_root_dir=os.path.dirname(path), gradient_clip_val=1.0,
)
trainer.fit(Module(), torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True))
assert trainer.world_size == 2 and trainer.callback_metrics["loss"] > 0
"""
TRANSFORMERS = """
import transformers
dist.init_process_group(name)
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32))
tokens = torch.randint(32, (48, 12), generator=torch.Generator().manual_seed(3))
rows = [{"input_ids": row, "labels": row} for row in tokens]
settings = transformers.TrainingArguments(
    os.path.dirname(path), use_cpu=True, max_steps=6, per_device_train_batch_size=4, report_to="none", save_steps=3
)
trainer = transformers.Trainer(model, settings, train_dataset=rows, eval_dataset=rows[:10])
trainer.train()
assert trainer.accelerator.num_processes == 2 and trainer.evaluate()["eval_loss"] > 0
"""
LIBRARIES = {"accelerate": ACCELERATE, "lightning": LIGHTNING, "transformers": TRANSFORMERS}


@pytest.mark.parametrize("library", everything(*LIBRARIES))
def test_weights_are_gloos(library, tmp_path):
    path = overlays.with_path(overlays.library("trainers"))["PYTHONPATH"]
    environ, weights = {"PYTHONPATH": path}, []
    for name in ("gloo", "hvdlite"):
        path, program = tmp_path / name, SCRIPT.replace("BODY", LIBRARIES[library])
        with Launch("-np", 2, sys.executable, "-c", program, path, name, merged=True, cold=True, **environ) as job:
            assert job.wait(200) == 0, job.out
        weights.append(torch.load(path))
    assert torch.equal(*weights)
