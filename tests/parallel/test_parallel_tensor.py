"""Pairs of communication for cut layers: each one's backward is the transpose of its forward, in integers; the axial
block that they are for; two switches under way at once; what cannot be cut; and random numbers on a mesh."""

import pytest
from ranks import as_ranks

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

import hvdlite.torch as hvd  # noqa: E402
from hvdlite import parallel as par  # noqa: E402
from hvdlite.parallel.tensor import part_of  # noqa: E402

TP = hvd.global_process_set


def begin_and_finish(x, cut, whole, group, name=None):
    """Two under way at once; the other's gradient is zero."""
    mine, other = (
        par.start_switch(each, cut, whole, group, name and name + what) for each, what in ((x, "a"), (-x, "b"))
    )
    return par.finish_switch(other) * 0 + par.finish_switch(mine)


# function, its dimensions, shape (n: the number of ranks), and whether x and the result are replicated
PAIRS = [
    (par.copy_to, (), "2 3", True, False), (par.reduce_from, (), "2 3", False, True),
    (par.split_to, (1,), "2 4n 3", True, False), (par.gather_from, (-1,), "2 4 3", False, True),
    (par.to_sequence, (0,), "2n 3", False, False), (par.from_sequence, (1,), "2 4 3", False, False),
    (par.switch_axis, (1, 2), "2 4n 3", False, False), (begin_and_finish, (0, -1), "2n 4 3", False, False),
]  # fmt: skip


def integers(shape, seed):
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize("name", [None, "pair"])
@pytest.mark.parametrize("case", range(len(PAIRS)))
@as_ranks(1, 2, 4)
def test_a_backward_is_the_transpose_of_its_forward(case, name):
    """<f(x), y> = <x, f'(y)>, both summed over ranks; what is replicated counts once."""
    function, dims, shape, replicated, alike = PAIRS[case]
    sizes = [int(word.rstrip("n")) * (hvd.size() if "n" in word else 1) for word in shape.split()]
    x = integers(sizes, 0 if replicated else hvd.rank()).requires_grad_()
    out = function(x, *dims, TP, name)
    y = integers(out.shape, 9 if alike else 9 + hvd.rank()).requires_grad_()
    (gradient,) = torch.autograd.grad(out, x, y, create_graph=function is not begin_and_finish)
    products = torch.stack([(out * y).sum(), (x * gradient).sum()]).detach()
    sums = hvd.allreduce(
        products / torch.tensor([hvd.size() if alike else 1, hvd.size() if replicated else 1]), op=hvd.Sum
    )
    assert sums[0] == sums[1] and sums[0] != 0
    if gradient.requires_grad:  # the way back of the way back is the way there
        assert torch.equal(torch.autograd.grad(gradient, y, x.detach())[0], out)


@as_ranks(2, 4)
def test_the_whole_is_what_it_was():
    for group in (TP, hvd.Mesh(dp=-1, tp=2).group("tp")):
        n, rank = group.size(), group.rank()
        whole = torch.arange(2.0 * 4 * n * 8).view(2, -1, 8)
        mine = par.split_to(whole, 1, group)
        assert torch.equal(mine, whole[:, 4 * rank : 4 * rank + 4])
        assert torch.equal(par.gather_from(mine, 1, group), whole)
        assert torch.equal(par.from_sequence(mine, 1, group), whole)
        assert torch.equal(par.to_sequence(whole, 1, group), mine * n)
        assert torch.equal(par.reduce_from(whole * rank, group), whole * sum(range(n)))
        assert torch.equal(par.switch_axis(mine, 2, 1, group), par.split_to(whole, 2, group))
        assert torch.equal(begin_and_finish(mine, 2, 1, group), par.split_to(whole, 2, group))
        cuts = hvd.allgather_object(part_of(4 * n + 1, group), process_set=group)
        assert [first for first, _ in cuts[1:]] == [last for _, last in cuts[:-1]] and cuts[-1][1] == 4 * n + 1


@as_ranks(2, 4)
def test_an_axial_block_is_that_of_one_process():
    """Attention along one axis, a switch, attention along the other, back: results have the same bits."""
    n = hvd.size()
    x, weight = torch.randn(2 * n, n, 6, generator=torch.Generator().manual_seed(1)), torch.eye(6).requires_grad_()

    def block(m, weight, switch):
        for _ in range(2):  # it transposes after each switch, so that the first dimension is the one that is cut
            q = m @ weight
            m = switch(m + torch.softmax(q @ q.transpose(1, 2), -1) @ m).transpose(0, 1)
        return m

    whole, mine = x.clone().requires_grad_(), par.split_to(x, 0, TP).requires_grad_()
    wanted = block(whole, weight, lambda m: m)
    (of_weight, of_whole) = torch.autograd.grad(wanted.square().sum(), (weight, whole))
    found = block(mine, weight, lambda m: par.switch_axis(m, 1, 0, TP))
    before = hvd.counters()["submits"]
    (parts, of_mine) = torch.autograd.grad(found.square().sum(), (weight, mine))
    assert hvd.counters()["submits"] - before == 2
    assert torch.equal(found, par.split_to(wanted.detach(), 0, TP))
    torch.testing.assert_close(of_mine, par.split_to(of_whole, 0, TP))
    torch.testing.assert_close(hvd.allreduce(parts, op=hvd.Sum), of_weight)


@as_ranks(2)
def test_what_cannot_be_cut():
    odd = torch.zeros(2, 3, 4)
    for call in (par.split_to, par.to_sequence):
        with pytest.raises(ValueError, match=r"dimension 1 of .*\[2, 3, 4\] cannot be split evenly over 2 .*HVD016"):
            call(odd, 1, TP)
    for call in (par.switch_axis, par.start_switch):
        with pytest.raises(ValueError, match=f"{call.__name__}: dimension 1 of .*HVD016"):
            call(odd, 1, 2, TP)
    for call in (par.gather_from, par.from_sequence):
        with pytest.raises(hvd.HvdMismatchError):
            call(torch.zeros(2, 1 + hvd.rank()), 1, TP)


@as_ranks(4)
def test_dropout_is_alike_over_tp_but_where_it_is_cut():
    mesh = hvd.Mesh(dp=2, tp=2)
    region = par.seeded(mesh, 7)
    drop = torch.nn.Dropout(0.5)
    alike = drop(torch.ones(64))
    with region:
        cut = [drop(torch.ones(64))]
    with region:
        cut += [drop(torch.ones(64))]
    after = drop(torch.ones(64))
    alike, cut, after = (hvd.allgather_object(each) for each in (alike, cut, after))
    for each in alike, after:
        assert torch.equal(each[0], each[1]) and torch.equal(each[2], each[3]) and not torch.equal(each[0], each[2])
    masks = [tuple(mask.tolist()) for each in cut for mask in each] + [tuple(alike[r].tolist()) for r in (0, 2)]
    assert len(set(masks)) == 4 * 2 + 2
    for with_region in (True, False):  # a forward that is run again has the same masks
        x = torch.ones(64, requires_grad=True)

        def twice(x, with_region=with_region):
            with region:
                x = drop(x)
            return drop(x) * 3 if with_region else x

        y = checkpoint(twice, x, use_reentrant=False)
        y.sum().backward()
        assert torch.equal(x.grad, y.detach())
