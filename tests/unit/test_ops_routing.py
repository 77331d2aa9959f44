"""Extra tensors that are routed inside a group, and fusions that the user registers."""

import pytest
import torch

import ops_reference as ref
import te_fast.pytorch as te
from graphs import needs_compile
from ops_reference import compare, leaf, randomise
from recipes import RECIPES
from selection import quickly
from te_fast.errors import ArgumentError, StateError
from te_fast.pytorch import ops


@pytest.fixture(params=["native", "python"])
def between(request):
    """No module, or an op of the user's own that does nothing, for the middle of a chain."""

    class Nothing(ops.Identity):
        def op_forward(self, ctx, input_, **_):
            return input_

    return [] if request.param == "native" else [Nothing()]


# Channels -----------------------------------------------------------------------------------------


def residual(*inside, to_caller=False):
    make, add = ops.MakeExtraOutput(), ops.AddExtraInput()
    make.set_extra_output_channel(0, "residual", output_to_caller=to_caller)
    add.set_extra_input_channel(0, "residual")
    return ops.Sequential(make, *inside, add)


def test_channel_routes_a_residual(between):
    linear = ops.Linear(16, 16, device="cpu")
    module = randomise(residual(ops.GELU(), *between, linear, ops.SiLU()))
    compare(module, lambda x, w, b: x + ref.silu(ref.gelu(x) @ w.T + b), [leaf(4, 16)])


def test_channels_end_with_their_group():
    module = residual(ops.GELU(), torch.nn.Identity())
    with pytest.raises(ArgumentError, match="'residual' has no producer.*plain nn.Module"):
        module(leaf(4, 16))


def test_channel_that_the_caller_sees_too(between):
    module = residual(ops.GELU(), *between, to_caller=True)
    compare(module, lambda x: (x + ref.gelu(x), x), [leaf(4, 16)], count=2)


def block(*between):
    """Two residual connections, one in the other, around norms and linear operations."""
    torch.manual_seed(0)
    makes = [ops.MakeExtraOutput() for _ in range(2)]
    adds = [ops.AddExtraInput() for _ in range(2)]
    for number, (make, add) in enumerate(zip(makes, adds, strict=True)):
        make.set_extra_output_channel(0, f"r{number}", output_to_caller=False)
        add.set_extra_input_channel(0, f"r{number}")
    options = {"device": "cpu", "dtype": torch.bfloat16}
    return ops.Sequential(
        *[ops.Linear(32, 32, **options), makes[0], ops.RMSNorm(32, **options)],
        *[ops.Linear(32, 48, **options), ops.GELU(), ops.Linear(48, 32, **options)],
        *[makes[1], ops.LayerNorm(32, **options), ops.Linear(32, 32, **options), adds[1]],
        *[*between, adds[0]],
    )


def steps_of(chain, recipe):
    """The results of two forwards and backwards."""
    x = leaf(16, 32).detach().bfloat16().requires_grad_()
    for _ in range(2):
        with te.autocast(recipe=recipe):
            y = chain(x)
        y.sum().backward()
    return [y, x.grad, *(p.grad for p in chain.parameters())]


def test_residual_connections_are_inside_of_one_program(recipe):
    """The bits are those of two programs that hand the tensor to each other."""

    class Nothing(ops.Identity):
        def op_forward(self, ctx, input_, **_):
            return input_

    module, parted = block(), block(Nothing())
    assert all(map(torch.equal, steps_of(module, recipe), steps_of(parted, recipe)))
    assert module.explain().count("native program") == 1
    assert parted.explain().count("native program") == 2


@pytest.mark.slow
@needs_compile
@pytest.mark.parametrize("recipe", quickly(RECIPES, "delayed"), indirect=True)
def test_residual_connections_in_graphs(recipe):
    module, compiled = block(), torch.compile(block(), fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, steps_of(module, recipe), steps_of(compiled, recipe)))
    x = torch.randn(16, 32).bfloat16()
    with torch.no_grad():
        expected = module(x)
        exported = torch.export.export(module.eval(), (x,))
    assert torch.equal(exported.module()(x), expected)
    torch.compiler.reset()


def test_channel_with_two_consumers(between):
    make, first, second = ops.MakeExtraOutput(), ops.AddExtraInput(), ops.AddExtraInput()
    make.set_extra_output_channel(0, "c", output_to_caller=False)
    first.set_extra_input_channel(0, "c")
    second.set_extra_input_channel(0, "c")
    module = ops.Sequential(make, ops.GELU(), first, *between, ops.SiLU(), second)
    compare(module, lambda x: ref.silu(ref.gelu(x) + x) + x, [leaf(4, 16)])


def test_channel_from_one_native_segment_to_another(between):
    """The channel carries a computed tensor, so the gradient of that tensor has to come back, too."""
    linear, other = (ops.BasicLinear(16, 16, device="cpu") for _ in range(2))
    module = residual(ops.GELU(), *between, linear)
    module.insert(0, other)
    compare(
        randomise(module),
        lambda x, v, w: x @ v.T + ref.gelu(x @ v.T) @ w.T,
        [leaf(4, 16)],
    )


@pytest.mark.parametrize("front", [[], [lambda: ops.ConstantScale(2.0)]])
def test_adding_in_place_leaves_what_a_channel_brings(front, between):
    """The norm keeps the same tensor for its backward, and the caller's input must not change."""
    module = residual(ops.RMSNorm(16, device="cpu"), *between, ops.SiLU())
    module[-1]._in_place = True
    module = ops.Sequential(*(make() for make in front), *module)
    factor = 2.0 if front else 1.0
    x = leaf(4, 16)
    before = x.detach().clone()
    compare(randomise(module), lambda x, w: x * factor + ref.silu(ref.rms_norm(x * factor, w)), [x])
    assert torch.equal(x, before)


def test_gradients_that_channels_bring_are_not_added_to_in_place(between):
    """Two sums pass the same incoming gradient to both channels."""
    makes = [ops.MakeExtraOutput(in_place=True) for _ in range(2)]
    adds = [ops.AddExtraInput() for _ in range(2)]
    for number, (make, add) in enumerate(zip(makes, adds, strict=True)):
        make.set_extra_output_channel(0, f"c{number}", output_to_caller=False)
        add.set_extra_input_channel(0, f"c{number}")
    module = ops.Sequential(*makes, ops.GELU(), *between, *adds)
    compare(module, lambda x: ref.gelu(x) + x + x, [leaf(4, 16)])


def test_what_is_added_to_in_place_is_known_to_torch(between):
    """A backward that needs the former extra input raises an error instead of a wrong gradient."""
    x = leaf(4, 16)
    chain = ops.Sequential(
        ops.Linear(16, 16, device="cpu"), *between, ops.AddExtraInput(in_place=True)
    )
    kept = x.exp()  # the backward of exp needs its result
    y = chain(leaf(4, 16, seed=1), kept)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    free = x * 2.0
    chain(leaf(4, 16, seed=1), free).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0))
    with torch.inference_mode():
        chain(torch.ones(4, 16), torch.ones(4, 16))


def test_hidden_output_without_consumer():
    make = ops.MakeExtraOutput()
    make.set_extra_output_channel(0, "c", output_to_caller=False)
    module = ops.Sequential(make, ops.GELU())
    compare(module, ref.gelu, [leaf(4, 16)])


@pytest.mark.parametrize("change", ["rebind", "unbind"])
def test_rebinding_invalidates_the_group(change):
    module = residual(ops.GELU())
    x = torch.randn(2, 4)
    module(x)
    add = module[2]
    add.set_extra_input_channel(0, "residual" if change == "rebind" else None)
    with pytest.raises(RuntimeError, match="channels changed"):
        module(x) if change == "rebind" else module(x, x)


def test_channels_that_do_not_fit():
    x = torch.zeros(2, 4)
    add, make = ops.AddExtraInput(), ops.MakeExtraOutput()
    add.set_extra_input_channel(0, "c")
    with pytest.raises(ValueError, match="1: AddExtraInput.*'c' has no producer"):
        ops.Sequential(ops.GELU(), add)(x)
    make.set_extra_output_channel(0, "c")
    with pytest.raises(ValueError, match="0: AddExtraInput.*no earlier producer"):
        ops.Sequential(add, make)(x)
    other = ops.MakeExtraOutput()
    other.set_extra_output_channel(0, "c")
    with pytest.raises(ValueError, match="multiple producers"):
        ops.Sequential(make, other)(x)
    with pytest.raises(ArgumentError, match="extra input 1 is out of range: there are 1"):
        add.set_extra_input_channel(1, "c")
    with pytest.raises(IndexError, match="extra output -1 is out of range: there are 1"):
        make.set_extra_output_channel(-1, "c")
    for name in (3, b"c", ""):
        with pytest.raises(ArgumentError, match=f"name must be a non-empty string.* got {name!r}"):
            add.set_extra_input_channel(0, name)
        with pytest.raises(ArgumentError, match=f"name must be a non-empty string.* got {name!r}"):
            make.set_extra_output_channel(0, name)
    with pytest.raises(TypeError, match="output_to_caller must be a bool, got 1"):
        make.set_extra_output_channel(0, "c", output_to_caller=1)


# Registered fusions -------------------------------------------------------------------------------


@pytest.fixture
def registries(monkeypatch):
    """Empty lists of registered fusions, for the length of a test."""
    for name in ("forward_backward", "forward", "backward"):
        monkeypatch.setattr(ops.OperationFuser, f"{name}_fusion_functions", [])


class ForwardAxpy(ops.FusedOperation):
    """``scale * x + extra``, as in Transformer Engine's documentation."""

    calls = 0

    def fuser_forward(self, basic_op_ctxs, input_, basic_op_extra_inputs, **_):
        ForwardAxpy.calls += 1
        scale, _add = self.basic_ops
        return scale.scale * input_ + basic_op_extra_inputs[1][0], [(), ()]


class BackwardLinearReLU(ops.FusedOperation):
    calls = 0

    def fuser_backward(self, basic_op_ctxs, grad_output, **_):
        BackwardLinearReLU.calls += 1
        x, w = basic_op_ctxs[0].saved_tensors
        (y,) = basic_op_ctxs[1].saved_tensors
        dy = grad_output * (y > 0)
        return dy @ w, [(dy.T @ x,), ()], [(), ()]


class LinearSiLU(ops.FusedOperation):
    """Keeps less than the basic operations would, and computes the rest again."""

    calls = 0

    def fuser_forward(self, basic_op_ctxs, input_, **_):
        LinearSiLU.calls += 1
        w = self.basic_ops[0].weight
        basic_op_ctxs[0].save_for_backward(input_, w)
        return torch.nn.functional.silu(input_ @ w.T), [(), ()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **_):
        x, w = basic_op_ctxs[0].saved_tensors
        y = x @ w.T
        s = torch.sigmoid(y)
        dy = grad_output * s * (1 + y * (1 - s))
        return dy @ w, [(dy.T @ x,), ()], [(), ()]


def pairs(first, second, fused):
    """A fusion function that replaces adjacent operations of two kinds."""

    def function(fusible, *, recipe):
        out = []
        for op in fusible:
            if out and isinstance(out[-1], first) and isinstance(op, second):
                out[-1] = fused([out[-1], op])
            else:
                out.append(op)
        return out

    return function


@pytest.mark.usefixtures("registries")
def test_forward_fusion(between):
    ops.register_forward_fusion(pairs(ops.ConstantScale, ops.AddExtraInput, ForwardAxpy))
    module = ops.Sequential(
        ops.GELU(), *between, ops.ConstantScale(0.5), ops.AddExtraInput(), ops.SiLU()
    )
    ForwardAxpy.calls = 0
    inputs = [leaf(4, 8), leaf(4, 8, seed=1)]
    compare(module, lambda x, extra: ref.silu(0.5 * ref.gelu(x) + extra), inputs)
    assert ForwardAxpy.calls == 1
    assert "fused operation ForwardAxpy of" in module.explain()


@pytest.mark.usefixtures("registries")
def test_backward_fusion(between):
    ops.register_backward_fusion(pairs(ops.BasicLinear, ops.ReLU, BackwardLinearReLU))
    module = ops.Sequential(
        ops.GELU(), *between, ops.BasicLinear(8, 8, device="cpu"), ops.ReLU(), ops.SiLU()
    )
    BackwardLinearReLU.calls = 0
    compare(module, lambda x, w: ref.silu(ref.relu(ref.gelu(x) @ w.T)), [leaf(4, 8)])
    assert BackwardLinearReLU.calls == 1
    assert "backward, last to first:" in module.explain()


@pytest.mark.usefixtures("registries")
def test_joint_fusion(between):
    ops.register_forward_backward_fusion(pairs(ops.BasicLinear, ops.SiLU, LinearSiLU))
    linear = ops.Linear(8, 8, bias=False, device="cpu")
    module = ops.Sequential(ops.GELU(), linear, ops.SiLU(), *between, ops.ReLU())
    LinearSiLU.calls = 0
    compare(module, lambda x, w: ref.relu(ref.silu(ref.gelu(x) @ w.T)), [leaf(4, 8)])
    assert LinearSiLU.calls == 1


@pytest.mark.usefixtures("registries")
def test_fusions_apply_in_the_order_of_registration():
    seen = []

    def noting(name):
        def function(fusible, *, recipe):
            assert recipe is None
            seen.append(name)
            return fusible

        return function

    ops.register_backward_fusion(noting("backward"))
    ops.register_forward_fusion(noting("forward"))
    ops.register_forward_fusion(noting("forward, prepended"), prepend=True)
    ops.register_forward_backward_fusion(noting("joint"))
    module = ops.Sequential(ops.GELU())
    for _ in range(2):
        module(torch.zeros(2, 4))
    assert seen == ["joint", "forward, prepended", "forward", "backward"]


@pytest.mark.usefixtures("registries")
def test_a_fusion_that_is_registered_later_applies():
    module = ops.Sequential(ops.BasicLinear(8, 8, device="cpu"), ops.SiLU())
    x = torch.randn(4, 8)
    before = module(x)
    ops.register_forward_backward_fusion(pairs(ops.BasicLinear, ops.SiLU, LinearSiLU))
    LinearSiLU.calls = 0
    assert torch.allclose(module(x), before, atol=1e-6)
    assert LinearSiLU.calls == 1


@pytest.mark.usefixtures("registries")
@pytest.mark.parametrize(
    "result", [lambda seq: seq[1:], lambda seq: [*seq, seq[0]], lambda seq: seq[::-1]]
)
def test_fusions_that_lose_operations_are_refused(result):
    ops.register_forward_fusion(lambda fusible, *, recipe: result(fusible))
    with pytest.raises(StateError, match="expected \\[0: GELU, 1: ReLU\\]"):
        ops.Sequential(ops.GELU(), ops.ReLU())(torch.zeros(2, 4))


@pytest.mark.usefixtures("registries")
def test_a_fusion_that_owns_a_channel_may_keep_its_tensor():
    class Whole(ops.FusedOperation):
        output = None

        def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **_):
            assert basic_op_extra_inputs == [(), (None,)]
            return 2 * input_, [(self.output,), ()]

        def fuser_backward(self, basic_op_ctxs, grad_output, **_):
            return 2 * grad_output, [(), ()], [(), (None,)]

    ops.register_forward_backward_fusion(pairs(ops.MakeExtraOutput, ops.AddExtraInput, Whole))
    x = leaf(2, 4)
    y = residual()(x)
    y.sum().backward()
    assert torch.equal(y, 2 * x)
    assert torch.equal(x.grad, torch.full_like(x, 2.0))
    with pytest.raises(
        StateError,
        match="extra output 0 is (public|read by an operation outside its forward fusion), but .* returned None",
    ):
        residual(to_caller=True)(x)
