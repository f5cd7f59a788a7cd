"""Ranks that made their layers in another order: each parameter gets its own optimizer state, or an error says why."""

import pytest
from ranks import as_ranks

torch = pytest.importorskip("torch")

import hvdlite.torch as hvd  # noqa: E402

NAMES = ["left", "right", "up"]


def made():
    """A model whose layers rank 1 has in reverse order; values depend on the name alone."""
    layers = {}
    for i, name in enumerate(NAMES):
        layers[name] = torch.nn.Linear(2, 2, bias=False)
        torch.nn.init.constant_(layers[name].weight, i + 1)
    return torch.nn.ModuleDict(reversed(layers.items()) if hvd.rank() == 1 else layers)


def state_of(model, optimizer):
    hvd.broadcast_state(model, optimizer)


def named_by_torch(model, optimizer):
    hvd.broadcast_optimizer_state(optimizer, 0)


def named_by_hvd(model, optimizer):
    wrapped = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_optimizer_state(wrapped, 0)
    return wrapped


def named_before(model, optimizer):
    hvd.broadcast_parameters(model.state_dict() if hvd.rank() else model.named_parameters(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)


def model_given(model, optimizer):
    hvd.broadcast_optimizer_state(optimizer, 0, model=model)


def state_dict_given(model, optimizer):
    hvd.broadcast_optimizer_state(optimizer, 0, model=model.state_dict())


def elastic(model, optimizer):
    hvd.elastic.TorchState(net=model, optimizer=optimizer).sync()


WAYS = [state_of, named_by_torch, named_by_hvd, named_before, model_given, state_dict_given, elastic]


@pytest.mark.parametrize("way", WAYS)
@as_ranks(2)
def test_state_goes_by_the_names_of_parameters(way):
    model = made()
    names = [name for name, _ in model.named_parameters()]
    given = model.named_parameters() if way is named_by_torch else model.parameters()
    optimizer = torch.optim.SGD(given, lr=0.5 + hvd.rank(), momentum=0.9)
    if hvd.rank() == 0:
        for i, name in enumerate(NAMES):
            model[name].weight.grad = torch.full((2, 2), 10.0 * (i + 1))
        optimizer.step()
    optimizer = way(model, optimizer) or optimizer
    for i, name in enumerate(NAMES):
        assert optimizer.state[model[name].weight]["momentum_buffer"].eq(10.0 * (i + 1)).all(), name
    group = optimizer.param_groups[0]
    assert group["lr"] == 0.5 and group.get("param_names", names) == names


@as_ranks(2)
def test_what_names_cannot_put_in_order_is_an_error_on_all_ranks():
    model = made()
    first, *others = (model[name].weight for name in (NAMES if hvd.rank() == 0 else NAMES[::-1]))
    groups = torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": others}], lr=0.2)
    tall = torch.nn.Parameter(torch.ones(4, 2))
    unnamed = torch.optim.SGD([first, tall] if hvd.rank() == 0 else [tall, first], lr=0.1)
    one_names = torch.optim.SGD(model.named_parameters() if hvd.rank() == 0 else model.parameters(), lr=0.1)
    for optimizer, of, says in (
        (groups, model, "rank 0 has group 0 parameter left.weight .*; rank 1 has group 0 parameter up.weight"),
        (unnamed, None, r"rank 0 has group 0 parameter 0 \[2, 2\].*; rank 1 has group 0 parameter 0 \[4, 2\]"),
        (one_names, None, "rank 0 has group 0 parameter left.weight .*; rank 1 has group 0 parameter 0 "),
        (torch.optim.LBFGS(model.parameters()), model, "rank 0 has group 0 parameter 0 left.* 0 up.weight"),
    ):
        with pytest.raises(hvd.HvdMismatchError, match=says):
            hvd.broadcast_optimizer_state(optimizer, 0, model=of)


@as_ranks(2)
def test_a_tied_weight_has_one_name_whichever_layer_came_first():
    tied, other = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
    layers = {"a": tied, "b": other, "c": tied}
    model = torch.nn.ModuleDict(reversed(layers.items()) if hvd.rank() == 1 else layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if hvd.rank() == 0:
        tied.weight.grad, other.weight.grad = torch.full((2, 2), 1.0), torch.full((2, 2), 2.0)
        optimizer.step()
    hvd.broadcast_state(model, optimizer)
    assert [optimizer.state[layer.weight]["momentum_buffer"][0, 0] for layer in (tied, other)] == [1, 2]


def label_of(parameters, process_set=hvd.global_process_set):
    """What broadcast_optimizer_state calls the first parameter, as its error says on rank 0."""
    groups = [{"params": [parameter]} for parameter in parameters]
    with pytest.raises(hvd.HvdMismatchError) as caught:
        hvd.broadcast_optimizer_state(torch.optim.SGD(groups[hvd.rank() :], lr=0.1), 0, process_set=process_set)
    return caught.value.args[0].split(" parameter ", 1)[1].split(" [")[0]


@as_ranks(2)
def test_names_of_broadcast_parameters_belong_to_memory_and_to_all_ranks():
    first, second = (torch.nn.ModuleDict({name: torch.nn.Linear(2, 2, bias=False) for name in NAMES}) for _ in "12")
    first["zero"] = first["up"]  # tied
    assert label_of(first.parameters()) == "0"
    for model in (first, second):
        hvd.broadcast_parameters(model.state_dict(), 0)
    assert label_of([first["up"].weight, first["left"].weight]) == "up.weight"
    assert label_of([second["up"].weight, first["up"].weight]) == "model 1 up.weight"
    assert label_of([first["left"].weight, torch.nn.Parameter(torch.ones(2, 2))]) == "0"
    hvd.broadcast_parameters(list(first.parameters()), 0)
    assert label_of(first.parameters()) == "left.weight"
    first = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2, bias=False) for name in NAMES})  # built anew
    assert label_of(first.parameters()) == "0"
    hvd.broadcast_parameters({"own": second["left"].weight}, 0)
    alone = hvd.add_process_set([1])
    if hvd.rank() == 1:
        hvd.broadcast_parameters(first.state_dict(), 1, alone)
    assert label_of(first.parameters()) == "0"  # rank 0 has no names
    assert label_of(second.parameters()) == "model 1 own"
    hvd.remove_process_set(alone)
