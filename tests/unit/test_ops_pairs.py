"""Every op behind every other one against plain torch in FP64: all gradients reach all tensors."""

import itertools

import pytest
import torch

import ops_reference as ref
from ops_reference import compare, leaf, randomise
from te_fast.pytorch import ops

WIDTH = 8
OPTIONS = {"device": "cpu"}

# Each name maps to the op, its formula of (x, extras, parameters) that returns (y, extra outputs),
# the shapes of its extra inputs behind the rows, and the number of input columns per output column.
OPS = {
    "linear": (
        lambda n: ops.Linear(n, n, **OPTIONS),
        lambda x, e, p: (x @ p[0].T + p[1], ()),
        (),
        1,
    ),
    "bias": (lambda n: ops.Bias(n, **OPTIONS), lambda x, e, p: (x + p[0], ()), (), 1),
    "layer_norm": (
        lambda n: ops.LayerNorm(n, **OPTIONS),
        lambda x, e, p: (ref.layer_norm(x, *p), ()),
        (),
        1,
    ),
    "rms_norm": (
        lambda n: ops.RMSNorm(n, **OPTIONS),
        lambda x, e, p: (ref.rms_norm(x, *p), ()),
        (),
        1,
    ),
    "silu": (lambda n: ops.SiLU(), lambda x, e, p: (ref.silu(x), ()), (), 1),
    "swiglu": (lambda n: ops.SwiGLU(), lambda x, e, p: (ref.gated(ref.silu)(x), ()), (), 2),
    "scaled": (
        lambda n: ops.ScaledSReLU(),
        lambda x, e, p: (ref.srelu(x) * e[0].unsqueeze(-1), ()),
        ("row",),
        1,
    ),
    "add": (lambda n: ops.AddExtraInput(), lambda x, e, p: (x + e[0], ()), ("matrix",), 1),
    "split": (lambda n: ops.MakeExtraOutput(), lambda x, e, p: (x, (x,)), (), 1),
    "split_in_place": (
        lambda n: ops.MakeExtraOutput(in_place=True),
        lambda x, e, p: (x, (x,)),
        (),
        1,
    ),
    "scale": (lambda n: ops.ConstantScale(-2.5), lambda x, e, p: (-2.5 * x, ()), (), 1),
    "identity": (lambda n: ops.Identity(), lambda x, e, p: (x, ()), (), 1),
}


def chain(names):
    """The container of some ops, its formula, and its inputs."""
    modules, widths = [], [WIDTH]
    for name in names:
        make, *_, factor = OPS[name]
        modules.append(make(widths[-1]))
        widths.append(widths[-1] // factor)
    shapes = {"row": lambda width: (4,), "matrix": lambda width: (4, width)}
    extras = [
        leaf(*shapes[kind](width), seed=9 + index)
        for index, (name, width) in enumerate(zip(names, widths, strict=False))
        for kind in OPS[name][2]
    ]
    counts = [len(list(module.parameters())) for module in modules]

    def formula(x, *rest):
        inputs, parameters = iter(rest[: len(extras)]), iter(rest[len(extras) :])
        outputs = []
        for name, count in zip(names, counts, strict=True):
            own = [next(inputs) for _ in OPS[name][2]]
            x, extra = OPS[name][1](x, own, list(itertools.islice(parameters, count)))
            outputs += extra
        return (x, *outputs)

    return randomise(ops.Sequential(*modules)), formula, [leaf(4, WIDTH), *extras]


def check(names):
    module, formula, inputs = chain(names)
    compare(module, formula, inputs, count=1 + sum(name.startswith("split") for name in names))


@pytest.mark.parametrize("second", OPS)
@pytest.mark.parametrize("first", OPS)
def test_pair(first, second):
    check([first, second])


@pytest.mark.parametrize("names", list(itertools.product(["bias", "scale", "add"], repeat=3)))
def test_three_that_hand_a_gradient_on(names):
    check([*names, "silu"])


@pytest.mark.parametrize("frozen", [False, True])
def test_the_input_of_a_bias_gets_its_gradient(frozen):
    bias = ops.Bias(WIDTH, **OPTIONS)
    bias.requires_grad_(not frozen)
    x = leaf(4, WIDTH)
    ops.Sequential(bias, ops.ReLU())(x).sum().backward()
    assert torch.equal(x.grad, (x > 0).float())


@pytest.mark.parametrize("second", OPS)
def test_a_bias_before_an_op_without_a_gradient_of_the_input(second):
    module, formula, inputs = chain(["bias", second])
    inputs[0].requires_grad_(False)
    compare(module, formula, inputs, count=1 + second.startswith("split"))
