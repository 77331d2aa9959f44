"""Linear within torch's mechanisms around a module: regions, hooks, transforms, threads."""

import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import te_fast
import te_fast.pytorch as te
from linear_layers import close, inputs, make, step
from recipes import RECIPES
from reference import quantized_values
from te_fast.common.recipe import Float8CurrentScaling


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_gives_the_same_gradients(recipe, reentrant):
    layer, plain = make(), make()
    x, grad = inputs(32, layer)
    y = step(plain, x, grad, recipe)
    wanted = x.grad.clone(), plain.weight.grad
    x.grad = None
    with te.autocast(recipe=recipe):
        again = checkpoint(layer, x, use_reentrant=reentrant)
    again.backward(grad)  # recomputation runs outside of the region
    assert torch.equal(y, again)
    if recipe.delayed():
        # Recomputation quantises with the current scales. A reentrant checkpoint also quantises the weight again.
        # A checkpoint by hooks recomputes the input alone, and still has the weight of the forward.
        now, first = layer.fp8_meta["scaling_fwd"].scale, torch.tensor(1.0)
        g = quantized_values(grad, "e5m2", "t", scale=first)
        weight = quantized_values(layer.weight, "e4m3", "t", scale=now[1] if reentrant else first)
        close(x.grad, g @ weight, torch.bfloat16)
        again = quantized_values(x, "e4m3", "t", scale=now[0])
        close(layer.weight.grad, g.t() @ again, torch.bfloat16)
    else:
        assert torch.equal(x.grad, wanted[0])
        assert torch.equal(layer.weight.grad, wanted[1])


@pytest.mark.filterwarnings("ignore:.*Recipe type changed")
def test_module_hooks_and_overrides_run(recipe):
    layer = make()
    x, _ = inputs(32, layer)
    seen = []
    handle = layer.register_forward_hook(lambda _m, _a, out: seen.append(out.shape))
    with torch.no_grad(), te.autocast(recipe=recipe):
        layer(x)
    handle.remove()
    assert seen == [(32, 48)]

    class Doubled(te.Linear):
        def forward(self, inp, **options):
            return 2 * super().forward(inp, **options)

    doubled = Doubled(64, 48, device="cpu", params_dtype=torch.bfloat16)
    doubled.load_state_dict(layer.state_dict(), strict=False)
    fresh = make()
    fresh.load_state_dict(layer.state_dict(), strict=False)
    with torch.no_grad(), te.autocast(recipe=Float8CurrentScaling()):
        assert torch.equal(doubled(x), 2 * fresh(x))
        fresh.forward = lambda inp: inp.sum()
        assert fresh(x) == x.sum()


def test_torch_autocast(recipe):
    layer = make(dtype=torch.float32)
    x, grad = inputs(32, layer, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
        with te.autocast(recipe=recipe):
            y = layer(x)
    assert y.dtype == torch.bfloat16
    y.backward(grad.bfloat16())
    assert layer.weight.grad.dtype == torch.float32
    assert x.grad.dtype == torch.float32
    with pytest.raises(TypeError, match="torch.autocast"):
        layer(x.bfloat16())


def test_functorch_is_refused_in_fp8_only():
    layer = make()
    x = torch.randn(3, 8, 64, dtype=torch.bfloat16)
    assert torch.func.vmap(layer)(x).shape == (3, 8, 48)
    with te.autocast(), pytest.raises(te_fast.UnsupportedError, match="vmap"):
        torch.func.vmap(layer)(x)


def test_functorch_gives_the_gradients_of_split_weights():
    layer = te.Linear(64, 48, parameters_split=("q", "k", "v"), device="cpu")
    x = torch.randn(8, 64)

    def loss(parameters):
        return torch.func.functional_call(layer, parameters, (x,)).square().sum()

    grads = torch.func.grad(loss)({n: p.detach() for n, p in layer.named_parameters()})
    layer(x).square().sum().backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad)


BLOCKS = {
    "TransformerLayer": lambda: te.TransformerLayer(64, 128, 4, device="cpu"),
    "MoE": lambda: te.MoE(64, 128, 4, topk=2, device="cpu"),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_functorch_is_refused_by_blocks(name):
    block, x = BLOCKS[name](), torch.randn(16, 2, 64)

    def loss(parameters):
        return torch.func.functional_call(block, parameters, (x,)).square().sum()

    with pytest.raises(te_fast.UnsupportedError, match="torch.func"):
        torch.func.grad(loss)({n: p.detach() for n, p in block.named_parameters()})


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
@pytest.mark.filterwarnings("ignore:Graph break due to unsupported builtin")
@pytest.mark.parametrize("name", ["delayed", "current"])
def test_torch_compile_is_right_where_it_may_break_the_graph(name):
    layer = make()
    x, _ = inputs(32, layer)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: torch.relu(layer(x)) * 2, backend="eager")
    with torch.no_grad(), te.autocast(recipe=RECIPES[name]()):
        assert torch.equal(compiled(x), torch.relu(layer(x)) * 2)


def test_inference_mode(recipe):
    layer = make()
    x, _ = inputs(32, layer)
    with torch.inference_mode(), te.autocast(recipe=recipe):
        y = layer(x)
    with torch.no_grad(), te.autocast(recipe=recipe):
        assert torch.equal(layer(x), y)


def test_threads_share_a_layer(recipe):
    layer = make()
    x, _ = inputs(32, layer)
    failures = []
    with torch.no_grad(), te.autocast(recipe=recipe):
        wanted = layer(x)

        def work():
            with torch.no_grad():
                for _ in range(50):
                    same = torch.equal(layer(x.t().contiguous().t()), wanted)
                    failures.extend([] if same else [1])

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
