"""The classic Horovod recipe for MNIST, on scikit-learn's digits, as its users have it: nothing here knows of hvdlite.

Run by test_as_horovod.py under `hvdlite-run --as-horovod`. Prints the accuracy, averaged over the ranks, on rank 0.
"""

import argparse

import horovod.torch as hvd
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.mpi_ops import Average
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--seed", type=int, default=42)
args = parser.parse_args()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 16, kernel_size=3)
        self.norm = hvd.SyncBatchNorm(16)
        self.fc = nn.Linear(16 * 3 * 3, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.norm(self.conv(x)), 2))
        return F.log_softmax(self.fc(x.view(-1, 16 * 3 * 3)), dim=1)


def metric_average(val, name):
    tensor = torch.tensor(val)
    avg_tensor = hvd.allreduce(tensor, name=name, op=Average)
    return avg_tensor.item()


hvd.init()
assert not hvd.mpi_enabled() or hvd.mpi_threads_supported()
torch.manual_seed(args.seed + hvd.rank())
torch.set_num_threads(1)

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
train_dataset = torch.utils.data.TensorDataset(images[:1500], labels[:1500])
test_dataset = torch.utils.data.TensorDataset(images[1500:], labels[1500:])
train_sampler = torch.utils.data.distributed.DistributedSampler(train_dataset, num_replicas=hvd.size(), rank=hvd.rank())
train_loader = torch.utils.data.DataLoader(train_dataset, batch_size=args.batch_size, sampler=train_sampler)
test_sampler = torch.utils.data.distributed.DistributedSampler(test_dataset, num_replicas=hvd.size(), rank=hvd.rank())
test_loader = torch.utils.data.DataLoader(test_dataset, batch_size=100, sampler=test_sampler)

model = Net()
lr_scaler = hvd.size()
optimizer = optim.SGD(model.parameters(), lr=args.lr * lr_scaler, momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.Average)
assert isinstance(optimizer, optim.SGD)

try:
    for epoch in range(1, args.epochs + 1):
        model.train()
        train_sampler.set_epoch(epoch)
        for data, target in train_loader:
            optimizer.zero_grad()
            F.nll_loss(model(data), target).backward()
            optimizer.step()
except HorovodInternalError:
    print("a rank was lost")
    raise

model.eval()
test_accuracy = 0.0
with torch.no_grad():
    for data, target in test_loader:
        test_accuracy += model(data).argmax(1).eq(target).float().sum().item()
test_accuracy = metric_average(test_accuracy / len(test_sampler), "avg_accuracy")
if hvd.rank() == 0:
    print(f"accuracy {100.0 * test_accuracy:.1f} % on {hvd.size()} ranks", flush=True)
