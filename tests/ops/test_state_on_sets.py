"""State, consistency, batch norm and shards on a process set: its members only, roots by their global ranks."""

import numpy as np
import pytest
from ranks import as_ranks

torch = pytest.importorskip("torch")

import hvdlite.torch as hvd  # noqa: E402


def outer():
    """Ranks 0 and 2 of 3, registered; on rank 1, too, which is no member."""
    return hvd.add_process_set([0, 2])


@as_ranks(3)
def test_state_comes_from_a_root_of_the_set_and_stays_in_it():
    members = outer()
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + hvd.rank()), momentum=0.9)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(hvd.rank())
    if hvd.rank() == 2:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model.bias.fill_(5)
    if members.included():
        assert hvd.broadcast_state(model, optimizer, extra=hvd.rank(), root_rank=2, process_set=members) == 2
        hvd.check_consistency(model, optimizer, process_set=members)
        assert model.bias.eq(5).all() and abs(optimizer.param_groups[0]["lr"] - 0.3) < 1e-9
    else:
        assert model.weight.eq(1).all()
        for call in (hvd.broadcast_parameters, hvd.broadcast_optimizer_state):
            with pytest.raises(ValueError, match="not part of provided process set"):
                call(optimizer if call is hvd.broadcast_optimizer_state else model.state_dict(), 0, process_set=members)
    with pytest.raises(hvd.HvdMismatchError, match="on rank 1 is not what rank 0 has"):
        hvd.check_consistency(model)
    hvd.remove_process_set(members)


@as_ranks(3)
def test_a_root_outside_the_set_is_refused():
    members = outer()
    if members.included():
        with pytest.raises(ValueError, match="ank 1 is not"):
            hvd.broadcast_parameters([torch.ones(1)], 1, process_set=members)
    hvd.barrier()
    hvd.remove_process_set(members)


@as_ranks(3)
def test_errors_name_global_ranks():
    members = outer()
    if members.included():
        with pytest.raises(hvd.HvdMismatchError, match=r"rank 0 has 0 \[1\] float32; rank 2 has 0 \[3\] float32"):
            hvd.broadcast_parameters([torch.ones(1 + hvd.rank())], 0, process_set=members)
        with pytest.raises(hvd.HvdMismatchError, match="on rank 2 is not what rank 0 has"):
            hvd.check_consistency([torch.full((2,), float(hvd.rank()))], process_set=members)
    hvd.remove_process_set(members)


@as_ranks(3)
def test_batch_norm_of_a_set_sees_the_rows_of_its_members():
    members = outer()
    rows = torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mine = rows[3 * hvd.rank() : 3 * hvd.rank() + 3].clone().requires_grad_()
    theirs = torch.cat([rows[:3], rows[6:]]).requires_grad_()
    expected = torch.nn.BatchNorm1d(4, dtype=torch.float64)(theirs)
    expected.pow(2).sum().mul(0.5).add(expected[:, 0].sum()).backward()
    if members.included():
        layer = torch.nn.Sequential(torch.nn.BatchNorm1d(4, dtype=torch.float64))
        layer = hvd.convert_sync_batchnorm(layer, process_set=members)
        found = layer(mine)
        found.pow(2).sum().mul(0.5).add(found[:, 0].sum()).backward()
        place = slice(0, 3) if hvd.rank() == 0 else slice(3, 6)
        torch.testing.assert_close(found, expected[place])
        torch.testing.assert_close(mine.grad, theirs.grad[place])
    hvd.barrier()
    hvd.remove_process_set(members)


@as_ranks(3)
def test_shards_are_dealt_among_the_members():
    members = outer()
    if members.included():
        parts = hvd.allgather_object(hvd.data.shard(np.arange(6), process_set=members).tolist(), process_set=members)
        assert parts == [[0, 1, 2], [3, 4, 5]]
        with pytest.warns(UserWarning, match="all 2 ranks") if hvd.rank() == 0 else nothing():
            list(hvd.data.watch([np.ones(3)], check=True, process_set=members))
    hvd.barrier()
    hvd.remove_process_set(members)


def nothing():
    import contextlib

    return contextlib.nullcontext()
