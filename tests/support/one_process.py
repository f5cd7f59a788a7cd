"""What must a pipeline's weights be, bit by bit? The papers' recurrences in one process, version by version.

Nothing here knows schedules, edges or policies. Weights are lists of [weight, bias] by stage, one entry for each
version; a gradient takes those versions that the recurrence names. PipeMare has a backward of its own: each layer
again, at its saved input, with the weights of the backward.
"""

import hashlib

import torch
import torch.nn.functional as F

WIDTH, ROWS, LR, DECAY = 24, 4, 0.05, 0.1353352832366127


def layers(stages):
    torch.manual_seed(7)
    return [layer for _ in range(stages) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())]


def data(n, place, m):
    """Mini-batch n of the replica at this place along the data axis."""
    g = torch.Generator().manual_seed(1000 * n + place)
    return torch.randn(m * ROWS, WIDTH, generator=g), torch.randint(0, WIDTH, (m * ROWS,), generator=g)


def optimizer(params, update):
    return torch.optim.SGD(params, lr=LR) if update == "pipemare" else torch.optim.AdamW(params, lr=LR, foreach=False)


def sha(params):
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in params)).hexdigest()


def versions_seen(update, k, m, p):
    """(those that the forward of micro-batch k sees, by stage), from the recurrences."""
    if update in ("flush", "2bw"):
        return [max(k // m - (update == "2bw"), 0)] * p
    return [max(0, k - p + 1) // m if update == "vertical" else max(0, k - (p - i) + 1) // m for i in range(p)]


def trained(update, p, m, batches, replicas=1, anneal=0):
    """-> the linear layers of all stages after so many mini-batches."""
    linears = layers(p)[::2]
    optimizers = [optimizer(linear.parameters(), update) for linear in linears]
    past = [[[q.detach().clone() for q in linear.parameters()]] for linear in linears]
    drift = [[torch.zeros_like(q) for q in linear.parameters()] for linear in linears]
    tau = [(p - i - 1) / m if update == "pipemare" else 0.0 for i in range(p)]
    for n in range(batches):
        sums = None
        for place in range(replicas):
            xs, ys, total = *data(n, place, m), [None] * p
            for j in range(m):
                seen = versions_seen(update, n * m + j, m, p)
                part = slice(j * ROWS, (j + 1) * ROWS)
                grads = _gradients(xs[part], ys[part], m, p, seen, past, drift, tau, n)
                total = [g if t is None else [a + b for a, b in zip(t, g)] for t, g in zip(total, grads)]
            sums = total if sums is None else [[a + b for a, b in zip(u, v)] for u, v in zip(sums, total)]
        for i, linear in enumerate(linears):
            for q, g in zip(linear.parameters(), sums[i]):
                q.grad = g / replicas
            share = min(n / anneal, 1) if anneal else 1.0
            optimizers[i].param_groups[0]["lr"] = LR * max(tau[i], 1.0) ** (share - 1.0)
            optimizers[i].step()
            new = [q.detach().clone() for q in linear.parameters()]
            gamma = DECAY ** (1 / tau[i]) if tau[i] else 0.0
            for d, q, old in zip(drift[i], new, past[i][-1]):
                d.mul_(gamma).add_(q - old, alpha=1 - gamma)
            past[i].append(new)
    return linears


def _gradients(x, y, m, p, seen, past, drift, tau, n):
    inputs, middles = [], []
    for i in range(p):
        inputs.append(x)
        middles.append(F.linear(x, *past[i][seen[i]]))
        x = torch.tanh(middles[-1])
    x = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(F.cross_entropy(x, y) / m, x)
    grads = [None] * p
    for i in reversed(range(p)):
        h = middles[i].detach().requires_grad_()
        (g,) = torch.autograd.grad(torch.tanh(h), h, g)
        weights = past[i][seen[i]]
        if tau[i]:
            newest = past[i][-1]
            age = n - seen[i]  # in the fill a micro-batch is younger than in the steady state
            weights = [q - (tau[i] if age >= int(tau[i]) else age) * d for q, d in zip(newest, drift[i])]
        w, b, a = (t.detach().requires_grad_() for t in (*weights, inputs[i]))
        *grads[i], g = torch.autograd.grad(F.linear(a, w, b), (w, b, a), g)
    return grads
