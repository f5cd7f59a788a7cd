"""PowerSGD: gradients of matrices travel as two thin factors.

T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", 2019. Of a gradient M, reshaped to a matrix m x k, one step of the power iteration is made: P is the sum
over ranks of M Q, its columns are made orthonormal, and Q becomes the sum of M^T P. The result is P Q^T. Q is kept for
the next round. What a rank's M has lost is its residual.

P and Q of all matrices of a bucket travel as one tensor each. All ranks must compute the same bits from the same sums,
so they compare a digest of a product before they compress (`setting`).
"""

from __future__ import annotations

import functools
import math
import zlib
from typing import TYPE_CHECKING, Any

import torch

from ...lifecycle.init import incarnations
from ...ops import Sum
from ..ops import plain
from .carrier import Gradients
from .chain import Chain, nothing
from .residuals import Residuals, is_plain, saved_name

if TYPE_CHECKING:
    from ..optimizer.reducer import Exchange

_BUCKET_BYTES = 25 << 20


class PowerSGD:
    """Compression of gradients of matrices to two factors of low rank, for ``DistributedOptimizer``.

    The factors of an m x k gradient have ``(m + k) * rank`` elements. What is lost is kept on each rank and added to
    its next gradient. Gradients of one dimension, and those that gain less than ``least_gain``, travel as they are.
    The algorithm is that of Vogels et al., "PowerSGD" (2019). Use it with several hosts: inside one host, gradients
    travel as they are.

    Args:
        rank (int): rank of the approximation. Default: 4.
        start_after (int): steps at the beginning of a job whose gradients travel as they are. Default: 1000.
        least_gain (float): least factor by which the factors must be smaller than the gradient. Default: 2.

    Raises:
        ValueError: for a value that is too small.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(64, 64))
        >>> optimizer = torch.optim.SGD([weight], lr=1.0)
        >>> optimizer = hvd.DistributedOptimizer(optimizer, [("weight", weight)], compression=hvd.PowerSGD(rank=2))
        >>> weight.sum().backward()
    """

    def __init__(self, rank: int = 4, start_after: int = 1000, least_gain: float = 2.0) -> None:
        for name, value, least in (("rank", rank, 1), ("start_after", start_after, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"PowerSGD({name}={value!r}) must be a whole number of at least {least} [HVD208]")
        if not isinstance(least_gain, (int, float)) or not least_gain >= 1:
            raise ValueError(f"PowerSGD(least_gain={least_gain!r}) must be a number of at least 1 [HVD208]")
        self.rank, self.start_after, self.least_gain = rank, start_after, float(least_gain)

    def __repr__(self) -> str:
        return f"PowerSGD(rank={self.rank}, start_after={self.start_after}, least_gain={self.least_gain:g})"


class PowerSGDCompressor:
    """What `compression=PowerSGD(...)` is in an optimizer."""

    exact_mean = False  # the result is not the mean of what the ranks give
    needs_all = False

    def __init__(self, spec: PowerSGD) -> None:
        self.spec = spec
        self.residuals = Residuals()
        self.ranks: dict[int, int] = {}  # of parameters that have another rank than the spec's
        self.rounds = 0  # since the beginning, or since the state that was loaded was saved
        self._q: dict[int, torch.Tensor] = {}
        self._incarnation = incarnations()

    def __repr__(self) -> str:
        return repr(self.spec)

    def bind(self, exchange: Exchange) -> None:
        """It serves this optimizer."""
        self.process_set, self._names = exchange.wire.process_set, exchange.wire.names
        self._parameters = exchange.wire.parameters

    def takes(self, parameter: torch.Tensor) -> bool:
        """A matrix that gains enough."""
        if parameter.dim() < 2 or not parameter.numel():
            return False
        m, k = parameter.shape[0], parameter.numel() // parameter.shape[0]
        return m * k >= self.spec.least_gain * (m + k) * min(self.spec.rank, m, k)

    def cap_bytes(self) -> int:
        """Of a bucket."""
        return _BUCKET_BYTES

    def setting(self) -> str:
        """It changes with each round: ranks must have the same Q."""
        return f"{self.spec!r} after {self.rounds} steps, arithmetic {_arithmetic():08x}"

    def begin(self) -> bool:
        """Whether this round is compressed."""
        if self._incarnation != incarnations():
            self.take({})
        self.residuals.begin()
        self.rounds += 1
        return self.rounds + 1 > self.spec.start_after  # the first step of a job is not counted

    def shared(self) -> dict[str, Any]:
        """What all ranks have in common, for a state. Of another job it is nothing: ranks may have joined."""
        if self._incarnation != incarnations():
            self.take({})
        q = {saved_name(self._names[number]): each.clone() for number, each in self._q.items()}
        return {"rounds": self.rounds, "q": q}

    def fits(self, shared: dict[str, Any]) -> bool:
        """Whether there is a count of rounds, and each Q has the shape of a parameter's."""
        rounds, q = shared.get("rounds"), shared.get("q")
        if type(rounds) is not int or not 0 <= rounds < 1 << 62 or not isinstance(q, dict):
            return False
        shape_of = {saved_name(name): each.shape for name, each in zip(self._names, self._parameters)}
        return all(is_plain(each) and _is_q(each, shape_of.get(name, ())) for name, each in q.items())

    def take(self, shared: dict[str, Any]) -> None:
        """What `shared` has returned; nothing: begin anew."""
        self._incarnation = incarnations()
        self.rounds = int(shared.get("rounds", 0))
        number_of = {saved_name(name): number for number, name in enumerate(self._names)}
        self._q = {
            number_of[name]: each.detach().to("cpu", copy=True)
            for name, each in shared.get("q", {}).items()
            if name in number_of
        }

    def _q_of(self, number: int, k: int, rank: int) -> torch.Tensor:
        """Of whole numbers first, which are the same on every processor. Another rank keeps the columns it can."""
        known = self._q.get(number)
        if known is not None and known.shape == (k, rank):
            return known
        chance = torch.Generator().manual_seed(7 + number)
        made = torch.randint(-1000, 1001, (k, rank), generator=chance).float() / 1000
        if known is not None and known.shape[0] == k:
            made[:, : known.shape[1]] = known[:, :rank]
        return made

    def job(self, gradients: Gradients) -> Chain:
        """P of a bucket, then Q, then the products."""
        matrices, qs = [], []
        for number, value in zip(gradients.numbers, gradients.values):
            matrix = value.reshape(value.shape[0], -1)
            rank = min(self.ranks.get(number, self.spec.rank), *matrix.shape)
            left = self.residuals.of(number, matrix.numel()).view(matrix.shape)
            matrices.append(matrix * gradients.prescale + left)
            qs.append(self._q_of(number, matrix.shape[1], rank))
        ps: list[torch.Tensor] = []
        mine: list[torch.Tensor] = []  # this rank's part of Q

        first = torch.cat([(matrix @ q).reshape(-1) for matrix, q in zip(matrices, qs)])

        def send_p(_: Any) -> Any:
            return plain.allreduce_async_(
                first.clone(), name=gradients.name, op=Sum, process_set=self.process_set, priority=gradients.priority
            )

        def send_q(total: torch.Tensor) -> Any:
            shapes = [(matrix.shape[0], q.shape[1]) for matrix, q in zip(matrices, qs)]
            ps[:] = [orthonormal(part.clone()) for part in _parts(total, shapes)]
            mine[:] = [matrix.T @ p for matrix, p in zip(matrices, ps)]
            parts = [part.reshape(-1) for part in mine]
            name = f"{gradients.name}.q"
            return plain.allreduce_async_(torch.cat(parts), name=name, op=Sum, process_set=self.process_set)

        def finish(total: torch.Tensor) -> None:
            sums = _parts(total, [tuple(q.shape) for q in qs])
            for at, (number, value) in enumerate(zip(gradients.numbers, gradients.values)):
                left = (matrices[at] - ps[at] @ mine[at].T).reshape(-1)
                self._finish(number, value, left, ps[at], sums[at], gradients.factor)

        return Chain([send_p, send_q], finish)

    def _finish(
        self, number: int, value: torch.Tensor, left: torch.Tensor, p: torch.Tensor, q: torch.Tensor, factor: float
    ) -> None:  # fmt: skip
        torch.mm(p * factor, q.T, out=value.view(p.shape[0], -1))
        largest = float(q.abs().max()) if q.numel() else 0.0
        if math.isfinite(largest):  # else some rank's gradient is not finite, and nothing of it is kept
            self.residuals.put(number, left)
            if largest > 0:
                self._q[number] = q / largest

    def refusal(self, name: str) -> Any:
        """In the place of P."""
        return plain.allreduce_async_(nothing(), name=name, op=Sum, process_set=self.process_set)


def _is_q(tensor: torch.Tensor, shape: Any) -> bool:
    fits = len(shape) > 1 and tensor.dim() == 2 and tensor.shape[0] == math.prod(shape[1:])
    return fits and 0 < tensor.shape[1] <= min(shape[0], tensor.shape[0]) and bool(tensor.isfinite().all())


def orthonormal(p: torch.Tensor) -> torch.Tensor:
    """The columns of p, orthonormal, in place (Gram-Schmidt, twice). A column that is nothing becomes zero, not NaN."""
    for i in range(p.shape[1]):
        for _ in range(2):
            if i:
                p[:, i] -= p[:, :i] @ (p[:, :i].T @ p[:, i])
        norm = float(p[:, i].norm())
        p[:, i] = p[:, i] / norm if not norm <= 1e-20 else 0.0
    return p


def _parts(flat: torch.Tensor, shapes: list[Any]) -> list[torch.Tensor]:
    return [part.view(shape) for part, shape in zip(flat.split([math.prod(shape) for shape in shapes]), shapes)]


@functools.cache
def _arithmetic() -> int:
    """A digest of what this process computes of fixed matrices, which kinds of processors may round differently."""
    chance = torch.Generator().manual_seed(1)
    p = torch.randint(-1000, 1001, (3001, 4), generator=chance).float()
    p = orthonormal(p)
    return zlib.crc32((p @ (p[:257] * 3.0).T).numpy().tobytes(), zlib.crc32(p.numpy().tobytes()))
