"""How public code builds on Transformer Engine's layers and ops, against plain torch.

The patterns are those of Megatron-LM, Megatron Bridge and NeMo AutoModel, without these packages.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

import te_fast.pytorch as te
from recipes import name_of
from reference import QuantizedLinear
from te_fast.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_fast.runtime import native

RECIPES = {
    "none": lambda: None,
    "delayed": lambda: DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling,
    "block": Float8BlockScaling,
}
OPTIONS = {"device": "cpu", "params_dtype": torch.float32}


@pytest.fixture(params=RECIPES)
def recipe(request):
    return RECIPES[request.param]()


def region(recipe):
    return te.autocast(enabled=recipe is not None, recipe=recipe)


def linear_of(recipe):
    """The linear op of the references: torch's function, or a product of quantised operands."""
    return functional.linear if recipe is None else QuantizedLinear(name_of(recipe))


def wide(*tensors):
    """FP64 leaves with the values of tensors."""
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def close(got, wanted, recipe):
    """Compare; the bound is wider in FP8, where the order of sums may decide how an operand is rounded."""
    error = (got.double() - wanted).norm() / wanted.norm()
    assert error < (1e-5 if recipe is None else 5e-3), error


def norm_op(layer):
    """The norm of a LayerNormLinear as an op of its parameters."""
    options = {"device": "meta", "dtype": torch.float32, "eps": layer.eps}
    size = layer.layer_norm_weight.numel()
    op = te.ops.RMSNorm(size, zero_centered_gamma=layer.zero_centered_gamma, **options)
    op.weight = layer.layer_norm_weight
    return op


def linear_op(weight, *, kind=te.ops.BasicLinear, **options):
    op = kind(weight.shape[1], weight.shape[0], device="meta", dtype=weight.dtype, **options)
    op.weight = weight
    return op


def bias_op(bias):
    op = te.ops.Bias(bias.numel(), device="meta", dtype=bias.dtype)
    op.bias = bias
    return op


@pytest.mark.parametrize("accumulate", [False, True], ids=["grad", "main_grad"])
def test_ops_over_the_parameters_of_layers(recipe, accumulate):
    """Megatron-LM's TEFusedMLP: a chain made at the first forward, over parameters of layers that do not run."""
    torch.default_generator.manual_seed(0)
    first = te.LayerNormLinear(
        64, 256, normalization="RMSNorm", zero_centered_gamma=True, **OPTIONS
    )
    second = te.Linear(128, 64, **OPTIONS)
    weights = [first.weight, second.weight]
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight)
    options = {"accumulate_into_main_grad": accumulate}
    chain = te.ops.Sequential(
        norm_op(first),
        linear_op(first.weight, **options),
        bias_op(first.bias),
        te.ops.SwiGLU(cache_quantized_input=False),
        linear_op(second.weight, **options),
        bias_op(second.bias),
    )
    seen = []
    chain.register_forward_pre_hook(lambda module, *_: seen.append(module))
    x = torch.randn(32, 64, requires_grad=True)
    with region(recipe):
        y = chain(x)
    y.square().sum().backward()
    parameters = [*weights, first.layer_norm_weight, first.bias, second.bias]
    got = [weight.main_grad if accumulate else weight.grad for weight in weights]
    got += [parameter.grad for parameter in parameters[2:]]

    leaves, linear = wide(x, *parameters), linear_of(recipe)
    plain, one, two, gamma, bias_one, bias_two = leaves
    hidden = functional.rms_norm(plain, (64,), gamma + 1, first.eps)
    gate, value = linear(hidden, one, bias_one).chunk(2, -1)
    expected = linear(functional.silu(gate) * value, two, bias_two)
    expected.square().sum().backward()
    assert len(seen) == 1
    close(y, expected, recipe)
    for grad, leaf in zip([x.grad, *got], leaves, strict=True):
        close(grad, leaf.grad, recipe)


def test_two_chains_of_an_adapter(recipe):
    """Megatron Bridge's TEFusedLoRALinear: the second chain adds to the first one's output, in high precision."""
    torch.default_generator.manual_seed(0)
    layer = te.LayerNormLinear(64, 128, normalization="RMSNorm", **OPTIONS).requires_grad_(False)
    down = nn.Parameter(torch.randn(16, 64) * 0.1)
    up = nn.Parameter(torch.randn(128, 16) * 0.1)
    linear = linear_op(layer.weight, kind=te.ops.Linear, bias=True)
    linear.bias = layer.bias
    fork = te.ops.MakeExtraOutput(in_place=True)
    main = te.ops.Sequential(
        norm_op(layer), te.ops.Quantize(forward=True, backward=False), fork, linear
    )
    adapter = te.ops.Sequential(
        te.ops.Dropout(0.0),
        linear_op(down, kind=te.ops.Linear, bias=False),
        linear_op(up, kind=te.ops.Linear, bias=False),
        te.ops.ConstantScale(2.0),
        te.ops.AddExtraInput(in_place=True),
    )
    x = torch.randn(32, 64, requires_grad=True)
    with region(recipe):
        base, hidden = main(x)
        with te.autocast(enabled=False):
            y = adapter(hidden, base)
    y.square().sum().backward()
    assert layer.weight.grad is None

    leaves = wide(x, down, up)
    weight, bias, gamma = wide(layer.weight, layer.bias, layer.layer_norm_weight)
    hidden = functional.rms_norm(leaves[0], (64,), gamma, layer.eps)
    linear = linear_of(recipe)
    expected = linear(hidden, weight, bias)
    if recipe is not None:  # the fork hands out the quantised values
        hidden = hidden + (linear.quantized(hidden, 0, "x") - hidden).detach()
    expected = expected + 2 * hidden @ leaves[1].T @ leaves[2].T
    expected.square().sum().backward()
    close(y, expected, recipe)
    for one, leaf in zip((x, down, up), leaves, strict=True):
        close(one.grad, leaf.grad, recipe)


class Adapted(nn.Linear):
    """A class that a layer is given, whose forward calls the layer's own forward."""

    def forward(self, x):
        return self.own_forward(x) + self.up(self.down(x))


@pytest.mark.parametrize("has_run", [False, True])
def test_a_layer_that_becomes_another_class_with_layers_in_it(recipe, has_run):
    """NeMo AutoModel's LoRA: ``__class__`` is exchanged and the bound forward kept."""
    torch.default_generator.manual_seed(0)
    layer, linear = te.Linear(64, 128, **OPTIONS), linear_of(recipe)
    if has_run:
        x = torch.randn(16, 64)
        with region(recipe):
            layer(x)
        if recipe is not None:
            linear(x.double(), layer.weight.double())
            linear.update()
    layer.requires_grad_(False)
    layer.down = te.Linear(64, 16, bias=False, **OPTIONS)
    layer.up = te.Linear(16, 128, bias=False, **OPTIONS)
    layer.own_forward = layer.forward
    layer.__class__ = type("AdaptedLinear", (Adapted, te.Linear), {})
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-5)
    for _ in range(3):
        x = torch.randn(32, 64, requires_grad=True)
        with region(recipe):
            y = layer(x)
        optimizer.zero_grad()
        y.square().sum().backward()
        leaves = wide(x, *trained)
        expected = linear(leaves[0], *wide(layer.weight, layer.bias))
        expected = expected + linear(linear(leaves[0], leaves[1]), leaves[2])
        expected.square().sum().backward()
        if recipe is not None:
            linear.update()
        close(y, expected, recipe)
        for one, leaf in zip((x, *trained), leaves, strict=True):
            close(one.grad, leaf.grad, recipe)
        optimizer.step()
    assert len(trained) == 2
    assert layer.weight.grad is None


# Other patterns of Megatron-LM: subclassed layers, recipes that are made anew, buffers that optimizers write.


class MegatronLinear(te.Linear):
    """A layer like TELinear: attributes before the constructor, ``forward`` called by name, a bias that is replaced."""

    def __init__(self, config, *sizes, **options):
        self.config = config
        self.te_return_bias = True
        self.is_first_microbatch = True
        self.disable_parameter_transpose_cache = False
        self.symmetric_ar_type = None
        self._tp_group = None
        super().__init__(*sizes, return_bias=True, sequence_parallel=True, **options)
        self.bias = nn.Parameter(torch.full_like(self.bias, 0.5))
        for parameter in self.parameters():
            parameter.allreduce = True
        self.weight.tensor_model_parallel = False

    def forward(self, x):
        first = None if self.disable_parameter_transpose_cache else self.is_first_microbatch
        out = super().forward(x, is_first_microbatch=first)
        self.is_first_microbatch = False
        return out


def test_a_subclass_calls_forward_and_takes_the_straight_path(recipe, monkeypatch):
    layer, plain = MegatronLinear("config", 32, 32, **OPTIONS), te.Linear(32, 32, **OPTIONS)
    with torch.no_grad():
        plain.weight.copy_(layer.weight)
        plain.bias.zero_()
    x = torch.randn(16, 32)
    assert (layer.config, layer.sequence_parallel, layer.tp_size) == ("config", False, 1)
    assert layer.to(torch.float32).weight.allreduce
    assert dict(layer.named_parameters())["bias"].allreduce

    def general(*_):
        raise AssertionError

    monkeypatch.setattr(MegatronLinear, "_forward_general", general)
    for _ in range(3):
        with region(recipe):
            wanted = plain(x, is_first_microbatch=layer.is_first_microbatch)
            y, bias = layer(x)
        assert torch.equal(y, wanted)
        assert torch.equal(bias, torch.full((32,), 0.5))
    assert not layer.is_first_microbatch


class MegatronDelayed(DelayedScaling):
    def __init__(self):
        super().__init__(
            margin=0,
            amax_history_len=4,
            override_linear_precision=(False, False, False),
            params_dtype=torch.bfloat16,
            device="cpu",
        )


@pytest.mark.parametrize("make", [MegatronDelayed, Float8CurrentScaling, Float8BlockScaling])
def test_recipes_that_are_made_anew_for_each_region_make_no_plans(make):
    layers = [te.Linear(32, 32, **OPTIONS), te.LayerNormLinear(32, 32, **OPTIONS)]
    x, counts, epochs = torch.randn(16, 32), [], []
    for _ in range(4):
        with te.autocast(recipe=make()):
            layers[1](layers[0](x)).sum().backward()
            epochs.append(native.autocast_region()[5])
        counts.append([layer._plan_count() for layer in layers])
    assert len(set(epochs)) == 1
    assert counts[0] == counts[-1]
    assert min(counts[0]) > 0


@pytest.mark.parametrize("first", [None, True])
def test_weights_that_a_gather_writes_are_seen(recipe, first):
    """Parameters are views of one buffer; new values arrive in the buffer, and parameters keep their versions."""
    layers = [te.Linear(32, 32, bias=False, **OPTIONS) for _ in range(2)]
    flat = torch.cat([layer.weight.detach().reshape(-1) for layer in layers])
    for layer, part in zip(layers, flat.chunk(2), strict=True):
        layer.weight.data = part.view(32, 32)
    main = nn.Parameter(flat.clone())
    optimizer = te.optimizers.FusedAdam([main], lr=0.1)
    x = torch.randn(16, 32)
    for step in range(3):
        versions = [layer.weight._version for layer in layers]
        fresh = te.Linear(32, 32, bias=False, **OPTIONS)
        for layer in layers:
            fresh.weight = nn.Parameter(layer.weight.detach().clone())
            # Without gradients the scales do not change.
            with torch.no_grad(), region(recipe):
                assert torch.equal(layer(x, is_first_microbatch=first), fresh(x)), step
                # A second microbatch reads the kept weight.
                again = False if first else None
                assert torch.equal(layer(x, is_first_microbatch=again), fresh(x))
        main.grad = torch.randn_like(main)
        optimizer.step()
        flat.data.copy_(main.detach())
        assert versions == [layer.weight._version for layer in layers]


def test_modules_without_weights_have_no_delayed_gradients():
    """Megatron-FSDP asks every module, and Megatron-LM's schedules call ``backward_dw`` of every module."""
    layer = te.TransformerLayer(32, 32, 4, device="cpu")
    attention = layer.self_attention.core_attention
    assert not attention.need_backward_dw()
    assert not attention.wgrad_store.delay_wgrad_compute()
    assert attention.backward_dw() is None
