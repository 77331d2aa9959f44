"""Experts as fusible operations: ops.GroupedLinear, alone and around an activation with probabilities."""

import copy
import operator

import pytest
import torch

import te_fast
import te_fast.pytorch as te
from grouped_layers import with_biases
from linear_layers import DTYPES, close
from recipes import RECIPES
from selection import sampled
from te_fast.common.recipe import Float8BlockScaling
from te_fast.pytorch import ops

SPLITS = [0, 70, 1, 0, 129, 16]
HIDDEN, FFN = 64, 48
ALL = {"high": lambda: None, **RECIPES}


def counts(splits=SPLITS):
    return torch.tensor(splits)


def experts(activation=ops.ScaledSwiGLU, dtype=torch.float32, gated=None, **options):
    torch.default_generator.manual_seed(5)
    gated = activation is not ops.ScaledSReLU if gated is None else gated
    return with_biases(
        ops.Sequential(
            ops.GroupedLinear(
                len(SPLITS), HIDDEN, FFN * (1 + gated), device="cpu", dtype=dtype, **options
            ),
            activation(),
            ops.GroupedLinear(len(SPLITS), FFN, HIDDEN, device="cpu", dtype=dtype, **options),
        )
    )


def tensors(dtype=torch.float32):
    torch.default_generator.manual_seed(6)
    rows = sum(SPLITS)
    x = torch.randn(rows, HIDDEN).to(dtype).requires_grad_()
    probs = torch.rand(rows).to(dtype).requires_grad_()
    return x, probs, torch.randn(rows, HIDDEN).to(dtype)


def of(op, kind, number):
    whole = op._parameters.get(kind)
    return op._parameters[f"{kind}{number}"] if whole is None else whole[number]


def reference(model, x, probs, act):
    """Expert by expert in FP64, by torch's autograd."""
    x = x.detach().double().requires_grad_()
    probs = probs.detach().double().requires_grad_()
    first, _, last = model
    leaves, parts = {}, []
    pairs = zip(x.split(SPLITS), probs.split(SPLITS), strict=True)
    for number, (own, weight) in enumerate(pairs):
        y = own
        for place, op in ((0, first), (2, last)):
            w = leaves[place, "weight", number] = (
                of(op, "weight", number).detach().double().requires_grad_()
            )
            y = y @ w.t()
            if op.use_bias:
                b = leaves[place, "bias", number] = (
                    of(op, "bias", number).detach().double().requires_grad_()
                )
                y = y + b
            if place == 0:
                y = act(y) * weight[:, None]
        parts.append(y)
    return torch.cat(parts), x, probs, leaves


def swiglu(y):
    a, b = y.chunk(2, -1)
    return torch.nn.functional.silu(a) * b


def srelu(y):
    return torch.relu(y) ** 2


@pytest.mark.parametrize("single", [False, True], ids=["parts", "single"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("activation", [ops.ScaledSwiGLU, ops.ScaledSReLU])
def test_experts_are_torchs(activation, bias, single):
    options = {"single_grouped_weight": single, "single_grouped_bias": single}
    model = experts(activation, bias=bias, **options)
    x, probs, grad = tensors()
    act = swiglu if activation is ops.ScaledSwiGLU else srelu
    wanted, wx, wprobs, leaves = reference(model, x, probs, act)
    wanted.backward(grad.double())
    y = model(x, counts(), probs, counts())
    y.backward(grad)
    dtype = torch.float32
    close(y, wanted.detach(), dtype)
    close(x.grad, wx.grad, dtype)
    close(probs.grad, wprobs.grad, dtype)
    for (place, kind, number), leaf in leaves.items():
        op = model[place]
        parameter = op._parameters.get(kind)
        found = parameter.grad[number] if single else op._parameters[f"{kind}{number}"].grad
        if SPLITS[number] == 0:
            assert not found.any()
        else:
            close(found, leaf.grad, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_fp8_is_near(name, dtype):
    model = experts(dtype=dtype, bias=False)
    x, probs, grad = tensors(dtype)
    wanted, wx, wprobs, leaves = reference(model, x, probs, swiglu)
    wanted.backward(grad.double())
    for _ in range(2):  # delayed scaling has its scales in the second step
        x.grad = probs.grad = None
        model.zero_grad()
        with te.autocast(recipe=RECIPES[name]()):
            y = model(x, counts(), probs, counts())
        y.backward(grad)

    def near(got, wanted):
        assert ((got.double() - wanted).norm() / wanted.norm()).item() < 0.12

    near(y, wanted.detach())
    near(x.grad, wx.grad)
    near(probs.grad, wprobs.grad)
    near(model[0].weight4.grad, leaves[0, "weight", 4].grad)
    near(model[2].weight4.grad, leaves[2, "weight", 4].grad)


@pytest.mark.parametrize("name", ALL)
def test_trio_is_one_program_with_the_bits_of_its_parts(name):
    model = experts(bias=False, dtype=torch.bfloat16)
    x, probs, grad = tensors(torch.bfloat16)
    with te.autocast(enabled=name != "high", recipe=ALL[name]()):
        y = model(x, counts(), probs, counts())
        explained = model.explain()
    y.backward(grad)
    assert explained.count("native program") == 1
    assert "grouped gemm" in explained
    layers = [
        te.GroupedLinear(
            len(SPLITS),
            op.in_features,
            op.out_features,
            device="cpu",
            bias=False,
            params_dtype=torch.bfloat16,
        )
        for op in (model[0], model[2])
    ]
    for layer, op in zip(layers, (model[0], model[2]), strict=True):
        state = op.state_dict()
        layer.load_state_dict(
            {key: state[key] for key in state if key.startswith("weight")}, strict=False
        )
    own, p = x.detach().clone().requires_grad_(), probs.detach().clone().requires_grad_()
    with te.autocast(enabled=name != "high", recipe=ALL[name]()):
        h = layers[0](own, SPLITS)
        h = ops.ScaledSwiGLU()(h, p)
        again = layers[1](h, SPLITS)
    again.backward(grad)
    assert torch.equal(again, y)
    assert torch.equal(own.grad, x.grad)
    assert torch.equal(p.grad, probs.grad)
    assert torch.equal(layers[0].weight4.grad, model[0].weight4.grad)


def saved_bytes(run):
    """The number of bytes that autograd keeps of a forward, and the result."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    return sum(kept.values()), result


@pytest.mark.parametrize(
    ("name", "activation", "later"),
    sampled(
        ["high", "current", "block"],
        [ops.ScaledSwiGLU, ops.ScaledSReLU, ops.ScaledSiTUGLU],
        [False, True],
    ),
)
def test_recomputed_activations_change_no_bits(name, activation, later):
    x, probs, grad = tensors(torch.bfloat16)
    found, sizes = [], []
    for recompute in (False, True):
        model = experts(
            lambda recompute=recompute: activation(activation_recompute_in_mlp=recompute),
            gated=activation is not ops.ScaledSReLU,
            bias=False,
            dtype=torch.bfloat16,
            delay_wgrad_compute=later,
        )
        own, p = x.detach().clone().requires_grad_(), probs.detach().clone().requires_grad_()

        def run(model=model, own=own, p=p):
            with te.autocast(enabled=name != "high", recipe=ALL[name]()):
                return model(own, counts(), p, counts()), model.explain()

        size, (y, explained) = saved_bytes(run)
        assert ("activation again" in explained) == recompute
        fused = activation is not ops.ScaledSReLU and name == "block"
        assert ("activation again + transposed cast" in explained) == (recompute and fused)
        y.backward(grad)
        for place in (2, 0) if later else ():
            model[place].backward_dw()
        found.append((y, own.grad, p.grad, *(weight.grad for weight in model.parameters())))
        sizes.append(size)
    assert all(map(torch.equal, *found))
    # FP8 keeps one byte of each element, high precision two. Each expert's rows begin at a multiple of 128.
    assert sizes[0] - sizes[1] >= sum(SPLITS) * FFN * (2 if name == "high" else 1)


def test_recomputed_activations_of_frozen_layers_and_of_dense_ones():
    def model(recompute):
        torch.default_generator.manual_seed(2)
        return ops.Sequential(
            ops.ScaledSwiGLU(activation_recompute_in_mlp=recompute),
            ops.Linear(FFN, HIDDEN, device="cpu"),
        )

    for wants in (False, True):  # whether anything before the product is trained
        found = []
        for recompute in (False, True):
            torch.default_generator.manual_seed(4)
            x = torch.randn(32, 2 * FFN, requires_grad=wants)
            one, probs = model(recompute), torch.rand(32)
            with te.autocast(recipe=RECIPES["current"]()):
                y = one(x, probs)
            y.backward(torch.ones_like(y))
            found.append((y, *(p.grad for p in one.parameters()), *([x.grad] if wants else [])))
        assert all(map(torch.equal, *found))


def test_recomputed_activations_do_not_go_with_delayed_scaling():
    model = experts(lambda: ops.ScaledSwiGLU(activation_recompute_in_mlp=True))
    x, probs, _ = tensors()
    with (
        te.autocast(recipe=RECIPES["delayed"]()),
        pytest.raises(ValueError, match="activation_recompute_in_mlp"),
    ):
        model(x, counts(), probs, counts())


def test_rows_beyond_the_counts_are_left_alone():
    model = experts(bias=False)
    x, probs, _ = tensors()
    more = torch.cat([x.detach(), torch.full((30, HIDDEN), torch.nan)])
    factors = torch.cat([probs.detach(), torch.full((30,), torch.nan)])
    with torch.no_grad():
        y = model(x, counts(), probs, counts())
        assert torch.equal(model(more, counts(), factors, counts())[: len(x)], y)


def test_caller_buffers():
    model = experts(bias=False)
    x, probs, grad = tensors()
    y = model(x, counts(), probs, counts())
    y.backward(grad)
    rows = sum(SPLITS)
    out, dx = torch.zeros(rows, HIDDEN), torch.zeros(rows, HIDDEN)
    kwargs = {-1: {ops.OUTPUT_BUFFER_KEY: out}, 0: {ops.GRAD_INPUT_BUFFER_KEY: dx}}
    own = x.detach().clone().requires_grad_()
    given = model(own, counts(), probs.detach(), counts(), op_kwargs=kwargs)
    assert given.data_ptr() == out.data_ptr()
    (given * 1.0).backward(grad)
    assert torch.equal(out, y)
    assert torch.equal(dx, x.grad)
    bad = {-1: {ops.OUTPUT_BUFFER_KEY: out[1:]}}
    with pytest.raises(ValueError, match="buffer"):
        model(own, counts(), probs, counts(), op_kwargs=bad)


def test_caller_buffers_with_scaled_biases():
    model = scaled()
    x, probs, grad = tensors()
    given = (counts(), *[probs] * (model[0].num_extra_inputs - 1), probs, counts(), probs)
    y = model(x, *given)
    y.backward(grad)
    before = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    out, dx = torch.zeros_like(y), torch.zeros_like(x)
    kwargs = {-1: {ops.OUTPUT_BUFFER_KEY: out}, 0: {ops.GRAD_INPUT_BUFFER_KEY: dx}}
    own = x.detach().clone().requires_grad_()
    again = model(own, *given, op_kwargs=kwargs)
    assert again.data_ptr() == out.data_ptr()
    again.backward(grad)
    assert torch.equal(out, y)
    assert torch.equal(dx, x.grad)
    assert torch.equal(own.grad, x.grad)
    assert all(map(torch.equal, before, (parameter.grad for parameter in model.parameters())))
    with pytest.raises(te_fast.ShapeError, match=r"output.*float32"):
        model(own, *given, op_kwargs={-1: {"output": torch.zeros_like(out, dtype=torch.float64)}})


def test_no_buffer_is_as_if_left_out():
    layer = ops.GroupedLinear(2, 16, 32, device="cpu")
    x, splits = torch.randn(5, 16), torch.tensor([2, 3])
    assert torch.equal(layer(x, splits, output=None, grad_input=None), layer(x, splits))


@pytest.mark.parametrize("in_chain", [False, True], ids=["alone", "chain"])
@pytest.mark.parametrize(
    ("key", "bad", "error", "words"),
    [
        ("output", lambda _: torch.empty(32, 5), te_fast.ShapeError, r"shape \[5, 32\]"),
        ("grad_input", lambda _: torch.empty(16, 5), te_fast.ShapeError, r"shape \[5, 16\]"),
        ("output", lambda _: torch.empty(5, 32, requires_grad=True), ValueError, "gradient"),
        ("grad_input", lambda x: x.detach(), ValueError, "share memory"),
        ("output", lambda _: [1.0], te_fast.DtypeError, "torch.Tensor"),
    ],
    ids=["output", "grad_input", "requires_grad", "shared", "list"],
)
def test_bad_buffers(key, bad, error, words, in_chain):
    layer = ops.GroupedLinear(2, 16, 32, device="cpu")
    x, splits = torch.randn(5, 16), torch.tensor([2, 3])
    given = {key: bad(x)}
    call, options = layer, given
    if in_chain:
        call, options = ops.Sequential(layer), {"op_kwargs": {0: given}}
    with pytest.raises(error, match=f"GroupedLinear: {key}.*{words}"):
        call(x, splits, **options)


def test_buffers_inside_of_a_group():
    model = ops.Sequential(ops.GroupedLinear(2, 16, 32, device="cpu"), ops.GELU())
    x, splits = torch.randn(5, 16), torch.tensor([2, 3])
    with pytest.raises(te_fast.UnsupportedError, match="op 0: GroupedLinear: output is memory"):
        model(x, splits, op_kwargs={0: {"output": torch.empty(5, 32)}})


@pytest.mark.parametrize("fuse", [False, True], ids=["grad", "main_grad"])
def test_backward_dw(fuse):
    model = experts(bias=False)
    later = experts(bias=False, delay_wgrad_compute=True, accumulate_into_main_grad=fuse)
    x, probs, grad = tensors()
    model(x, counts(), probs, counts()).backward(grad)
    for op in (later[0], later[2]):
        for parameter in op.parameters() if fuse else ():
            parameter.main_grad = torch.ones_like(parameter)
    later(x, counts(), probs, counts()).backward(grad)
    for place in (2, 0):
        assert all(parameter.grad is None for parameter in later[place].parameters())
        later[place].backward_dw()
        pairs = zip(later[place].parameters(), model[place].parameters(), strict=True)
        for parameter, wanted in pairs:
            found = parameter.main_grad - 1.0 if fuse else parameter.grad
            close(found, wanted.grad.double(), torch.bfloat16 if fuse else torch.float32)
    before = [parameter.grad for parameter in later[0].parameters()]
    later[0].backward_dw()  # nothing is left
    assert all(map(operator.is_, before, (parameter.grad for parameter in later[0].parameters())))


def test_state_copies_and_the_meta_device():
    model = experts()
    names = set(model[0].state_dict())
    assert {"weight0", "weight5", "bias0", "bias5"} <= names
    x, probs, _ = tensors()
    y = model(x, counts(), probs, counts())
    assert torch.equal(copy.deepcopy(model)(x, counts(), probs, counts()), y)
    other = ops.Sequential(
        ops.GroupedLinear(len(SPLITS), HIDDEN, 2 * FFN, device="meta"),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(len(SPLITS), FFN, HIDDEN, device="meta"),
    )
    for mine, theirs in ((other[0], model[0]), (other[2], model[2])):
        for key, parameter in theirs.named_parameters():
            mine.register_parameter(key, parameter)  # Megatron-LM does the same
    assert torch.equal(other(x, counts(), probs, counts()), y)


def test_no_rows():
    model = experts()
    x = torch.ones(0, HIDDEN, requires_grad=True)
    y = model(x, counts([0] * 6), torch.ones(0), counts([0] * 6))
    y.sum().backward()
    assert y.shape == (0, HIDDEN)
    assert all(not parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("sizes", "error", "words"),
    [
        ((3, 0, 16), ValueError, "in_features must be 1 or more"),
        ((3, 16, 0), ValueError, "out_features must be 1 or more"),
        ((3, -1, 16), ValueError, "in_features must not be negative"),
        ((2.0, 32, 16), TypeError, "num_groups must be an integer"),
        ((True, 32, 16), TypeError, "num_groups must be an integer"),
        ((3, 3.5, 16), TypeError, "in_features must be an integer"),
        ((0, 32, 16), ValueError, "num_groups must be 1 to"),
    ],
    ids=str,
)
def test_bad_sizes(sizes, error, words):
    with pytest.raises(error, match=f"GroupedLinear: {words}") as caught:
        ops.GroupedLinear(*sizes, device="cpu")
    assert isinstance(caught.value, te_fast.TeFastError)


@pytest.mark.parametrize(
    ("factors", "error", "words"),
    [
        (torch.rand(4), ValueError, "each of the 14 rows"),
        (torch.rand(()), ValueError, "each of the 14 rows"),
        (torch.ones(14, dtype=torch.int64), TypeError, "int64"),
        (torch.rand(14, dtype=torch.float64), TypeError, "float64"),
        (torch.rand(14, dtype=torch.complex64), TypeError, "complex64"),
    ],
    ids=["4", "scalar", "int64", "float64", "complex64"],
)
def test_bad_factors_of_biases(factors, error, words):
    layer = ops.GroupedLinear(3, 32, 16, device="cpu", scale_bias=True)
    with pytest.raises(error, match=f"GroupedLinear: the factors.*{words}") as caught:
        layer(torch.randn(14, 32), counts([5, 0, 9]), factors)
    assert isinstance(caught.value, te_fast.TeFastError)


def test_biases_that_are_left_out_are_none():
    layer = ops.GroupedLinear(2, 32, 16, bias=False, device="cpu")
    assert layer.bias0 is layer.bias1 is None
    assert list(layer.state_dict()) == ["weight0", "weight1"]
    x = torch.randn(5, 32)
    close(layer(x, counts([5, 0])), (x @ layer.weight0.t()).double(), torch.float32)


def test_bad_counts():
    op = ops.GroupedLinear(2, 8, 8, device="cpu")
    x = torch.ones(4, 8)
    for bad, error in (
        (torch.tensor([1.0, 2.0]), TypeError),
        (torch.tensor([1, 2, 1]), ValueError),
        (torch.tensor([5, 0]), ValueError),
        (torch.tensor([-1, 2]), ValueError),
    ):
        with pytest.raises(error) as caught:
            op(x, bad)
        assert isinstance(caught.value, te_fast.TeFastError)
    with pytest.raises(ValueError, match="num_groups"):
        ops.GroupedLinear(0, 8, 8, device="cpu")
    with pytest.raises(ValueError, match="extra input"):
        op(x)


def test_beside_operations_of_the_users_own():
    class Twice(ops.BasicOperation):
        def op_forward(self, ctx, input_, **_):
            return 2 * input_

        def op_backward(self, ctx, grad_output):
            return 2 * grad_output, ()

    x = torch.ones(4, 8, requires_grad=True)
    single = {"single_grouped_weight": True, "single_grouped_bias": True}
    model = with_biases(ops.Sequential(ops.GroupedLinear(2, 8, 8, device="cpu", **single), Twice()))
    y = model(x, torch.tensor([1, 3]))
    y.sum().backward()
    assert torch.equal(y, 2 * model[0](x, torch.tensor([1, 3])))
    assert model[0].weight.grad.shape == (2, 8, 8)
    parts = with_biases(ops.Sequential(ops.GroupedLinear(2, 8, 8, device="cpu"), Twice()))
    y = parts(x, torch.tensor([1, 3]))
    assert torch.equal(y, 2 * parts[0](x, torch.tensor([1, 3])))
    y.sum().backward()
    assert parts[0].weight0.grad.shape == (8, 8)
    close(parts[0].bias1.grad, torch.full((8,), 6.0).double(), torch.float32)


@pytest.mark.parametrize("single_bias", [False, True])
@pytest.mark.parametrize("single_weight", [False, True])
@pytest.mark.parametrize("number", [1, 2])
def test_a_python_neighbour_changes_no_bits(number, single_weight, single_bias):
    kinds = {"single_grouped_weight": single_weight, "single_grouped_bias": single_bias}
    layer = ops.GroupedLinear(number, 16, 32, device="cpu", **kinds)
    chain = ops.Sequential(copy.deepcopy(layer), ops.L2Normalization())
    splits = torch.tensor([5, *[0] * (number - 1)])
    results = []
    for run in (lambda *args: ops.L2Normalization()(layer(*args)), chain):
        x = torch.arange(80.0).view(5, 16).requires_grad_()
        y = run(x, splits)
        y[..., ::2].sum().backward()
        module = layer if run is not chain else chain[0]
        results.append([y, x.grad, *(parameter.grad for parameter in module.parameters())])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


class Counted(ops.BasicOperation):
    """Counts the rows of experts for later operations."""

    num_extra_outputs = 1

    def __init__(self, counts):
        super().__init__()
        self.counts = counts
        self.set_extra_output_channel(0, "counts", output_to_caller=False)

    def op_forward(self, *_, **__):
        raise NotImplementedError

    op_backward = op_forward

    def fuser_forward(self, basic_op_ctxs, input_, **_):
        return input_, [(self.counts,)]

    def fuser_backward(self, basic_op_ctxs, grad_output, **_):
        return grad_output, [()], [()]


def counted_by_channel(counts, single=True):
    torch.default_generator.manual_seed(8)
    kinds = {"single_grouped_weight": single, "single_grouped_bias": single}
    layer = with_biases(ops.GroupedLinear(2, 128, 128, device="cpu", **kinds))
    alone = copy.deepcopy(layer)
    layer.set_extra_input_channel(0, "counts")
    return ops.Sequential(Counted(counts), layer), alone


@pytest.mark.parametrize("single", [False, True], ids=["parts", "single"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_counts_by_a_channel_are_taken_as_from_the_caller(dtype, single):
    chain, alone = counted_by_channel(torch.tensor([3, 5], dtype=dtype), single)
    x = torch.rand(8, 128)
    assert torch.equal(chain(x), alone(x, torch.tensor([3, 5])))
    chain[0].counts = torch.tensor([5, 7], dtype=dtype)
    with pytest.raises(te_fast.errors.ShapeError, match="exceed 8"):
        chain(x)


def test_counts_by_a_channel_follow_the_region():
    chain, alone = counted_by_channel(torch.tensor([16, 16]))
    x = torch.rand(32, 128, requires_grad=True)
    for override in (None, "dequantized", "high_precision", None):
        with te.autocast(recipe=Float8BlockScaling(backward_override=override)):
            found = [chain(x), alone(x, torch.tensor([16, 16]))]
        found += [torch.autograd.grad(y.sum(), x)[0] for y in found]
        assert torch.equal(*found[:2])
        assert torch.equal(*found[2:])


# Biases with factors --------------------------------------------------------------------------------


def scaled(single=False, **options):
    torch.default_generator.manual_seed(8)
    kinds = {"single_grouped_weight": single, "single_grouped_bias": single}
    return with_biases(
        ops.Sequential(
            ops.GroupedLinear(len(SPLITS), HIDDEN, 2 * FFN, device="cpu", **kinds, **options),
            ops.ScaledSwiGLU(),
            ops.GroupedLinear(
                len(SPLITS), FFN, HIDDEN, device="cpu", scale_bias=True, **kinds, **options
            ),
        )
    )


@pytest.mark.parametrize("single", [False, True], ids=["parts", "single"])
def test_scaled_biases_are_torchs(single):
    model = scaled(single)
    x, probs, grad = tensors()
    leaves = {}

    def leaf(place, kind, number):
        value = of(model[place], kind, number).detach().double().requires_grad_()
        leaves[place, kind, number] = value
        return value

    own, p = (t.detach().double().requires_grad_() for t in (x, probs))
    parts = []
    for number, (rows, factor) in enumerate(zip(own.split(SPLITS), p.split(SPLITS), strict=True)):
        h = rows @ leaf(0, "weight", number).t() + leaf(0, "bias", number)
        a = swiglu(h) * factor[:, None]
        y = a @ leaf(2, "weight", number).t() + leaf(2, "bias", number) * factor[:, None]
        parts.append(y)
    wanted = torch.cat(parts)
    wanted.backward(grad.double())
    y = model(x, counts(), probs, counts(), probs)
    y.backward(grad)
    close(y, wanted.detach(), torch.float32)
    close(x.grad, own.grad, torch.float32)
    close(probs.grad, p.grad, torch.float32)
    for (place, kind, number), value in leaves.items():
        if SPLITS[number]:
            close(of_grad(model[place], kind, number), value.grad, torch.float32)
    with torch.no_grad():
        assert torch.equal(model(x, counts(), probs, counts(), probs), y)


def of_grad(op, kind, number):
    whole = op._parameters.get(kind)
    return op._parameters[f"{kind}{number}"].grad if whole is None else whole.grad[number]


@pytest.mark.parametrize("later", [False, True], ids=["now", "later"])
@pytest.mark.parametrize("name", RECIPES)
def test_scaled_biases_in_fp8_are_added_to_the_products_of_a_program(name, later):
    model, plain = scaled(delay_wgrad_compute=later), scaled(delay_wgrad_compute=later)
    plain = ops.Sequential(plain[0], plain[1], without_bias(plain[2], delay_wgrad_compute=later))
    x, probs, grad = tensors()
    found = []
    for _ in range(2):  # delayed scaling has its scales in the second step
        found = []
        for one, extras in ((model, (counts(), probs)), (plain, (counts(),))):
            own = x.detach().clone().requires_grad_()
            one.zero_grad()
            with te.autocast(recipe=RECIPES[name]()):
                y = one(own, counts(), probs.detach(), *extras)
            y.backward(grad)
            for place in (2, 0) if later else ():
                one[place].backward_dw()
            found.append((y.detach(), own.grad, one[2].weight4.grad, one[0].weight4.grad))
    expert = torch.repeat_interleave(torch.arange(len(SPLITS)), counts())
    biases = torch.stack([model[2].get_parameter(f"bias{i}") for i in range(len(SPLITS))]).detach()
    assert torch.equal(found[0][0], found[1][0] + biases[expert] * probs.detach()[:, None])
    assert all(map(torch.equal, found[0][1:], found[1][1:]))


def without_bias(op, **options):
    made = ops.GroupedLinear(len(SPLITS), FFN, HIDDEN, device="cpu", bias=False, **options)
    with torch.no_grad():
        for mine, theirs in zip(made.parameters(), op.parameters(), strict=False):
            mine.copy_(theirs)
    return made


def test_scaled_biases_run_back_twice_where_the_graph_is_retained():
    model = scaled()
    x, probs, grad = tensors()
    y = model(x, counts(), probs, counts(), probs)
    y.backward(grad, retain_graph=True)
    once = x.grad.clone()
    y.backward(grad)
    assert torch.equal(x.grad, 2 * once)
    with pytest.raises(RuntimeError, match="retain_graph=True|second time"):
        y.backward(grad)


def test_scaled_biases_of_no_rows_and_of_rows_beyond():
    model = scaled()
    x = torch.ones(0, HIDDEN, requires_grad=True)
    none = torch.ones(0)
    y = model(x, counts([0] * 6), none, counts([0] * 6), none)
    y.sum().backward()
    assert y.shape == (0, HIDDEN)
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)
    x, probs, _ = tensors()
    more, factors = torch.cat([x.detach(), x.detach()[:9]]), torch.cat([probs, probs[:9]]).detach()
    with torch.no_grad():
        y = model(x, counts(), probs, counts(), probs)
        again = model(more, counts(), factors, counts(), factors)
    assert torch.equal(again[: len(x)], y)
    assert not ops.GroupedLinear(2, 8, 8, bias=False, scale_bias=True, device="cpu").scale_bias


@pytest.mark.parametrize("single", [False, True], ids=["parts", "single"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_scaled_biases(dtype, single):
    # The sums are FP32, and rows of no expert do not count.
    rows = 1024
    op = ops.GroupedLinear(
        2, 16, 16, device="cpu", dtype=dtype, scale_bias=True, single_grouped_bias=single
    )
    op = with_biases(op)
    probs = torch.full((3 * rows,), 0.75).to(dtype).requires_grad_()
    y = op(torch.ones(3 * rows, 16, dtype=dtype), counts([rows, rows]), probs)
    grad = torch.ones_like(y)
    grad[2 * rows :] = torch.nan
    y.backward(grad)
    for number in range(2):
        assert torch.all(of_grad(op, "bias", number) == 0.75 * rows)
        wanted = of(op, "bias", number).detach().double().sum()
        close(probs.grad[number * rows], wanted, dtype)


@pytest.mark.parametrize("single", [False, True])
def test_biases_are_zero_at_first(single):
    # Transformer Engine 2.20.2 initialises biases so. Weights are initialised as in torch.nn.Linear.
    torch.manual_seed(0)
    op = ops.GroupedLinear(3, 64, 96, device="cpu", single_grouped_bias=single)
    biases = [parameter for name, parameter in op.named_parameters() if name.startswith("bias")]
    assert [tuple(bias.shape) for bias in biases] == ([(3, 96)] if single else [(96,)] * 3)
    assert not any(bias.any() for bias in biases)
    for number in range(3):
        weight = getattr(op, f"weight{number}")
        assert weight.std().item() == pytest.approx(1 / (64 * 3) ** 0.5, rel=0.05)
        assert weight.abs().max() <= 1 / 64**0.5


def test_the_hook_has_transformer_engines_keyword():
    op, fired = ops.GroupedLinear(2, 16, 16, device="cpu", delay_wgrad_compute=True), []
    op.register_wgrad_accumulation_and_reduce_hooks(
        wgrad_accumulation_and_reduce_hook=lambda: fired.append(1)
    )
    op(torch.ones(4, 16), torch.tensor([2, 2])).sum().backward()
    op.backward_dw()
    assert fired == [1]


@pytest.mark.parametrize("training", [False, True])
def test_experts_hand_nothing_over_to_a_linear_behind_them(training):
    """Their products store high precision, also where a dense product would store FP8."""
    torch.manual_seed(0)
    chain = ops.Sequential(
        ops.GroupedLinear(2, 64, 128, device="cpu"), ops.Linear(128, 64, device="cpu")
    )
    chain[1].requires_grad_(False)
    x, splits = torch.randn(32, 64, requires_grad=training), counts([16, 16])
    wanted = chain(x, splits)
    with torch.set_grad_enabled(training), te.autocast(recipe=te_fast.recipe.DelayedScaling()):
        y = [chain(x, splits) for _ in range(2)][-1]
    close_in_fp8(y, wanted)
    if training:
        y.sum().backward()
        assert x.grad.isfinite().all()


@pytest.mark.parametrize("name", RECIPES)
def test_a_bias_operation_behind_experts_has_its_gradient(name):
    chain = ops.Sequential(
        ops.GroupedLinear(2, 64, 128, bias=False, device="cpu"), ops.Bias(128, device="cpu")
    )
    with te.autocast(recipe=RECIPES[name]()):
        y = chain(torch.randn(16, 64), counts([10, 6]))
    y.sum().backward()
    assert torch.equal(chain[1].bias.grad, torch.full((128,), 16.0))


def close_in_fp8(got, wanted):
    assert ((got - wanted).norm() / wanted.norm()).item() < 0.1
