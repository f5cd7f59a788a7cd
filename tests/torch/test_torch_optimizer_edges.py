"""DistributedOptimizer where scripts do the unexpected: gradients dropped, doubled, replaced, frozen; two at once."""

import gc

import pytest
from ranks import as_ranks
from test_torch_optimizer import assert_same, batch, loss_of, network, pair

torch = pytest.importorskip("torch")

import hvdlite.torch as hvd  # noqa: E402


@pytest.mark.parametrize("set_to_none", [True, False])
@as_ranks(2)
def test_zero_grad_between_backward_and_step_drops_the_gradients(set_to_none):
    model, optimizer, reference, plain = pair()
    for step in range(3):
        whole, mine = batch(step)
        loss_of(model, batch(50)[1]).backward()
        optimizer.zero_grad(set_to_none=set_to_none)
        plain.zero_grad()
        loss_of(model, mine).backward(), loss_of(reference, whole).backward()
        optimizer.step(), plain.step()
    assert_same(model, reference)


@pytest.mark.parametrize("op", ["Min", "Max", "Product"])
@as_ranks(2)
def test_a_second_backward_onto_what_no_sum_can_be_added_to_is_an_error_with_the_remedy(op):
    model, optimizer, _, _ = pair(op=getattr(hvd, op))
    loss_of(model, batch(0)[1]).backward()
    with pytest.raises(
        hvd.HvdError, match=r"'2\..*#?.*op=.*step\(\) or zero_grad\(\)|'0\..*op=.*step\(\) or zero_grad"
    ):
        loss_of(model, batch(1)[1]).backward()
    optimizer.zero_grad()
    loss_of(model, batch(1)[1]).backward()
    optimizer.step()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2


@as_ranks(2)
def test_gradients_that_the_module_itself_has_cleared_are_sent_anew():
    """As in a GAN: the discriminator gets gradients from the generator's loss and drops them by module.zero_grad()."""
    model, optimizer, reference, plain = pair()
    for step in range(3):
        whole, mine = batch(step)
        loss_of(model, batch(60)[1]).backward()
        model.zero_grad(set_to_none=True)
        plain.zero_grad()
        loss_of(model, mine).backward(), loss_of(reference, whole).backward()
        optimizer.step(), plain.step()
    assert_same(model, reference)


@as_ranks(2)
def test_two_optimizers_with_equal_names_do_not_meet():
    first, first_opt, reference, plain = pair()
    second, second_opt, _, _ = pair()
    whole, mine = batch(0)
    plain.zero_grad()
    loss_of(reference, whole).backward(), plain.step()
    loss_of(first, mine).backward(), loss_of(second, mine).backward()  # both are under way
    second_opt.step(), first_opt.step()
    assert_same(first, reference)
    assert_same(second, reference)


@as_ranks(2)
def test_an_optimizer_that_is_wrapped_anew_leaves_no_hooks_behind():
    model = network()
    for _ in range(3):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        gc.collect()
        optimizer.zero_grad()
        loss_of(model, batch(0)[1]).backward()
        optimizer.step()
    for parameter in model.parameters():
        assert len(parameter._post_accumulate_grad_hooks) == len(parameter._backward_hooks) == 1


@as_ranks(2)
def test_parameters_frozen_and_unfrozen_later():
    model, optimizer, reference, plain = pair()
    for this, opt, rows in ((model, optimizer, 1), (reference, plain, 0)):
        for step in range(6):
            for parameter in this[0].parameters():
                parameter.requires_grad_(step % 3 != 1)
            opt.zero_grad(set_to_none=True)
            loss_of(this, batch(step)[rows]).backward()
            opt.step()
    assert_same(model, reference)
    frozen = network()
    for parameter in frozen[0].parameters():
        parameter.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(frozen.parameters(), lr=0.1, weight_decay=0.5))
    before = frozen[0].weight.clone()
    loss_of(frozen, batch(0)[1]).backward(), optimizer.step()
    assert torch.equal(frozen[0].weight, before)  # no zero gradient, so no weight decay either
    for parameter in frozen[0].parameters():
        parameter.requires_grad_(True)
    optimizer.zero_grad()
    loss_of(frozen, batch(1)[1]).backward(), optimizer.step()
    weights = hvd.allgather(frozen[0].weight.detach().flatten()[None])
    assert torch.equal(weights[0], weights[1]) and not torch.equal(frozen[0].weight, before)


@as_ranks(2)
def test_reductions_are_under_way_before_backward_ends():
    model, optimizer, _, _ = pair()
    started = []

    def spy(gradient):  # the first layer's gradient comes last: by then others must have left
        started.append(len(optimizer._hvd.in_flight))

    model[0].weight.register_hook(spy)
    loss_of(model, batch(0)[1]).backward()
    assert started and started[0] > 0
    optimizer.step()


@as_ranks(1, 2)
def test_private_names_of_horovods_optimizer_can_be_read():
    model = torch.nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    wrapped = {"named_parameters": model.named_parameters(), "backward_passes_per_step": 2}
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), **wrapped)
    optimizer.wait_in_backward = False
    assert {name.partition("#")[0] for name in optimizer._parameter_names.values()} == {"weight", "bias"}
    assert optimizer._requires_update == {model.weight} and optimizer._allreduce_delay[model.weight] == 2
    model(torch.ones(1, 2)).sum().backward()
    assert not optimizer._handles and optimizer._allreduce_delay[model.weight] == (2 if hvd.size() == 1 else 1)
    model(torch.ones(1, 2)).sum().backward()
    assert set(optimizer._handles) == (set() if hvd.size() == 1 else {model.weight})
    optimizer.step()
    assert not optimizer._handles


@as_ranks(1)
def test_one_rank_has_no_hooks():
    model, optimizer, _, _ = pair()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    optimizer.set_backward_passes_per_step(3)


@as_ranks(2)
def test_low_precision_models():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        model = network().to(dtype)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
        model(batch(0)[1].to(dtype)).sum().backward()
        assert model[0].weight.grad.dtype == dtype
        everyone = hvd.allgather(model[0].weight.grad.flatten()[None])
        assert torch.equal(everyone[0], everyone[1])
        optimizer.step()


@as_ranks(1, 2)
def test_arguments_that_cannot_be():
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    named = list(model.named_parameters())
    for arguments, text in (
        ({"named_parameters": named[:-1]}, "missing"),
        ({"named_parameters": named + named[:1]}, "unique"),
        ({"named_parameters": model.parameters()}, "tuples"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "hvd.Average"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step"),
        ({"op": 99}, "op=99"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.WeightedAverage()}, "hvd.Average"),
        ({"compression": 5}, "compress and decompress"),
        ({"groups": 0}, "positive integer"),
        ({"groups": -1}, "positive integer"),
        ({"groups": [[1]]}, "groups must consist of torch.Tensor"),
        ({"groups": [named[0][1]]}, "list of lists"),
        ({"groups": [[named[0][1]], [named[0][1]]]}, "only appear once"),
        ({"groups": [[torch.zeros(1)]]}, "not a parameter"),
    ):
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(sgd, **arguments)
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(sgd))
    with pytest.raises(TypeError):
        hvd.DistributedOptimizer(model)


@as_ranks(2)
def test_groups_added_to_two_optimizers_have_names_of_their_own():
    layers = [torch.nn.Linear(3, 3) for _ in range(4)]
    hvd.broadcast_parameters(torch.nn.ModuleList(layers).state_dict(), 0)
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), 0.1)) for layer in layers[:2]]
    for optimizer, layer in zip(optimizers, layers[2:]):
        optimizer.add_param_group({"params": list(layer.parameters())})
    sum(layer(torch.ones(1, 3) * (hvd.rank() + 1)).sum() for layer in layers).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert all(torch.equal(layer.weight.grad, torch.full((3, 3), 1.5)) for layer in layers)


@as_ranks(2)
def test_the_newer_of_two_optimizers_has_the_parameters():
    model = torch.nn.Linear(2, 1)
    hvd.broadcast_parameters(model.state_dict(), 0)
    older = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    newer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for _ in range(3):
        newer.zero_grad()
        model(torch.full((2,), 1.0 + hvd.rank())).sum().backward()
        assert model.weight.grad.tolist() == [[1.5, 1.5]]
        newer.step()
    with pytest.raises(hvd.HvdError, match=r"newer DistributedOptimizer has parameter 'bias"):
        older.step()
    newer.zero_grad()
    model(torch.ones(2)).sum().backward()
    newer.step()


@as_ranks(1, 2)
def test_wrong_arguments_are_refused_at_the_call_on_any_number_of_ranks():
    def wrap(parameter=None, **arguments):
        parameters = [torch.nn.Parameter(torch.ones(2)) if parameter is None else parameter]
        return hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), **arguments)

    for wrong in (0, -1.0, "a", None, True):
        with pytest.raises(ValueError, match="gradient_predivide_factor="):
            wrap(gradient_predivide_factor=wrong)
    for wrong in (True, [], 9, "sum"):
        with pytest.raises(ValueError, match=r"hvd\.Adasum"):
            wrap(op=wrong)
    with pytest.raises(TypeError, match="process_set"):
        wrap(process_set=3)
    with pytest.raises(ValueError, match="is not registered"):
        wrap(process_set=hvd.ProcessSet([0]))
    with pytest.raises(ValueError, match=r"'noname\.0\.0.*complex64"):
        wrap(torch.nn.Parameter(torch.ones(2, dtype=torch.complex64)))
    model = torch.nn.Linear(1, 1)
    with pytest.raises(TypeError, match="Optimizer, not Linear"):
        hvd.broadcast_optimizer_state(model, 0)
    with pytest.raises(TypeError, match="no state_dict"):
        hvd.broadcast_state(model, scaler=4)
    with pytest.raises(TypeError, match="Module, not int"):
        hvd.convert_sync_batchnorm(3)
