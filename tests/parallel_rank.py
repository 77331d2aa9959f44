"""One of several ranks that share layers: ``python parallel_rank.py RANK WORLD FOLDER SCENE ...``.

Each scene compares with the whole layer in plain torch, and raises where results differ. The script writes the errors
of each scene to a file. Run by ``unit/test_parallel_ranks.py``, in processes of their own.
"""

from __future__ import annotations

import copy
import datetime
import weakref
from contextlib import contextmanager
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

import te_fast
import te_fast.pytorch as te
from ranks import Scenes, Stop, device
from recipes import RECIPES
from reference import QuantizedLinear, quantize_1d
from te_fast import _config
from te_fast.common import recipe as te_recipe
from te_fast.parallel.collectives import Ranks
from te_fast.parallel.quantized import Gather, gather_input

ROWS, IN, OUT = 32, 64, 128
scenes = Scenes()
scene = scenes.scene


def rank_and_size():
    return dist.get_rank(), dist.get_world_size()


def random(*shape, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")
    return values.to(device()) * scale


def share(tensor, dim):
    rank, size = rank_and_size()
    return tensor.chunk(size, dim)[rank]


def region(name):
    return te.autocast(enabled=name is not None, recipe=name and RECIPES[name]())


def linear_of(name):
    """A linear function in FP64, of operands rounded to FP8."""
    return functional.linear if name is None else QuantizedLinear(name)


def close(got, expected, tolerance, what):
    assert got is not None, what
    assert tuple(got.shape) == tuple(expected.shape), (what, got.shape, expected.shape)
    error = (got.double() - expected).norm() / (expected.norm() + 1e-30)
    assert error <= tolerance, f"{what}: relative error {error:.2e}"


def tolerance_of(recipe, dtype):
    if recipe is not None:
        return 4e-3 if dtype == torch.float32 else 4e-2
    return 1e-5 if dtype == torch.float32 else 2e-2


def fill(layer, **values):
    with torch.no_grad():
        for name, value in values.items():
            getattr(layer, name).copy_(value)


@contextmanager
def debugging():
    """``TE_FAST_DEBUG=1``."""
    _config.DEBUG = True
    try:
        yield
    finally:
        _config.DEBUG = False


def marks(parameter):
    names = "tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel"
    return {name: getattr(parameter, name) for name in names if hasattr(parameter, name)}


PARALLEL = {"tensor_model_parallel": True, "partition_stride": 1}


# Linear ---------------------------------------------------------------------------------------------


def check_linear(mode, sequence, recipe, dtype=torch.float32, **options):
    size = dist.get_world_size()
    x, w, b = random(ROWS, IN, seed=1), random(OUT, IN, seed=2, scale=0.1), random(OUT, seed=3)
    g = random(ROWS, OUT, seed=4)
    x, w, b, g = (t.to(dtype).double() for t in (x, w, b, g))
    # The whole layer: each rank's share of the weight has a scale of its own.
    x0, w0, b0 = (t.clone().requires_grad_() for t in (x, w, b))
    linear = linear_of(recipe)
    if mode == "column":
        shares = zip(w0.chunk(size), b0.chunk(size), strict=True)
        y0 = torch.cat([linear(x0, part) + bias for part, bias in shares], -1)
    else:
        pairs = zip(x0.chunk(size, -1), w0.chunk(size, -1), strict=True)
        y0 = sum(linear(x_part, part) for x_part, part in pairs) + b0
    y0.backward(g)

    layer = te.Linear(
        IN, OUT, params_dtype=dtype, device=device(), parallel_mode=mode, sequence_parallel=sequence,
        tp_group=dist.group.WORLD, tp_size=size, name="proj", **options,
    )  # fmt: skip
    dim = 0 if mode == "column" else 1
    fill(layer, weight=share(w, dim), bias=share(b, 0) if mode == "column" else b)
    rows_in = sequence and mode == "column"
    local = share(x, 0) if rows_in else x if mode == "column" else share(x, -1)
    local = local.to(dtype).requires_grad_()
    with region(recipe):
        y = layer(local)
    if options.get("return_bias"):
        y, bias = y
        assert bias is layer.bias
        y = y + bias.detach()
    rows_out = sequence and mode == "row"
    dy = share(g, -1) if mode == "column" else share(g, 0) if rows_out else g
    expected = share(y0, -1) if mode == "column" else share(y0, 0) if rows_out else y0
    if options.get("fuse_wgrad_accumulation"):
        layer.weight.main_grad = torch.ones_like(layer.weight, dtype=torch.float32)
    y.backward(dy.to(dtype))
    if options.get("delay_wgrad_compute"):
        assert layer.weight.grad is None
        layer.backward_dw()
    tolerance = tolerance_of(recipe, dtype)
    close(y.detach(), expected.detach(), tolerance, "y")
    dx0 = share(x0.grad, 0) if rows_in else x0.grad if mode == "column" else share(x0.grad, -1)
    close(local.grad, dx0, tolerance, "dx")
    dw = layer.weight.grad
    if options.get("fuse_wgrad_accumulation"):
        assert dw is None
        dw = layer.weight.main_grad - 1
    close(dw, share(w0.grad, dim), tolerance, "dw")
    if not options.get("return_bias"):
        db = layer.bias.grad.clone()
        if rows_out:  # the framework sums these
            dist.all_reduce(db)
        close(db, share(b0.grad, 0) if mode == "column" else b0.grad, tolerance, "db")
    return layer


@scene
def linear():
    for mode, sequence, recipe in product(("column", "row"), (False, True), (None, *RECIPES)):
        layer = check_linear(mode, sequence, recipe)
        assert marks(layer.weight) == {**PARALLEL, "partition_dim": 0 if mode == "column" else 1}
        expected = (
            {**PARALLEL, "partition_dim": 0}
            if mode == "column"
            else {"sequence_parallel": sequence}
        )
        assert marks(layer.bias) == expected


@scene
def linear_in_bfloat16():
    for mode, sequence, recipe in product(("column", "row"), (False, True), (None, "current")):
        check_linear(mode, sequence, recipe, torch.bfloat16)


@scene
def linear_options():
    for mode, recipe in product(("column", "row"), (None, "delayed")):
        check_linear(mode, True, recipe, fuse_wgrad_accumulation=True)
        check_linear(mode, True, recipe, delay_wgrad_compute=True)
        check_linear(mode, True, recipe, fuse_wgrad_accumulation=True, delay_wgrad_compute=True)
        check_linear(mode, True, recipe, return_bias=True)


# LayerNormLinear and LayerNormMLP -------------------------------------------------------------------


def norm_of(x, gamma, beta):
    return functional.layer_norm(x, x.shape[-1:], gamma, beta, eps=1e-5)


def check_layernorm_linear(sequence, recipe, *, returns=False, gathered=False):
    size = dist.get_world_size()
    x, w, b = random(ROWS, IN, seed=1), random(OUT, IN, seed=2, scale=0.1), random(OUT, seed=3)
    gamma, beta = 1 + random(IN, seed=5, scale=0.1), random(IN, seed=6, scale=0.1)
    g, g_norm = random(ROWS, OUT, seed=4), random(ROWS, IN, seed=7)
    tensors = [t.float().double() for t in (x, w, b, gamma, beta)]
    x0, w0, b0, gamma0, beta0 = leaves = [t.clone().requires_grad_() for t in tensors]
    linear = linear_of(recipe)
    normed0 = norm_of(x0, gamma0, beta0)
    shares = zip(w0.chunk(size), b0.chunk(size), strict=True)
    y0 = torch.cat([linear(normed0, part) + bias for part, bias in shares], -1)
    if returns:
        torch.autograd.backward([y0, normed0], [g, g_norm])
    else:
        y0.backward(g)
    layer = te.LayerNormLinear(
        IN, OUT, device=device(), parallel_mode="column", sequence_parallel=sequence, tp_group=dist.group.WORLD,
        tp_size=size, return_layernorm_output=returns, return_layernorm_output_gathered=gathered,
    )  # fmt: skip
    values = {"layer_norm_weight": tensors[3], "layer_norm_bias": tensors[4]}
    fill(layer, weight=share(tensors[1], 0), bias=share(tensors[2], 0), **values)
    local = (share(tensors[0], 0) if sequence else tensors[0]).float().requires_grad_()
    with region(recipe):
        out = layer(local)
    tolerance = tolerance_of(recipe, torch.float32)
    if returns:
        y, normed = out
        is_local = sequence and not gathered
        close(normed.detach(), share(normed0, 0) if is_local else normed0, 1e-5, "norm")
        # Each rank's gradient of a gathered tensor is its part of a sum.
        part = share(g_norm, 0) if is_local else g_norm / size if gathered and sequence else g_norm
        torch.autograd.backward([y, normed], [share(g, -1).float(), part.float()])
    else:
        y = out
        y.backward(share(g, -1).float())
    close(y.detach(), share(y0, -1), tolerance, "y")
    close(local.grad, share(x0.grad, 0) if sequence else x0.grad, tolerance, "dx")
    close(layer.weight.grad, share(w0.grad, 0), tolerance, "dw")
    close(layer.bias.grad, share(b0.grad, 0), tolerance, "db")
    for name, leaf in (("layer_norm_weight", leaves[3]), ("layer_norm_bias", leaves[4])):
        parameter = getattr(layer, name)
        assert marks(parameter) == {"sequence_parallel": sequence}
        grad = parameter.grad.clone()
        if sequence:
            dist.all_reduce(grad)
        close(grad, leaf.grad, tolerance, name)


@scene
def layernorm_linear():
    for sequence, recipe in product((False, True), (None, *RECIPES)):
        check_layernorm_linear(sequence, recipe)


@scene
def layernorm_output():
    for sequence, gathered, recipe in product((False, True), (False, True), ("current",)):
        check_layernorm_linear(sequence, recipe, returns=True, gathered=gathered)


def check_mlp(sequence, recipe, activation="gelu", **options):
    size = dist.get_world_size()
    ffn = 128
    halves = 2 if activation == "swiglu" else 1
    x, gamma, beta = (
        random(ROWS, IN, seed=1),
        1 + random(IN, seed=5, scale=0.1),
        random(IN, seed=6, scale=0.1),
    )
    w1, b1 = random(halves, ffn, IN, seed=2, scale=0.1), random(halves, ffn, seed=3, scale=0.1)
    w2, b2, g = random(IN, ffn, seed=8, scale=0.1), random(IN, seed=9), random(ROWS, IN, seed=4)
    tensors = [t.float().double() for t in (x, gamma, beta, w1, b1, w2, b2)]
    leaves = [t.clone().requires_grad_() for t in tensors]
    x0, gamma0, beta0, w10, b10, w20, b20 = leaves
    linear = linear_of(recipe)
    normed = norm_of(x0, gamma0, beta0)
    y0 = b20
    parts = zip(w10.chunk(size, 1), b10.chunk(size, 1), w20.chunk(size, 1), strict=True)
    for first, bias, second in parts:
        hidden = linear(normed, first.reshape(-1, IN)) + bias.reshape(-1)
        if halves == 2:
            gate, up = hidden.chunk(2, -1)
            hidden = functional.silu(gate) * up
        else:
            hidden = functional.gelu(hidden, approximate="tanh")
        y0 = y0 + linear(hidden, second)
    y0.backward(g)
    layer = te.LayerNormMLP(
        IN, ffn, device=device(), set_parallel_mode=True, sequence_parallel=sequence, activation=activation,
        tp_group=dist.group.WORLD, tp_size=size, **options,
    )  # fmt: skip
    shares = {
        "layer_norm_weight": tensors[1], "layer_norm_bias": tensors[2],
        "fc1_weight": share(tensors[3], 1).reshape(-1, IN),
        "fc1_bias": share(tensors[4], 1).reshape(-1), "fc2_weight": share(tensors[5], 1), "fc2_bias": tensors[6],
    }  # fmt: skip
    fill(layer, **shares)
    rows = (lambda t: share(t, 0)) if sequence else (lambda t: t)
    local = rows(tensors[0]).float().requires_grad_()
    with region(recipe):
        y = layer(local)
    y.backward(rows(g).float())
    if options.get("delay_wgrad_compute"):
        layer.backward_dw()
    tolerance = 5 * tolerance_of(recipe, torch.float32)
    close(y.detach(), rows(y0), tolerance, "y")
    close(local.grad, rows(x0.grad), tolerance, "dx")
    close(layer.fc1_weight.grad, share(w10.grad, 1).reshape(-1, IN), tolerance, "dw1")
    close(layer.fc1_bias.grad, share(b10.grad, 1).reshape(-1), tolerance, "db1")
    close(layer.fc2_weight.grad, share(w20.grad, 1), tolerance, "dw2")
    for name, leaf in (
        ("fc2_bias", b20),
        ("layer_norm_weight", gamma0),
        ("layer_norm_bias", beta0),
    ):
        parameter = getattr(layer, name)
        assert marks(parameter) == {"sequence_parallel": sequence}, name
        grad = parameter.grad.clone()
        if sequence:
            dist.all_reduce(grad)
        close(grad, leaf.grad, tolerance, name)
    assert marks(layer.fc1_weight) == marks(layer.fc1_bias) == {**PARALLEL, "partition_dim": 0}
    assert marks(layer.fc2_weight) == {**PARALLEL, "partition_dim": 1}


@scene
def layernorm_mlp():
    check_mlp(False, None)
    check_mlp(True, "delayed")
    check_mlp(True, "block")
    check_mlp(True, "current", "swiglu")


@scene
def layernorm_mlp_with_options():
    for sequence, recipe in product((False, True), (None, *RECIPES)):
        check_mlp(sequence, recipe)
    check_mlp(True, "current", delay_wgrad_compute=True)
    check_mlp(True, "delayed", checkpoint=True)
    check_mlp(False, "current", checkpoint=True)


@scene
def experts():
    """Ranks share the features of each expert: column, then row; the caller that routes tokens makes the sum."""
    rank, size = rank_and_size()
    ffn, splits = 64, [16, 0, 32, 16]
    x, g = random(sum(splits), IN, seed=1).float(), random(sum(splits), IN, seed=2).float()
    w1 = [random(ffn, IN, seed=10 + one, scale=0.1).float() for one in range(4)]
    w2 = [random(IN, ffn, seed=20 + one, scale=0.1).float() for one in range(4)]
    for recipe in (None, "delayed", "block"):
        linear = linear_of(recipe)
        leaves = [t.double().requires_grad_() for t in (x, *w1, *w2)]
        x0, firsts, seconds = leaves[0], leaves[1:5], leaves[5:]
        rows = []
        for one, first, second in zip(x0.split(splits), firsts, seconds, strict=True):
            parts = zip(first.chunk(size), second.chunk(size, -1), strict=True)
            rows.append(sum(linear(linear(one, a).relu(), b) for a, b in parts))
        y0 = torch.cat(rows)
        y0.backward(g.double())
        options = {"bias": False, "device": device(), "tp_group": dist.group.WORLD}
        column = te.GroupedLinear(4, IN, ffn, parallel_mode="column", **options)
        row = te.GroupedLinear(4, ffn, IN, parallel_mode="row", **options)
        assert (column.tp_size, column.weight0.shape) == (size, (ffn // size, IN))
        fill(column, **{f"weight{one}": share(w, 0) for one, w in enumerate(w1)})
        fill(row, **{f"weight{one}": share(w, 1) for one, w in enumerate(w2)})
        local = x.clone().requires_grad_()
        with region(recipe):
            y = row(column(local, splits).relu(), splits)
        y.backward(g)
        y = y.detach()
        for part in (y, local.grad):
            dist.all_reduce(part)
        tolerance = 3 * tolerance_of(recipe, torch.float32)
        close(y, y0.detach(), tolerance, f"y of {recipe}")
        close(local.grad, x0.grad, tolerance, f"dx of {recipe}")
        for one in range(4):
            for layer, leaf, dim in ((column, firsts[one], 0), (row, seconds[one], 1)):
                got = getattr(layer, f"weight{one}").grad
                close(got, share(leaf.grad, dim), tolerance, f"dw of expert {one}, {recipe}")
    with raises(ValueError, "tp_size"):
        te.GroupedLinear(4, IN, ffn, tp_size=size + 1, **options)


@scene
def checkpoints_of_other_ranks():
    """A state of the whole layer or of other shares is refused by the parameter's name; scales are always accepted."""
    size = dist.get_world_size()
    options = {"parallel_mode": "column", "tp_group": dist.group.WORLD, "bias": False}
    shared = te.Linear(IN, OUT, device=device(), name="proj", **options)
    whole = te.Linear(IN, OUT, device=device(), bias=False)
    x = random(ROWS, IN, seed=1).float()
    with region("delayed"):
        shared(x).sum().backward()
        whole(x).sum().backward()
    for target, source in ((shared, whole), (whole, shared)):
        kept = target.weight.detach().clone()
        with pytest.raises(RuntimeError, match=r"size mismatch for weight"):
            target.load_state_dict(source.state_dict())
        assert torch.equal(target.weight, kept)
    # A state cut by hand, as in Megatron-LM's distributed checkpoints: the layer accepts weights and scales.
    state = whole.state_dict()
    shared.load_state_dict(state | {"weight": state["weight"].chunk(size)[dist.get_rank()]})
    assert torch.equal(shared.weight, share(whole.weight.detach(), 0))
    for key in ("scaling_fwd", "scaling_bwd"):
        assert torch.equal(shared.fp8_meta[key].scale, whole.fp8_meta[key].scale)


# Operations -----------------------------------------------------------------------------------------


def check_op(make, mode, sequence, recipe, *, alone=True):
    """Check a linear operation, as one native segment and among operations of Python."""
    size = dist.get_world_size()
    x, w, g = (
        random(ROWS, IN, seed=1),
        random(OUT, IN, seed=2, scale=0.1),
        random(ROWS, OUT, seed=4),
    )
    b = random(size, OUT, seed=3) if mode == "row" else random(OUT, seed=3)
    x, w, b, g = (t.float().double() for t in (x, w, b, g))
    x0, w0, b0 = (t.clone().requires_grad_() for t in (x, w, b))
    op = make(
        IN, OUT, device=device(), tensor_parallel_mode=mode, sequence_parallel=sequence,
        tensor_parallel_group=dist.group.WORLD,
    )  # fmt: skip
    has_bias = isinstance(op, te.ops.Linear)
    linear = linear_of(recipe)
    if mode == "column":
        y0 = torch.cat([linear(x0, part) for part in w0.chunk(size)], -1) + (b0 if has_bias else 0)
    else:
        pairs = zip(x0.chunk(size, -1), w0.chunk(size, -1), strict=True)
        y0 = sum(linear(x_part, part) for x_part, part in pairs) + (b0.sum(0) if has_bias else 0)
    y0.backward(g)
    fill(op, weight=share(w, 0 if mode == "column" else 1))
    if has_bias:
        fill(op, bias=share(b, 0) if mode == "column" else b[dist.get_rank()])
    local = share(x, -1) if mode == "row" else share(x, 0) if sequence else x
    local = local.float().requires_grad_()
    module = op if alone else te.ops.Sequential(te.ops.Reshape((-1, local.shape[-1])), op)
    with region(recipe):
        y = module(local)
    rows_out = sequence and mode == "row"
    y.backward((share(g, -1) if mode == "column" else share(g, 0) if rows_out else g).float())
    tolerance = tolerance_of(recipe, torch.float32)
    close(
        y.detach(),
        share(y0, -1) if mode == "column" else share(y0, 0) if rows_out else y0,
        tolerance,
        "y",
    )
    dx0 = share(x0.grad, -1) if mode == "row" else share(x0.grad, 0) if sequence else x0.grad
    close(local.grad, dx0, tolerance, "dx")
    close(op.weight.grad, share(w0.grad, 0 if mode == "column" else 1), tolerance, "dw")
    if has_bias:
        expected = share(b0.grad, 0) if mode == "column" else b0.grad[dist.get_rank()]
        close(op.bias.grad, expected, tolerance, "db")
    return op


@scene
def linear_operations():
    for mode, sequence in product(("column", "row"), (False, True)):
        for recipe in (None, "current", "delayed"):
            check_op(te.ops.Linear, mode, sequence, recipe)
        check_op(te.ops.BasicLinear, mode, sequence, "block")
    check_op(te.ops.Linear, "column", True, "current", alone=False)
    check_op(te.ops.BasicLinear, "row", True, "current", alone=False)
    op = check_op(te.ops.BasicLinear, "column", True, None)
    x = random(8, IN, seed=1).float()
    assert torch.equal(copy.deepcopy(op)(x), op(x))
    chain = te.ops.Sequential(te.ops.GELU(), op, te.ops.GELU())
    chain(x)
    assert "all-gather" in chain.explain()
    # By Python's methods, which a user's fusion calls.
    context, python_context = (te_fast.ops.op.OperationContext() for _ in range(2))
    y = op.op_forward(context, x, prev_op_grad_output_quantizer=None, next_op_input_quantizer=None)
    assert torch.equal(y, op(x))
    context.saved_tensors = context.to_save
    dy = torch.ones_like(y)
    dx, (dw,) = op.op_backward(context, dy)
    op.weight.grad = None
    x = x.requires_grad_()
    op(x).backward(dy)
    assert torch.equal(dx, x.grad)
    assert torch.equal(dw, op.weight.grad)


@scene
def chains_of_operations():
    """A feed-forward block of operations, column then row, beside the layer."""
    for sequence, recipe in ((False, None), (True, "current"), (True, "delayed")):
        options = {
            "device": device(),
            "tensor_parallel_group": dist.group.WORLD,
            "sequence_parallel": sequence,
        }
        chain = te.ops.Sequential(
            te.ops.LayerNorm(IN, device=device()),
            te.ops.BasicLinear(IN, OUT, tensor_parallel_mode="column", **options),
            te.ops.GELU(),
            te.ops.BasicLinear(OUT, IN, tensor_parallel_mode="row", **options),
        )
        layer = te.LayerNormMLP(
            IN, OUT, device=device(), bias=False, set_parallel_mode=True, sequence_parallel=sequence,
            tp_group=dist.group.WORLD,
        )  # fmt: skip
        weights = random(OUT, IN, seed=1, scale=0.2), random(IN, OUT, seed=2, scale=0.2)
        shares = share(weights[0], 0), share(weights[1], 1)
        fill(layer, fc1_weight=shares[0], fc2_weight=shares[1])
        fill(chain[1], weight=shares[0])
        fill(chain[3], weight=shares[1])
        x, g = random(ROWS, IN, seed=3).float(), random(ROWS, IN, seed=4).float()
        if sequence:
            x, g = share(x, 0), share(g, 0)
        xs = [x.clone().requires_grad_() for _ in range(2)]
        with region(recipe):
            ys = [module(one) for module, one in zip((chain, layer), xs, strict=True)]
        for y in ys:
            y.backward(g)
        pairs = zip(
            (ys[0].detach(), xs[0].grad, chain[1].weight.grad, chain[3].weight.grad),
            (ys[1].detach(), xs[1].grad, layer.fc1_weight.grad, layer.fc2_weight.grad),
            strict=True,
        )
        for number, (got, expected) in enumerate(pairs):
            close(got, expected.double(), 2e-2 if recipe else 1e-5, f"{number} of {recipe}")


@scene
def communication_operations():
    rank, size = rank_and_size()
    x = random(4 * size, 8, seed=rank).float()
    every = torch.stack([random(4 * size, 8, seed=r).float() for r in range(size)])
    for make, forward in (
        (te.ops.AllGather, lambda t: t.flatten(0, 1)),
        (te.ops.ReduceScatter, lambda t: t.sum(0).chunk(size)[rank]),
        (te.ops.AllReduce, lambda t: t.sum(0)),
    ):
        op = make(dist.group.WORLD)
        for module in (
            op,
            te.ops.Sequential(te.ops.Identity(), copy.deepcopy(op), te.ops.Identity()),
        ):
            local = x.clone().requires_grad_()
            y = module(local)
            assert torch.allclose(y, forward(every))
            assert torch.equal(local, x)
            gs = [random(*y.shape, seed=r).float() for r in range(size)]
            g = gs[rank]
            y.backward(g)
            if make is te.ops.AllGather:
                expected = sum(gs).chunk(size)[rank]
            else:
                expected = torch.cat(gs) if make is te.ops.ReduceScatter else g
            assert torch.allclose(local.grad, expected)
        with raises(RuntimeError, f"{make.__name__}: the input's shape"):
            op(torch.ones(size + size * rank, 4))
    with raises(ValueError, "ReduceScatter: the first dimension must be a multiple of the"):
        te.ops.ReduceScatter()(torch.ones(size + 1, 4))
    for make in (te.ops.AllGather, te.ops.ReduceScatter):
        with raises(ValueError, f"{make.__name__}: the input must have a first dimension"):
            make()(torch.tensor(1.0))


# What all have in common --------------------------------------------------------------------------------


@scene
def scales_are_those_of_one_rank():
    """Current scaling: the largest value of one rank's rows scales those of all, bit for bit."""
    rank, size = rank_and_size()
    x, w, g = (
        random(ROWS, IN, seed=1).float(),
        random(OUT, IN, seed=2).float(),
        random(ROWS, OUT, seed=3).float(),
    )
    x[0, 0], g[-1, -1] = 40.0, 900.0
    # Every share of the weight has the same largest value, and so the same scale.
    w[0 :: OUT // size] = 5.0
    w.clamp_(-5.0, 5.0)

    def gradients(layer, x, g):
        x = x.clone().requires_grad_()
        with region("current"):
            y = layer(x)
        y.backward(g)
        return y.detach(), x.grad, layer.weight.grad

    whole = te.Linear(IN, OUT, bias=False, device=device())
    fill(whole, weight=w)
    options = {
        "bias": False,
        "device": device(),
        "sequence_parallel": True,
        "tp_group": dist.group.WORLD,
    }
    column = te.Linear(IN, OUT, parallel_mode="column", **options)
    fill(column, weight=share(w, 0))
    y0, _, _ = gradients(whole, x, g)
    y, _, _ = gradients(column, share(x, 0), share(g, -1).contiguous())
    assert torch.equal(y, share(y0, -1))
    # dy of a row-parallel layer: one rank's, compared with the ranks' results for their rows.
    row = te.Linear(IN, OUT, parallel_mode="row", **options)
    w = w.t().contiguous().t()
    w[:, 0 :: IN // size] = 5.0
    fill(whole, weight=w)
    fill(row, weight=share(w, 1))
    whole.weight.grad = None
    _, dx0, _ = gradients(whole, x, g)
    _, dx, _ = gradients(row, share(x, -1).contiguous(), share(g, 0))
    assert torch.equal(dx, share(dx0, -1))


@scene
def blocks_are_those_of_one_rank():
    """Block scaling: bytes, scales, results and gradients equal those of one rank with all rows, bit for bit."""
    rank, size = rank_and_size()
    rows, cols, out = 128 * size, 256, 128 * size
    for dtype, kind in product((torch.bfloat16, torch.float32), (te.Linear, te.LayerNormLinear)):
        x = random(rows // 2, 2, cols, seed=1).to(dtype)
        w, g = random(out, cols, seed=2).to(dtype), random(rows // 2, 2, out, seed=3).to(dtype)

        def gradients(layer, x, g):
            x = x.clone().requires_grad_()
            with region("block"), collectives() as seen:
                y = layer(x)
            forward = list(seen)
            seen.clear()
            with collectives() as seen:
                y.backward(g)
            return y.detach(), layer.weight.grad, forward, seen

        whole = kind(cols, out, bias=False, device=device(), params_dtype=dtype)
        column = kind(
            cols, out, bias=False, device=device(), params_dtype=dtype, parallel_mode="column", sequence_parallel=True,
            tp_group=dist.group.WORLD,
        )  # fmt: skip
        fill(whole, weight=w)
        fill(column, weight=share(w, 0))
        y0, dw0, *_ = gradients(whole, x, g)
        y, dw, forward, backward = gradients(column, share(x, 0), share(g, -1).contiguous())
        assert torch.equal(y, share(y0, -1))
        assert torch.equal(dw, share(dw0, 0))
        travels = [("gather", "uint8", 128 * cols), ("gather", "float32", cols)]
        name = str(dtype).removeprefix("torch.")
        assert forward == travels
        assert backward == [*travels, ("scatter", name, rows * cols)]
        with torch.no_grad(), region("block"), collectives() as seen:
            assert torch.equal(column(share(x, 0)), y)
        assert seen == travels

    local = share(x.flatten(0, 1), 0)
    quantizer = te.Float8BlockQuantizer(
        te.DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=1
    )
    ranks = Ranks("layer", dist.group.WORLD)
    value, parts, coming = gather_input(quantizer(local)._value, local.dtype, ranks, later=True)
    assert coming is None  # rows with scales of their own do not come later
    data, scales = quantize_1d(x.flatten(0, 1).float(), "e4m3")
    assert torch.equal(value._rowwise_data, data)
    assert torch.equal(value._rowwise_scale_inv, scales)
    again = []
    for _, part, is_column in parts:
        gather = Gather(ranks, part, is_column=is_column)
        gather.start()
        gather.wait()
        again.append(gather.whole)
    for got, expected in zip(again, quantize_1d(x.flatten(0, 1).t().float(), "e4m3"), strict=True):
        assert torch.equal(got, expected)


@scene
def backward_in_high_precision():
    """Tensors that backward reads unquantised travel unquantised, and give one rank's gradients."""
    x, w = random(ROWS, IN, seed=1).float(), random(OUT, IN, seed=2).float()
    g = random(ROWS, OUT, seed=3).float()
    for name, mode in product(("current", "block"), ("high_precision", "dequantized")):
        recipe = RECIPES[name](backward_override=mode)
        grads = []
        for options in (
            {},
            {"parallel_mode": "column", "sequence_parallel": True, "tp_group": dist.group.WORLD},
        ):
            layer = te.Linear(IN, OUT, bias=False, device=device(), **options)
            fill(layer, weight=share(w, 0) if options else w)
            with te.autocast(recipe=recipe):
                y = layer(share(x, 0) if options else x)
            y.backward(share(g, -1).contiguous() if options else g)
            grads.append(layer.weight.grad)
        close(grads[1], share(grads[0], 0).double(), 1e-5, f"dw of {name}, {mode}")


@contextmanager
def collectives():
    """The collectives of a call, with the type and number of the elements that a rank sends."""
    seen = []
    names = {
        "all_gather_into_tensor": "gather",
        "reduce_scatter_tensor": "scatter",
        "all_reduce": "sum",
    }
    originals = {name: getattr(dist, name) for name in names}

    def watched(name, function):
        def run(*tensors, **options):
            mine = tensors[0 if name == "all_reduce" else 1]
            if mine.dtype != torch.int64:  # not the comparison of calls
                seen.append((names[name], str(mine.dtype).removeprefix("torch."), mine.numel()))
            return function(*tensors, **options)

        return run

    for name, function in originals.items():
        setattr(dist, name, watched(name, function))
    try:
        yield seen
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)


def without_maxima(seen):
    """Leave out the reductions of delayed scaling at the end of a region and in the backward of its first layer."""
    return [one for one in seen if one[:2] != ("sum", "float32") or one[2] == 1]


@scene
def what_travels():
    """The collectives are exactly those of Transformer Engine's table, and autograd keeps this rank's rows alone."""
    size = dist.get_world_size()
    rows = ROWS // size
    local, whole, out = rows * IN, ROWS * IN, ROWS * OUT
    amax = ("sum", "float32", 1)
    wide = {None: "bfloat16", "delayed": "uint8", "current": "uint8", "block": "bfloat16"}
    for recipe, dtype in wide.items():
        amaxes = [amax] if recipe == "current" else []
        expected = {
            ("column", True): [
                [*amaxes, ("gather", dtype, local)],
                [("gather", dtype, local), ("scatter", "bfloat16", whole)],
            ],
            ("column", False): [[], [("sum", "bfloat16", whole)]],
            ("row", True): [
                [("scatter", "bfloat16", out)],
                [*amaxes, ("gather", dtype, out // size)],
            ],
            ("row", False): [[("sum", "bfloat16", out)], []],
        }
        for (mode, sequence), (forward, backward) in expected.items():
            layer = te.Linear(
                IN, OUT, bias=False, params_dtype=torch.bfloat16, device=device(), parallel_mode=mode,
                sequence_parallel=sequence, tp_group=dist.group.WORLD,
            )  # fmt: skip
            count = rows if sequence and mode == "column" else ROWS
            x = torch.randn(count, layer.in_features, dtype=torch.bfloat16, requires_grad=True)
            kept = []

            def note(tensor, kept=kept):
                kept.append(tensor)
                return tensor

            hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
            with collectives() as seen, region(recipe), hooks:
                y = layer(x)
            assert without_maxima(seen) == forward, (recipe, mode, sequence, seen)
            if mode == "column" and sequence:
                bytes_of = [
                    t.numel() * t.element_size() for t in kept if t.shape != layer.weight.shape
                ]
                assert sum(bytes_of) <= local * (2 if dtype == "bfloat16" else 1) + 64, bytes_of
            dy = torch.randn_like(y)
            with collectives() as seen:
                y.backward(dy)
            assert without_maxima(seen) == backward, (recipe, mode, sequence, seen)


@scene
def inputs_of_every_kind():
    size = dist.get_world_size()
    te_fast.auto_pad(True)
    for sequence, recipe in ((True, None), (True, "delayed"), (False, "current"), (True, "block")):
        layer = te.Linear(
            IN,
            OUT,
            device=device(),
            parallel_mode="column",
            sequence_parallel=sequence,
            tp_group=dist.group.WORLD,
        )
        row = te.LayerNormMLP(
            IN,
            OUT,
            device=device(),
            set_parallel_mode=True,
            sequence_parallel=sequence,
            tp_group=dist.group.WORLD,
        )
        for shape in ((0, IN), (3, IN), (4, 5, IN)):
            x = random(*shape, seed=1).float()
            for module, width in ((layer, OUT // size), (row, IN)):
                for grads in (True, False):
                    local = x.clone().requires_grad_(grads)
                    with region(recipe), torch.set_grad_enabled(grads):
                        y = module(local)
                    rows = shape[0] * (size if sequence and module is layer else 1)
                    assert tuple(y.shape) == (rows, *shape[1:-1], width)
                    assert y.requires_grad == grads
                    if grads:
                        y.sum().backward()
                        assert local.grad.shape == x.shape
                        assert all(p.grad is not None for p in module.parameters())
        with torch.no_grad(), region(recipe):
            strided = random(IN, 8, seed=1).float().t()
            assert torch.equal(layer(strided), layer(strided.contiguous()))


@scene
def recipes_may_change_between_calls():
    """Each call rounds as its own recipe says, and its backward too, in whatever order: bit for bit as one rank."""
    rank, size = rank_and_size()
    x, g = random(ROWS, IN, seed=1).float(), random(ROWS, OUT, seed=3).float()
    w = random(OUT, IN, seed=2).float().clamp_(-3.0, 3.0)
    # All shares of the weight, and of the gradient's columns, have the same scale.
    w[0 :: OUT // size], w[:, 0 :: IN // size] = 3.0, 3.0
    g = g.clamp_(-3.0, 3.0)
    g[0, 0 :: OUT // size] = 3.0
    options = {"bias": False, "device": device()}
    ranks = {"sequence_parallel": True, "tp_group": dist.group.WORLD}
    whole = te.Linear(IN, OUT, **options)
    column = te.Linear(IN, OUT, parallel_mode="column", **options, **ranks)
    row = te.Linear(IN, OUT, parallel_mode="row", **options, **ranks)
    fill(whole, weight=w)
    fill(column, weight=share(w, 0))
    fill(row, weight=share(w, 1))

    def forward(recipe):
        xs = x.clone(), share(x, 0).clone(), share(x, -1).contiguous()
        xs = [one.requires_grad_() for one in xs]
        with te.autocast(recipe=recipe):
            return xs, [layer(one) for layer, one in zip((whole, column, row), xs, strict=True)]

    def check(what, xs, ys):
        assert torch.equal(ys[1], share(ys[0], -1)), what
        for y, dy in zip(ys, (g, share(g, -1).contiguous(), share(g, 0)), strict=True):
            y.backward(dy)
        assert torch.equal(xs[2].grad, share(xs[0].grad, -1)), what
        close(
            xs[1].grad, share(xs[0].grad, 0).double(), tolerance_of("current", torch.float32), what
        )

    one, rounded = te_recipe.Float8CurrentScaling(), te_recipe.QParams(power_2_scale=True)
    check("a recipe", *forward(one))
    one.fp8_quant_fwd_inp = one.fp8_quant_bwd_grad = rounded
    check("another that equals the former", *forward(te_recipe.Float8CurrentScaling()))
    check("the first, changed", *forward(one))
    one.fp8_format = te_recipe.Format.E4M3
    wide = te_recipe.Float8CurrentScaling()
    former, latter = forward(one), forward(wide)
    with torch.no_grad(), te.autocast(recipe=te_recipe.Float8CurrentScaling()):
        column(share(x, 0))
    check("the first of two", *former)
    check("the second of two", *latter)
    former = forward(wide)
    wide.fp8_format = te_recipe.Format.E4M3
    check("another recipe after forward", *forward(wide))
    check("a recipe that changed before backward", *former)


@scene
def sequence_parallel_may_change_between_calls():
    """Megatron's inference changes it around each call; weights are quantised once."""
    rank, size = rank_and_size()
    x = random(ROWS, IN, seed=1).float()
    layer = te.Linear(
        IN,
        OUT,
        device=device(),
        parallel_mode="column",
        sequence_parallel=True,
        tp_group=dist.group.WORLD,
    )
    with torch.no_grad(), region("current"):
        whole = layer(share(x, 0), is_first_microbatch=True)
        kept = layer._fp8_workspaces["weight"].data_ptr()
        layer.sequence_parallel = False
        assert torch.equal(layer(x, is_first_microbatch=False), whole)
        assert layer._fp8_workspaces["weight"].data_ptr() == kept
        layer.sequence_parallel = True
        assert torch.equal(layer(share(x, 0), is_first_microbatch=False), whole)


@scene
def steps_of_delayed_scaling():
    """Two layers, three steps: ranks keep the same scales, and train as the whole layers do."""
    size = dist.get_world_size()
    w1, w2 = random(OUT, IN, seed=1, scale=0.2).float(), random(IN, OUT, seed=2, scale=0.2).float()
    options = {
        "bias": False,
        "device": device(),
        "tp_group": dist.group.WORLD,
        "sequence_parallel": True,
    }
    first = te.LayerNormLinear(IN, OUT, parallel_mode="column", **options)
    second = te.Linear(OUT, IN, parallel_mode="row", **options)
    fill(first, weight=share(w1, 0))
    fill(second, weight=share(w2, 1))
    linear = QuantizedLinear("delayed")
    w10, w20 = w1.double().requires_grad_(), w2.double().requires_grad_()
    for step in range(3):
        x = random(ROWS, IN, seed=10 + step).float()
        x0 = x.double().requires_grad_()
        hidden = [linear(norm_of(x0, None, None), part) for part in w10.chunk(size)]
        parts = zip(hidden, w20.chunk(size, 1), strict=True)
        y0 = sum(linear(part.relu(), weight) for part, weight in parts)
        y0.square().mean().backward()
        local = share(x, 0).requires_grad_()
        with region("delayed"):
            y = second(first(local).relu())
        (y.square().sum() / y0.numel()).backward()
        # The reference updates each share's scale by itself; te_fast reduces over the ranks.
        for call in list(linear.maxima):
            number, operand = call
            group = [
                key
                for key in linear.maxima
                if key[1] == operand and (key[0] < size) == (number < size)
            ]
            linear.maxima[call] = max(linear.maxima[key] for key in group)
        linear.update()
        close(y.detach(), share(y0.detach(), 0), 2e-2, f"y of step {step}")
        close(local.grad, share(x0.grad, 0), 5e-2, f"dx of step {step}")
        close(first.weight.grad, share(w10.grad, 0), 5e-2, f"dw of step {step}")
        for tensor in (w10, w20, first.weight, second.weight):
            tensor.grad = None
    for layer in (first, second):
        for key in ("scaling_fwd", "scaling_bwd"):
            scale = layer.fp8_meta[key].scale
            largest = scale.clone()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            assert torch.equal(scale, largest)


@contextmanager
def raises(kind, match):
    with pytest.raises(kind, match=match) as raised:
        yield
    assert isinstance(raised.value, te_fast.TeFastError)


@scene
def ranks_that_disagree():
    rank, size = rank_and_size()
    options = {"device": device(), "tp_group": dist.group.WORLD, "sequence_parallel": True}
    for mode in ("column", "row"):
        layer = te.Linear(IN, OUT, parallel_mode=mode, name="proj", **options)
        x = torch.ones(8, layer.in_features)
        with raises(RuntimeError, r"proj: the input's shape .* rank 0 has \[8, "):
            layer(torch.ones(8 + size * rank, layer.in_features))
        with raises(RuntimeError, "proj: the recipe"), region(["current", "delayed"][rank == 0]):
            layer(x)
        dtype = [torch.float32, torch.bfloat16][rank == 0]
        layer.to(dtype)
        with raises(RuntimeError, "proj: the input's type"):
            layer(x.to(dtype))
        layer.float()
        wanted = torch.set_grad_enabled(rank == 0)
        with raises(RuntimeError, "proj: the set of what wants gradients"), wanted:
            layer(x)
        # Backward gathers the input only for a weight that trains.
        layer.weight.requires_grad_(rank == 0)
        with raises(RuntimeError, "proj: the set of what wants gradients"):
            layer(x.clone().requires_grad_())
        layer.weight.requires_grad_()
        layer(x).sum().backward()  # training goes on where the ranks agree
        former = te_fast.communication_chunks(rank + 1)
        with raises(RuntimeError, "proj: the communication_chunks"):
            layer(x)
        te_fast.communication_chunks(former)
    op = te.ops.BasicLinear(
        IN, OUT, device=device(), tensor_parallel_mode="column", tensor_parallel_group=dist.group.WORLD,
        sequence_parallel=True,
    )  # fmt: skip
    op.weight.requires_grad_(rank == 0)
    beside = te.ops.Sequential(te.ops.Reshape((-1, IN)), op, te.ops.Identity())
    for module in (op, beside):
        with raises(RuntimeError, "the set of what wants gradients"):
            module(torch.ones(8, IN, requires_grad=True))
    odd = te.Linear(IN, OUT + rank * size * 16, parallel_mode="column", name="odd", **options)
    with raises(RuntimeError, "odd: the sizes"):
        odd(torch.ones(8, IN))


@scene
def a_group_must_be_one():
    """A mesh or a name in place of a group is refused where it is given, before any collective."""
    mesh = dist.device_mesh.init_device_mesh(device().type, (dist.get_world_size(),))
    x = torch.ones(8, 16)
    column = {"parallel_mode": "column", "device": device()}
    late = te.Linear(16, 16, tp_size=dist.get_world_size(), **column)
    cases = {
        "proj: tp_group": lambda group: te.Linear(16, 16, tp_group=group, name="proj", **column),
        "MultiheadAttention: tp_group": lambda group: te.MultiheadAttention(
            16, 4, tp_group=group, device=device()
        ),
        "tp_group": late.set_tensor_parallel_group,
        "BasicLinear: tensor_parallel_group": lambda group: te.ops.BasicLinear(
            16, 16, tensor_parallel_group=group, tensor_parallel_mode="row", device=device()
        ),
        "AllReduce: process_group": te.ops.AllReduce,
        "checkpoint: tp_group": lambda group: te.checkpoint(
            torch.sin, x, distribute_saved_activations=True, tp_group=group
        ),
        "parallel_cross_entropy: dist_process_group": lambda group: te.parallel_cross_entropy(
            x, torch.zeros(8, dtype=torch.long), dist_process_group=group
        ),
        "gather_along_first_dim: process_group": lambda group: te.distributed.gather_along_first_dim(x, group),
        "allreduce: tp_group": lambda group: te.distributed.allreduce(x, group),
    }  # fmt: skip
    for name, call in cases.items():
        with raises(TypeError, f"{name} must be a .*ProcessGroup, got DeviceMesh; give its get_gr"):
            call(mesh)
        with raises(TypeError, f"{name} must be a .*ProcessGroup, got str"):
            call("tp")
    layer = te.Linear(16, 16, device=device())
    for group in (mesh, "tp"):
        wrong = te.autocast(recipe=RECIPES["delayed"](), amax_reduction_group=group)
        with raises(TypeError, "autocast: amax_reduction_group must be"), wrong:
            layer(x)
    with region("delayed"):
        layer(x).sum().backward()


@scene
def layers_that_disagree_in_name_or_settings():
    """Layers of the same sizes that ranks call in another order, or that compute something else."""
    rank, size = rank_and_size()
    options = {"device": device(), "tp_group": dist.group.WORLD}
    both = [te.Linear(IN, OUT, parallel_mode="row", name=name, **options) for name in "ab"]
    with raises(RuntimeError, "[ab]: the name of the layer that is called"):
        both[rank % 2](torch.ones(8, IN // size))
    is_first = rank == 0
    column = {"parallel_mode": "column", "name": "norm", **options}
    whole = {"set_parallel_mode": True, "name": "mlp", **options}
    for layer in (
        te.LayerNormMLP(IN, OUT, activation="relu" if is_first else "gelu", **whole),
        te.LayerNormLinear(IN, OUT, eps=1e-5 if is_first else 1e-3, **column),
        te.LayerNormLinear(IN, OUT, zero_centered_gamma=is_first, **column),
        te.LayerNormLinear(IN, OUT, delay_wgrad_compute=is_first, **column),
        te.LayerNormLinear(IN, OUT, bias=is_first, **column),
        te.LayerNormLinear(
            IN, OUT, sequence_parallel=True, return_layernorm_output=True,
            return_layernorm_output_gathered=is_first, **column,
        ),
    ):  # fmt: skip
        with raises(RuntimeError, f"{layer.name}: the sizes and settings of the layer"):
            layer(torch.ones(8, IN))


@scene
def known_kinds_that_differ():
    """In debug mode ranks compare calls of kinds that they have compared before."""
    rank, size = rank_and_size()
    layer = te.Linear(
        IN, OUT, parallel_mode="row", name="proj", device=device(), tp_group=dist.group.WORLD
    )
    with debugging():
        for rows in (4, 8):
            layer(torch.ones(rows, IN // size))
        with region("current"):
            layer(torch.ones(8, IN // size))
        with raises(RuntimeError, "proj: the input's shape"):
            layer(torch.ones(4 if rank else 8, IN // size))
        with raises(RuntimeError, "proj: the recipe"), region("current" if rank else None):
            layer(torch.ones(8, IN // size))


@scene
def an_exception_on_one_rank_starts_no_reduction():
    """A region that it leaves does not wait for ranks that are in none."""
    rank, size = rank_and_size()
    layer = te.Linear(IN, OUT, device=device())
    x = torch.ones(ROWS, IN)
    with region("delayed"):
        layer(x)

    def fails():
        layer(x)
        raise KeyError("of this rank")

    if rank == 1:
        with pytest.raises(KeyError, match="of this rank"), region("delayed"):
            fails()
    ranks = torch.ones(1)
    dist.all_reduce(ranks)
    assert ranks == size
    with region("delayed"):
        layer(x)


@scene
def counts_of_experts_rows_that_differ():
    """In debug mode ranks that divide experts' features compare the counts, as a list or a tensor."""
    rank, size = rank_and_size()
    layer = te.GroupedLinear(
        2, IN, OUT, parallel_mode="column", bias=False, name="experts", device=device(),
        tp_group=dist.group.WORLD, tp_size=size,
    )  # fmt: skip
    x = torch.ones(16, IN)
    with debugging():
        for counts in ([8, 8], torch.tensor([5, 11])):
            layer(x, counts).sum().backward()
        for counts in ([8 + rank, 8 - rank], torch.tensor([8 + rank, 8 - rank])):
            with raises(RuntimeError, "experts: the number of each expert's rows .* ranks"):
                layer(x, counts)
        with raises(RuntimeError, r"experts: the input's shape .* rank 0 has \[16, "):
            layer(torch.ones(16 + rank, IN), [8, 8 + rank])
        layer(x, [16, 0])


@scene
def layers_of_every_kind_disagree():
    """All ranks raise for every kind of shared layer, with its name or its class's."""
    rank, size = rank_and_size()
    options = {"device": device(), "tp_group": dist.group.WORLD, "sequence_parallel": True}
    shared = {"tensor_parallel_group": dist.group.WORLD, "sequence_parallel": True}
    whole = {**options, "set_parallel_mode": True}
    layers = {
        "norm": te.LayerNormLinear(IN, OUT, parallel_mode="column", name="norm", **options),
        "mlp": te.LayerNormMLP(IN, OUT, name="mlp", **whole),
        "block.self_attention": te.TransformerLayer(
            IN,
            OUT,
            4,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            name="block",
            tp_size=size,
            **whole,
        ),
        "ops 0": te.ops.Sequential(
            te.ops.Linear(IN, OUT, device=device(), tensor_parallel_mode="column", **shared)
        ),
    }
    for name, layer in layers.items():
        x = torch.ones(8, 2, IN) if name.startswith("block") else torch.ones(8, IN)
        with raises(RuntimeError, f"{name}.*: the input's shape .* rank 0 has"):
            layer(torch.cat([x] * (1 + rank)))
        layer(x).sum().backward()


@scene
def sizes_that_ranks_cannot_share():
    size = dist.get_world_size()
    whole = {"device": device(), "tp_group": dist.group.WORLD, "set_parallel_mode": True}
    with raises(ValueError, "ffn_hidden_size must be a multiple of tp_size"):
        te.LayerNormMLP(IN, OUT + 1, **whole)
    with raises(ValueError, "multiple of tp_size"):
        te.MultiheadAttention(IN, 4, num_gqa_groups=1, tp_size=size, **whole)
    mode = {"tensor_parallel_group": dist.group.WORLD, "device": device()}
    with raises(ValueError, "in_features must be a multiple of tp_size"):
        te.ops.BasicLinear(IN + 1, OUT, tensor_parallel_mode="row", **mode)
    with raises(ValueError, "size must be a multiple"):
        te.ops.Bias(OUT + 1, tensor_parallel=True, **mode)


@scene
def a_rank_with_another_group():
    """A rank with a group of its own computes alone; the others find out within their group's timeout."""
    rank, size = rank_and_size()
    short = datetime.timedelta(seconds=2)
    common = dist.new_group(list(range(size)), timeout=short)
    alone = [dist.new_group([each]) for each in range(size)][rank]
    is_last = rank == size - 1
    layer = te.Linear(
        IN, OUT, device=device(), parallel_mode="column", name="proj",
        tp_group=alone if is_last else common,
    )  # fmt: skip
    if is_last:
        layer(torch.ones(8, IN))
    else:
        with raises(RuntimeError, "proj: the ranks of tp_group could not compare their calls"):
            layer(torch.ones(8, IN))
    dist.barrier()


@scene
def bad_input():
    size = dist.get_world_size()
    group = dist.group.WORLD
    alone = [dist.new_group([rank]) for rank in range(size)]
    own, other = alone[dist.get_rank()], alone[dist.get_rank() - 1]

    def make(mode, **options):
        return te.Linear(IN, OUT, device=device(), name="proj", parallel_mode=mode, **options)

    odd_parts = {"a": 1, "b": OUT - 1}
    for mode, options, kind, match in (
        ("row", {"tp_group": group, "tp_size": size + 1}, ValueError, "proj: tp_size = "),
        ("row", {"tp_size": 0}, ValueError, "tp_size must be a positive"),
        ("row", {"tp_size": "2"}, ValueError, "tp_size must be a positive"),
        ("column", {"tp_size": 3}, ValueError, "out_features must be a multiple of tp_size = 3"),
        ("row", {"tp_size": 3}, AssertionError, "in_features must be a multiple of tp_size = 3"),
        ("column", {"tp_group": group, "parameters_split": odd_parts}, ValueError, "'a'"),
        (None, {"tp_group": other}, RuntimeError, "not in tp_group"),
    ):
        with raises(kind, match):
            make(mode, **options)
    late = make("row", tp_size=size, sequence_parallel=True)
    with raises(RuntimeError, "set_tensor_parallel_group"):
        late(torch.ones(4, IN // size))
    with raises(RuntimeError, f"tp_size = {size}"):
        late.set_tensor_parallel_group(None)
    with raises(RuntimeError, "1 ranks"):
        late.set_tensor_parallel_group(own)
    late.set_tensor_parallel_group(group)
    with raises(ValueError, "multiple of the"):
        late(torch.ones(4 * size + 1, IN // size))
    late(torch.ones(4 * size, IN // size))
    with raises(RuntimeError, "tp_size = 1"):
        make("row").set_tensor_parallel_group(group)
    with raises(ValueError, "set_parallel_mode"):
        te.LayerNormMLP(IN, OUT, device=device(), tp_group=group, sequence_parallel=True)
    calibrated = make("row", tp_group=group)
    with raises(NotImplementedError, "calibration"), te.autocast(enabled=False, calibrating=True):
        calibrated(torch.ones(4, IN // size))


@scene
def checkpoints_that_ranks_share():
    rank, size = rank_and_size()
    x = random(ROWS, IN, seed=1).float()
    layer = te.LayerNormMLP(
        IN, OUT, device=device(), set_parallel_mode=True, tp_group=dist.group.WORLD, tp_size=size
    )

    def run(**options):
        layer.zero_grad()
        local = x.clone().requires_grad_()
        with region("delayed"):
            y = te.checkpoint(layer, local * 2, **options) if options else layer(local * 2)
        y.square().sum().backward()
        return [local.grad, *[parameter.grad for parameter in layer.parameters()]]

    expected = run()
    layer.reset_fp8_meta_tensors()
    got = run(distribute_saved_activations=True, tp_group=dist.group.WORLD)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)

    # The whole tensor is not kept.
    whole = torch.ones(ROWS, IN).requires_grad_() * 1.0
    memory = weakref.ref(whole.untyped_storage())
    y = te.checkpoint(torch.sin, whole, distribute_saved_activations=True)
    shape = whole.shape
    del whole
    assert memory() is None
    y.backward(torch.ones(shape))
    # Views with other elements in the same memory are no shares of it.
    square = random(8, 8, seed=2).float().requires_grad_()
    for view in (square.detach().t(), square.detach().view(torch.int32)):
        te.checkpoint(torch.mul, square, view, distribute_saved_activations=True).sum().backward()
        assert torch.equal(square.grad, view.float())
        square.grad = None
    with raises(TypeError, "first argument"):
        te.checkpoint(torch.sin, "x", distribute_saved_activations=True)
    with raises(ValueError, "elements"):
        te.checkpoint(torch.sin, torch.ones(size + 1), distribute_saved_activations=True)
    with pytest.warns(UserWarning, match="use_reentrant"):
        te.checkpoint(torch.sin, x, distribute_saved_activations=True, use_reentrant=False)


@scene
def collectives_of_consumers():
    rank, size = rank_and_size()
    group = dist.group.WORLD
    tools = te.distributed
    assert (tools.get_distributed_rank(group), tools.get_distributed_world_size(group)) == (
        rank,
        size,
    )
    x = torch.arange(4.0 * size).view(2 * size, 2) + rank
    for later in (False, True):
        every, handle = tools.gather_along_first_dim(x[:3], group, async_op=later)
        assert (handle is not None) == later
        if later:
            handle.wait()
        expected = torch.cat([x[:3] - rank + other for other in range(size)])
        assert torch.equal(every, expected)
        summed, handle = tools.reduce_scatter_along_first_dim(x, group, async_op=later)
        if later:
            handle.wait()
        total = sum(x - rank + other for other in range(size))
        assert torch.equal(summed, total.chunk(size)[rank])
        own = x.clone()
        result, handle = tools.allreduce(own, group, async_op=later)
        if later:
            handle.wait()
        assert result is own
        assert torch.equal(own, total)
    chunk = tools.split_tensor_into_1d_equal_chunks(x - rank, group, new_buffer=True)
    assert torch.equal(tools.gather_split_1d_tensor(chunk, group).view_as(x), x - rank)


@scene
def copies():
    group = dist.group.WORLD
    layer = te.LayerNormLinear(
        IN, OUT, device=device(), tp_group=group, parallel_mode="column", sequence_parallel=True
    )
    x = random(4, IN, seed=1).float()
    y = layer(x)
    copied = copy.deepcopy(layer)
    assert copied.tp_group is group
    assert torch.equal(copied(x), y)
    with te.autocast(amax_reduction_group=group):
        y = layer(x)
    assert torch.equal(copy.deepcopy(layer).weight, layer.weight)


@scene
def a_rank_that_stops_before_backward():
    """The last scene of a run: the group is gone."""
    rank, size = rank_and_size()
    layer = te.Linear(
        IN, OUT, device=device(), parallel_mode="column", sequence_parallel=True, name="proj",
        tp_group=dist.group.WORLD,
    )  # fmt: skip
    y = layer(torch.ones(8, IN).requires_grad_())
    if rank == size - 1:
        raise Stop
    with raises(RuntimeError, "proj: a.* of tensor parallelism failed; another rank has stopped"):
        y.sum().backward()
    assert layer.weight.grad is None


@scene
def a_rank_that_stops_before_it_reduces_maxima():
    """The last scene of a run: the quantizers of current scaling and a checkpoint miss a rank, too."""
    rank, size = rank_and_size()
    options = {"device": device(), "sequence_parallel": True, "tp_group": dist.group.WORLD}
    calls = []
    for mode in ("column", "row"):
        layer = te.Linear(IN, OUT, parallel_mode=mode, name=mode, **options)
        x = torch.ones(8, layer.in_features, requires_grad=True)
        with region("current"):
            y = layer(x)
        calls.append((layer, x, y))
    kept = torch.ones(8, requires_grad=True)
    checkpointed = te.checkpoint(torch.sin, kept, distribute_saved_activations=True)
    if rank == size - 1:
        raise Stop
    what = "the reduction of maxima of current scaling failed; another rank has stopped"
    column, x, _ = calls[0]
    with raises(RuntimeError, f"column: {what}"), region("current"):
        column(x)
    with raises(RuntimeError, f"row: {what}"):
        calls[1][2].sum().backward()
    with raises(RuntimeError, "checkpoint: the gather of distributed saved activations failed"):
        checkpointed.sum().backward()


@scene
def a_rank_that_stops():
    """The last scene of a run: the group is gone."""
    rank, size = rank_and_size()
    layers = [
        te.Linear(
            IN,
            OUT,
            device=device(),
            parallel_mode=mode,
            tp_group=dist.group.WORLD,
            name=f"{mode}_layer",
        )
        for mode in ("row", "column")
    ]
    known = layers[0](torch.ones(8, IN // size))
    if rank == size - 1:
        raise Stop
    with raises(RuntimeError, "row_layer: an all-reduce of tensor parallelism failed"):
        layers[0](torch.ones(8, IN // size))
    with raises(RuntimeError, "column_layer: the ranks of tp_group could not compare"):
        layers[1](torch.ones(8, IN))
    del known


if __name__ == "__main__":
    scenes.main()
