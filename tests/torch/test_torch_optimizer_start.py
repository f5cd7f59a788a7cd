"""Ranks that start from other parameters, or have them in another order, are told so; others hear nothing."""

import os
import re
import tempfile
import warnings

import pytest
from ranks import as_ranks

torch = pytest.importorskip("torch")

import hvdlite.torch as hvd  # noqa: E402

FORMS = {
    "plain": {},
    "groups": {"groups": 2},
    "two passes": {"backward_passes_per_step": 2},
    "weighted": {"op": hvd.WeightedAverage(2.0)},
    "adasum": {"op": hvd.Adasum},
}


def network(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 3))


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1)


def steps(model, optimizer, count=1, code="HVD302"):
    """Trains; what the warnings with this code say."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(count * optimizer.backward_passes_per_step):
            model(torch.full((2, 3), 1.0 + step + hvd.rank())).sum().backward()
            if (step + 1) % optimizer.backward_passes_per_step == 0:
                optimizer.step(), optimizer.zero_grad()
    return [str(each.message) for each in said if code in str(each.message)]


@pytest.mark.parametrize("first", [3, 5], ids=["equal shapes", "other shapes"])
@as_ranks(2, 3)
def test_parameters_in_another_order_are_an_error_before_the_first_step(first):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, first, bias=False), torch.nn.Linear(first, 3, bias=False))
    before = [each.detach().clone() for each in model.parameters()]
    parameters = list(model.parameters())[:: -1 if hvd.rank() == 1 else 1]
    optimizer = hvd.DistributedOptimizer(sgd(parameters))
    for _ in range(2):
        with pytest.raises(
            hvd.HvdMismatchError, match="different orders: '0.0'.* rank 1 is not that of rank 0.*HVD302"
        ):
            steps(model, optimizer)
        optimizer.zero_grad()
    assert all(map(torch.equal, model.parameters(), before))
    assert steps(model, hvd.DistributedOptimizer(sgd(parameters), model.named_parameters()), 3) == []
    hvd.check_consistency(model)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("named", [True, False])
@as_ranks(2, 3)
def test_a_forgotten_broadcast_is_one_warning(named, form):
    model = network(min(hvd.rank(), 1))
    optimizer = hvd.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters() if named else None, **FORMS[form]
    )
    assert steps(model, optimizer) == []
    said = steps(model, optimizer, 3)
    assert len(said) == (hvd.rank() == 0)
    others = "s 1, 2" if hvd.size() == 3 else " 1"
    wanted = (
        f"parameter '{'0.bias' if named else 'noname.0.0'}[#0-9]*' on rank{others} is not what rank 0 has.*broadcast"
    )
    assert all(re.search(wanted, text) for text in said)


@pytest.mark.parametrize("mode", ["raise", "off"])
@as_ranks(2)
def test_the_option_makes_it_an_error_on_all_ranks_or_nothing(mode):
    hvd.shutdown()
    os.environ["HVDLITE_CHECK_START"] = mode
    hvd.init()
    model = network(hvd.rank())
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    steps(model, optimizer)
    if mode == "raise":
        with pytest.raises(hvd.HvdMismatchError, match="'noname.0.0[#0-9]*' on rank 1 is not"):
            steps(model, optimizer)
        optimizer.zero_grad()
    assert steps(model, optimizer, 2) == []
    hvd.shutdown()
    del os.environ["HVDLITE_CHECK_START"]
    hvd.init()
    model.load_state_dict(network(hvd.rank()).state_dict())
    assert len(steps(model, optimizer, 2)) == (hvd.rank() == 0)  # a new life looks anew


@as_ranks(1, 2)
def test_ranks_that_are_equal_or_become_so_in_time_hear_nothing():
    model = network(hvd.rank())
    model[0].bias.data.fill_(float("nan"))
    model[2].bias.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    assert steps(model, optimizer) == []
    hvd.broadcast_parameters([each for each in model.parameters() if each.requires_grad], root_rank=0)
    assert steps(model, optimizer, 2) == []


@as_ranks(3)
def test_ranks_that_have_joined_or_are_not_in_the_set_are_not_compared():
    model = network(hvd.rank() == 2)
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    with hvd.uneven_inputs(optimizer):
        assert steps(model, optimizer, 3 * (hvd.rank() < 2)) == []
    pair = hvd.add_process_set([1, 2])
    model = network(hvd.rank() // 2)
    said = steps(model, hvd.DistributedOptimizer(sgd(model.parameters()), process_set=pair), 3)
    assert len(said) == (hvd.rank() == 1)
    assert all("on rank 2 is not what rank 1 has" in text for text in said)
    hvd.remove_process_set(pair)


@as_ranks(2)
def test_a_rank_that_skips_the_first_round_is_not_waited_for():
    model = network(hvd.rank())
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    hook = model[0].weight.register_hook(lambda _: 1 / 0) if hvd.rank() else None
    with pytest.raises((hvd.HvdMismatchError, ZeroDivisionError), match="HVD308|zero"):
        steps(model, optimizer)
    if hook is not None:
        hook.remove()
    optimizer.zero_grad()
    assert len(steps(model, optimizer, 3)) == (hvd.rank() == 0)
    table = torch.nn.Embedding(4, 3, sparse=True)
    optimizer = hvd.DistributedOptimizer(sgd(table.parameters()))
    for _ in range(2):
        table(torch.tensor([hvd.rank()])).sum().backward()
        optimizer.step(), optimizer.zero_grad()


@as_ranks(2)
def test_a_model_that_is_in_distributed_data_parallel_as_well_is_one_warning():
    if not torch.distributed.is_available():
        pytest.skip("torch without torch.distributed")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(hvd.broadcast_object(folder), "store")
        store = torch.distributed.FileStore(path, 2)
        torch.distributed.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=2)
        try:
            model, other = torch.nn.parallel.DistributedDataParallel(network()), network()
            optimizer, plain = (hvd.DistributedOptimizer(sgd(each.parameters())) for each in (model, other))
            assert len(steps(model, optimizer, 3, "HVD242")) == (hvd.rank() == 0)
            assert steps(other, plain, 2, "HVD242") == []
        finally:
            torch.distributed.destroy_process_group()
            hvd.barrier()


@pytest.mark.parametrize("same", [True, False])
@as_ranks(2)
def test_a_rank_that_has_joined_waits_for_no_comparison_of_later_rounds(same):
    model = network(0 if same else hvd.rank())
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    if hvd.rank() == 0:
        steps(model, optimizer, 3)
    elif not same:
        steps(model, optimizer)
    hvd.join()
    assert steps(model, optimizer, 2) == []


@pytest.mark.parametrize("named", [True, False])
@as_ranks(2)
def test_what_is_frozen_on_one_rank_only_is_not_compared(named):
    model = network()
    pairs = list(model.named_parameters())
    if hvd.rank() == 1:
        pairs.append(("own", torch.nn.Parameter(torch.ones(3), requires_grad=False)))
    optimizer = hvd.DistributedOptimizer(sgd([each for _, each in pairs]), pairs if named else None)
    assert steps(model, optimizer, 2) == []


@as_ranks(2)
def test_options_that_differ_are_told():
    model = network()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    optimizer.param_groups[0]["dampening"] = hvd.rank()  # without momentum weights stay equal
    said = steps(model, optimizer, 3)
    assert ["options, such as lr, of group 0 on rank 1 are not" in each for each in said] == [True] * (hvd.rank() == 0)
