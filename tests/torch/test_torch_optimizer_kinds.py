"""Any torch optimizer, the state it keeps, and what becomes of it: saved, loaded, copied, given more parameters."""

import copy
import io
import pickle

import pytest
from ranks import as_ranks
from test_torch_optimizer import assert_same, batch, loss_of, network, pair

torch = pytest.importorskip("torch")

import hvdlite.torch as hvd  # noqa: E402

KINDS = {
    "fused adam": lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
    "foreach adamw": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "fused sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, fused=True),
    "nadam": lambda params: torch.optim.NAdam(params),
    "rmsprop": lambda params: torch.optim.RMSprop(params, capturable=False),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
    "adadelta": lambda params: torch.optim.Adadelta(params, lr=1.0),
    "asgd": lambda params: torch.optim.ASGD(params),
    "rprop": lambda params: torch.optim.Rprop(params),
    "radam": lambda params: torch.optim.RAdam(params),
    "adafactor": lambda params: torch.optim.Adafactor(params),
    "two groups": lambda params: (
        lambda all: torch.optim.SGD([{"params": all[:1], "lr": 0.2}, {"params": all[1:]}], 0.1)
    )(list(params)),
}


@pytest.mark.parametrize("kind", KINDS)
@as_ranks(2)
def test_optimizers_of_torch(kind):
    if kind == "adafactor" and not hasattr(torch.optim, "Adafactor"):
        pytest.skip("this torch has no Adafactor")
    worlds = pair(KINDS[kind])
    for step in range(4):
        for model, optimizer, rows in zip(worlds[::2], worlds[1::2], reversed(batch(step))):
            optimizer.zero_grad()
            loss_of(model, rows).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
    assert_same(worlds[0], worlds[2])


@as_ranks(2)
def test_muon_for_matrices_beside_adam_for_the_rest():
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    worlds = []
    for distributed in (True, False):
        model = network().float()
        two = [[p for p in model.parameters() if p.ndim == n] for n in (2, 1)]
        optimizers = [torch.optim.Muon(two[0], lr=0.01), torch.optim.Adam(two[1], lr=0.01)]
        if distributed:
            optimizers = [hvd.DistributedOptimizer(each, model.named_parameters()) for each in optimizers]
        worlds.append((model, optimizers))
    for step in range(3):
        for (model, optimizers), rows in zip(worlds, reversed(batch(step))):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(model, rows.float()).backward()
            for optimizer in optimizers:
                optimizer.step()
    for mine, theirs in zip(worlds[0][0].parameters(), worlds[1][0].parameters()):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=1e-3)  # its iteration runs in bfloat16
    everyone = hvd.allgather(worlds[0][0][0].weight.detach().flatten()[None])
    assert torch.equal(everyone[0], everyone[1])


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@as_ranks(2)
def test_lbfgs_decides_by_the_same_loss_on_all_ranks(search):
    worlds = []
    for distributed in (True, False):
        model = network()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=20, tolerance_change=1e-4, line_search_fn=search)
        worlds.append((model, hvd.DistributedOptimizer(optimizer) if distributed else optimizer))
    calls = [0, 0]
    for index, ((model, optimizer), rows) in enumerate(zip(worlds, reversed(batch(0)))):

        def closure(model=model, optimizer=optimizer, rows=rows, index=index):
            calls[index] += 1
            optimizer.zero_grad()
            loss = loss_of(model, rows)
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
    assert calls[0] == calls[1] > 3
    for mine, theirs in zip(worlds[0][0].parameters(), worlds[1][0].parameters()):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


@as_ranks(2)
def test_a_closure_without_backward_on_one_rank_does_not_stop_the_other():
    model, optimizer, _, _ = pair()

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, batch(0)[1])
        if hvd.rank() == 0:
            loss.backward()
        return loss

    for _ in range(2):
        assert optimizer.step(closure) is not None
    states = hvd.allgather_object([p.detach() for p in model.parameters()])
    assert all(torch.equal(*both) for both in zip(*states))


@as_ranks(1, 2)
def test_state_dict_round_trip():
    worlds = pair(KINDS["foreach adamw"])
    trained = 3
    for step in range(2 * trained):
        if step == trained:
            kept = io.BytesIO()
            torch.save(worlds[1].state_dict(), kept)
            kept.seek(0)
            model = copy.deepcopy(worlds[0])
            optimizer = hvd.DistributedOptimizer(KINDS["foreach adamw"](model.parameters()), model.named_parameters())
            optimizer.load_state_dict(torch.load(kept))
            worlds = (model, optimizer, *worlds[2:])
        for model, optimizer, rows in zip(worlds[::2], worlds[1::2], reversed(batch(step))):
            optimizer.zero_grad()
            loss_of(model, rows).backward()
            optimizer.step()
    assert_same(worlds[0], worlds[2])


@as_ranks(1, 2)
def test_copying_and_pickling_say_what_to_do_instead():
    _, optimizer, _, _ = pair()
    for attempt in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match=r"state_dict\(\).*wrap it"):
            attempt(optimizer)


@as_ranks(2)
def test_groups_added_again_and_again():
    models, references = ([network() for _ in range(3)] for _ in range(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(models[0].parameters(), 0.1), models[0].named_parameters())
    plain = torch.optim.SGD(references[0].parameters(), 0.1)
    for step in range(5):
        for these, opt, rows in ((models, optimizer, batch(step)[1]), (references, plain, batch(step)[0])):
            if 0 < step < 3:
                opt.add_param_group({"params": list(these[step].parameters()), "lr": 0.05})
            opt.zero_grad()
            sum(loss_of(this, rows) for this in these).backward()
            torch.nn.utils.clip_grad_norm_([p for this in these[: step + 1] for p in this.parameters()], 0.2)
            opt.step()
            for this in these[step + 1 :]:
                this.zero_grad()
    for mine, theirs in zip(models, references):
        assert_same(mine, theirs)


@as_ranks(2)
def test_all_parameters_frozen_first_and_thawed_layer_by_layer():
    worlds = pair()
    for model in worlds[::2]:
        model.requires_grad_(False)
    for step in range(4):
        for model, optimizer, rows in zip(worlds[::2], worlds[1::2], reversed(batch(step))):
            if step < 2:
                model[2 - 2 * step].requires_grad_(True)
            optimizer.zero_grad()
            loss_of(model, rows).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    assert_same(worlds[0], worlds[2])


@as_ranks(1, 2)
def test_hooks_of_torchs_optimizers_run_once_and_see_averages():
    model, optimizer, _, _ = pair()
    seen = []
    optimizer.register_step_pre_hook(lambda opt, *_: seen.append(model[0].weight.grad.clone()))
    optimizer.register_step_post_hook(lambda *_: seen.append(None))
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, batch(step)[1]).backward()
        optimizer.step()
    assert [each is None for each in seen] == [False, True] * 2
    everyone = hvd.allgather(seen[0].flatten()[None])
    assert all(torch.equal(everyone[0], row) for row in everyone)
