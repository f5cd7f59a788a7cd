"""What is a small model whose layers are cut over ranks? A GPT, as a list of layers: Embed, Blocks, Head.

    layers = gpt(words=128, length=64, width=64, heads=4, depth=4, tp=mesh.group("tp"))

The list goes to `parallel.split` or into a Sequential: it is the same model for every size of tp that divides words and
heads. Its scores are those of this rank's part of the words, as parallel.vocab_cross_entropy takes them. A block has
two allreduces of batch x length x width in forward and two in backward.
"""

import torch.nn.functional as F
from torch import nn

from hvdlite.parallel import ColumnLinear, RowLinear, VocabEmbedding


class Embed(nn.Module):
    """Ids (batch, length) become (batch, length, width)."""

    def __init__(self, words, length, width, tp):
        super().__init__()
        self.words, self.places = VocabEmbedding(words, width, tp, name="words"), nn.Embedding(length, width)

    def forward(self, ids):
        return self.words(ids) + self.places.weight[: ids.shape[1]]


class Block(nn.Module):
    """Attention and a perceptron, (batch, length, width) both ways."""

    def __init__(self, width, heads, tp, name):
        super().__init__()
        self.heads, self.head = heads // tp.size(), width // heads
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = ColumnLinear(width, 3 * width, tp, unit=3 * self.head, name=f"{name}.qkv")
        self.out = RowLinear(width, width, tp, unit=self.head, name=f"{name}.out")
        self.up = ColumnLinear(width, 4 * width, tp, name=f"{name}.up")
        self.down = RowLinear(4 * width, width, tp, name=f"{name}.down")

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.one(x)).view(batch, length, self.heads, 3, self.head).permute(3, 0, 2, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, -1)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.two(x))))


class Head(nn.Module):
    """(batch, length, width) becomes (batch, length, this rank's part of the words)."""

    def __init__(self, words, width, tp):
        super().__init__()
        self.norm, self.scores = nn.LayerNorm(width), ColumnLinear(width, words, tp, bias=False, name="head")

    def forward(self, x):
        return self.scores(self.norm(x))


def gpt(words, length, width, heads, depth, tp):
    """The layers; their weights come from the current seed."""
    blocks = [Block(width, heads, tp, f"block{i}") for i in range(depth)]
    return [Embed(words, length, width, tp), *blocks, Head(words, width, tp)]
