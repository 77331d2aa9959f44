"""ops.Sequential as a container: list behaviour, parameters, checkpoints, copies, bad input."""

import copy
import io
import pickle
import threading
from collections import OrderedDict

import pytest
import torch

import te_fast.pytorch as te
from te_fast.errors import ArgumentError, DtypeError, StateError, TeFastError, UnsupportedError
from te_fast.pytorch import ops


def chain(**options):
    torch.default_generator.manual_seed(0)
    return ops.Sequential(
        ops.LayerNorm(16, device="cpu"),
        ops.Linear(16, 32, device="cpu", **options),
        ops.SwiGLU(),
        ops.BasicLinear(16, 16, device="cpu"),
    )


def kinds(sequential):
    return [type(module).__name__ for module in sequential]


# The list -----------------------------------------------------------------------------------------


def test_list_behaviour_is_that_of_torch():
    a, b, c, d = (ops.ConstantScale(float(i)) for i in range(4))
    sequential = ops.Sequential(a, b)
    plain = torch.nn.Sequential(a, b)
    for one in (sequential, plain):
        assert one.append(c) is one
        assert one.extend([d]) is one
        one.insert(1, torch.nn.Identity())
    assert list(sequential._modules) == list(plain._modules) == ["0", "1", "2", "3", "4"]
    assert kinds(sequential) == kinds(plain)
    assert sequential[0] is a
    assert sequential[-1] is d
    assert list(sequential[2:4]) == [b, c]
    assert isinstance(sequential[2:4], ops.Sequential)
    assert sequential.pop(1).__class__ is torch.nn.Identity
    assert list(sequential) == [a, b, c, d]
    sequential[1] = d
    assert sequential[1] is d
    del sequential[0]
    assert len(sequential) == 3
    assert list(sequential + [a]) == [d, c, d, a]  # noqa: RUF005
    before = sequential
    sequential += [a]
    assert sequential is before
    assert list(sequential.pop(slice(0, 2))) == [d, c]
    assert list(sequential) == [d, a]


def test_insertion_at_both_ends():
    a, b, c = (ops.ConstantScale(float(i)) for i in range(3))
    assert list(ops.Sequential(a).insert(0, b).insert(2, c)) == [b, a, c]
    assert list(ops.Sequential(a, b).insert(-1, c)) == [a, c, b]


def test_names_come_from_a_dictionary():
    modules = OrderedDict(first=ops.GELU(), second=ops.ReLU())
    sequential = ops.Sequential(modules)
    assert list(sequential._modules) == ["first", "second"]
    assert list(sequential.append(ops.SiLU())._modules) == ["first", "second", "0"]
    assert sequential.first is modules["first"]


def test_edits_take_effect_at_the_next_forward():
    x = torch.ones(2, 4)
    sequential = ops.Sequential(ops.ConstantScale(2.0))
    assert sequential(x)[0, 0] == 2
    sequential.append(ops.ConstantScale(3.0))
    assert sequential(x)[0, 0] == 6
    sequential[0] = ops.ConstantScale(5.0)
    assert sequential(x)[0, 0] == 15
    setattr(sequential, "0", ops.ConstantScale(7.0))
    assert sequential(x)[0, 0] == 21
    sequential.insert(1, torch.nn.ReLU())
    assert sequential(-x)[0, 0] == 0
    sequential.pop(1)
    assert sequential(x)[0, 0] == 21
    delattr(sequential, "2")
    assert sequential(x)[0, 0] == 7
    sequential.insert(0, ops.ConstantScale(2.0))
    assert sequential(x)[0, 0] == 14
    assert torch.equal(ops.Sequential()(x), x)


@pytest.mark.parametrize("edit", ["append", "insert", "set"])
def test_what_is_no_module_is_refused(edit):
    sequential = ops.Sequential(ops.GELU())
    with pytest.raises(ArgumentError, match="expected a torch.nn.Module, got int"):
        {
            "append": lambda: sequential.append(3),
            "insert": lambda: sequential.insert(0, 3),
            "set": lambda: sequential.__setitem__(0, 3),
        }[edit]()
    assert len(sequential) == 1


def test_index_out_of_range():
    with pytest.raises(IndexError, match="index 1 is out of range"):
        ops.Sequential(ops.GELU())[1]


# Parameters ---------------------------------------------------------------------------------------


def test_state_dict_has_the_keys_of_te():
    sequential = chain()
    keys = [
        "0.weight",
        "0.bias",
        "1.basic_ops.0.weight",
        "1.basic_ops.1.bias",
        "3.weight",
    ]
    assert list(sequential.state_dict()) == keys
    assert [name for name, _ in sequential.named_parameters()] == keys


def test_parameters_of_linear_are_those_of_its_operations():
    linear = ops.Linear(8, 4, device="cpu")
    other = torch.nn.Parameter(torch.ones(4, 8))
    linear.weight = other
    assert linear.basic_ops[0].weight is other
    linear.basic_ops[1].bias = torch.nn.Parameter(torch.ones(4))
    assert linear.bias[0] == 1
    assert torch.equal(linear(torch.ones(1, 8)), torch.full((1, 4), 9.0))
    with pytest.raises(ArgumentError, match="no bias"):
        ops.Linear(8, 4, bias=False, device="cpu").bias = torch.nn.Parameter(torch.ones(4))


def test_checkpoint_goes_round_through_a_file():
    source, target = chain(), chain()
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(1.0)
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    x = torch.randn(4, 16)
    target(x)
    target.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(target(x), source(x))


def test_checkpoints_of_torch_and_te_load_strictly():
    plain = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 8))
    sequential = ops.Sequential(ops.LayerNorm(16, device="cpu"), ops.Linear(16, 8, device="cpu"))
    sequential.load_state_dict(plain.state_dict())
    x = torch.randn(4, 16)
    assert torch.allclose(sequential(x), plain(x), atol=1e-6)
    # Transformer Engine has an `_extra_state` per basic op, empty without delayed scaling.
    empty = torch.empty(0, dtype=torch.uint8)
    state = {**sequential.state_dict(), "0._extra_state": empty}
    state |= {f"1.basic_ops.{i}._extra_state": empty for i in range(2)}
    sequential.load_state_dict(state)
    with pytest.raises(RuntimeError, match="Missing key"):
        sequential.load_state_dict({"0.weight": torch.ones(16)})


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))]
)
def test_copies_are_independent(duplicate):
    sequential = chain()
    x = torch.randn(4, 16)
    expected = sequential(x)
    other = duplicate(sequential)
    assert torch.equal(other(x), expected)
    with torch.no_grad():
        other[1].weight.zero_()
    assert torch.equal(sequential(x), expected)
    assert not torch.equal(other(x), expected)


def test_types_change():
    sequential = chain()
    x = torch.randn(4, 16)
    assert sequential(x).dtype == torch.float32
    sequential.to(torch.bfloat16)
    assert sequential(x.bfloat16()).dtype == torch.bfloat16
    assert sequential[1].basic_ops[0].weight.dtype == torch.bfloat16


def test_swapped_data_and_replaced_parameters_are_seen():
    sequential = chain()
    x = torch.randn(4, 16)
    sequential(x)
    with torch.no_grad():
        sequential[3].weight.data = torch.zeros(16, 16)
    assert not sequential(x).any()
    sequential[3].weight = torch.nn.Parameter(torch.eye(16))
    assert torch.equal(sequential(x), sequential[:3](x))


# Bad input ----------------------------------------------------------------------------------------


def test_number_of_extra_inputs():
    x = torch.zeros(2, 4)
    sequential = ops.Sequential(ops.GELU(), torch.nn.ReLU(), ops.AddExtraInput())
    for extras in ([], [x, x]):
        message = rf"expected 1 extra inputs \(2: AddExtraInput\), got {len(extras)}"
        with pytest.raises(ValueError, match=message):
            sequential(x, *extras)
    with pytest.raises(ArgumentError, match="none"):
        ops.Sequential(ops.GELU())(x, x)
    direct = ops.Sequential(ops.AddExtraInput())
    for _ in range(2):  # the second call goes to the program at once
        assert torch.equal(direct(x, x), x)
        with pytest.raises(ArgumentError, match=r"expected 1 extra inputs \(0: AddExtraInput\)"):
            direct(x)
        with pytest.raises(DtypeError, match="must be a torch.Tensor, got NoneType"):
            direct(x, None)


class Shift(ops.BasicOperation):
    """An op with a keyword."""

    def op_forward(self, ctx, input_, *, by=1.0, **_):
        return input_ + by

    def op_backward(self, ctx, grad_output):
        return grad_output, ()


class Strict(ops.BasicOperation):
    def op_forward(
        self, ctx, input_, prev_op_grad_output_quantizer, next_op_input_quantizer, by=1.0
    ):
        return input_ + by

    def op_backward(self, ctx, grad_output):
        return grad_output, ()


def test_op_kwargs():
    x = torch.zeros(2, 4)
    shift = Shift()
    sequential = ops.Sequential(Shift(), torch.nn.Identity(), shift, Strict())
    assert sequential(x)[0, 0] == 3
    assert sequential(x, op_kwargs={0: {"by": 10.0}, shift: {"by": 5.0}})[0, 0] == 16
    assert sequential(x, op_kwargs={-1: {"by": 7.0}})[0, 0] == 9
    assert shift(x, by=4.0)[0, 0] == 4


@pytest.mark.parametrize(
    ("op_kwargs", "message"),
    [
        ({1: {"by": 1.0}}, "1: GELU takes no keyword argument by"),
        ({2: {"too": 1.0}}, "2: Strict takes no keyword argument too"),
        ({3: {"by": 1.0}}, "key 3, which is no fusible operation"),
        ({"first": {"by": 1.0}}, "key 'first'"),
    ],
)
def test_unknown_op_kwargs(op_kwargs, message):
    sequential = ops.Sequential(Shift(), ops.GELU(), Strict(), torch.nn.ReLU())
    for error in (ArgumentError, TypeError, ValueError):
        with pytest.raises(error, match=message):
            sequential(torch.zeros(2, 4), op_kwargs=op_kwargs)
    with pytest.raises(ArgumentError, match="key Shift"):
        sequential(torch.zeros(2, 4), op_kwargs={Shift(): {}})
    with pytest.raises(IndexError):
        sequential(torch.zeros(2, 4), op_kwargs={9: {}})
    with pytest.raises(ArgumentError, match="must be a dict"):
        sequential(torch.zeros(2, 4), op_kwargs=3)


def test_edits_during_a_forward():
    class Editor(ops.BasicOperation):
        def op_forward(self, ctx, input_, **_):
            owner[0].append(ops.GELU())
            return input_

        def op_backward(self, ctx, grad_output):
            return grad_output, ()

    owner = [ops.Sequential(ops.GELU(), Editor())]
    with pytest.raises(StateError, match="edited"):
        owner[0](torch.zeros(2, 4))
    assert len(owner[0]) == 2

    class PlainEditor(torch.nn.Module):
        def forward(self, x):
            plain[0].append(ops.GELU())
            return x

    plain = [ops.Sequential(PlainEditor(), ops.GELU())]
    with pytest.raises(StateError, match="edited"):
        plain[0](torch.zeros(2, 4))


def test_a_group_does_not_run_inside_itself():
    class Recursive(ops.BasicOperation):
        def op_forward(self, ctx, input_, **_):
            return owner[0](input_)

        def op_backward(self, ctx, grad_output):
            return grad_output, ()

    owner = [ops.Sequential(ops.GELU(), Recursive())]
    with pytest.raises(StateError, match="0: GELU: its group ops 0-1 was called from an operation"):
        owner[0](torch.zeros(2, 4))


def test_an_op_is_in_one_running_group_only():
    class Calling(ops.Identity):
        def op_forward(self, ctx, input_, **_):
            return inner[0](input_)

    shared = ops.ReLU()
    inner = [ops.Sequential(ops.GELU(), Shift(), shared)]
    chain = ops.Sequential(Calling(), shared)
    with pytest.raises(StateError, match="2: ReLU: its group ops 0-2 was called .* of ops 0-1"):
        chain(torch.zeros(2, 4))
    inner[0].pop(2)
    assert chain(torch.zeros(2, 4))[0, 0] == 1


def test_a_group_runs_in_several_threads_at_once():
    barrier = threading.Barrier(2)

    class Meeting(ops.Identity):
        def op_forward(self, ctx, input_, **_):
            barrier.wait(timeout=20)
            return 2 * input_

    sequential = ops.Sequential(ops.ConstantScale(3.0), Meeting())
    results = {}

    def run(value):
        results[value] = sequential(torch.full((2, 4), value))

    threads = [threading.Thread(target=run, args=(value,)) for value in (1.0, 2.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(y, torch.full((2, 4), 6 * value)) for value, y in results.items())
    assert len(results) == 2


def test_operations_may_be_shared():
    scale = ops.ConstantScale(2.0)
    linear = ops.BasicLinear(4, 4, device="cpu")
    one = ops.Sequential(scale, linear, linear)
    x = torch.randn(3, 4, requires_grad=True)
    w = linear.weight.detach().clone().requires_grad_()
    expected = 2 * x.detach() @ w.T @ w.T
    expected.sum().backward()
    y = one(x)
    assert torch.allclose(y, expected, atol=1e-6)
    y.sum().backward()
    assert torch.allclose(linear.weight.grad, w.grad, atol=1e-5)
    assert torch.allclose(one[1:2](x), x @ w.T, atol=1e-6)


def test_hooks_run():
    sequential = chain()
    seen = []
    sequential.register_forward_pre_hook(lambda *_: seen.append("before"))
    sequential.register_forward_hook(lambda *_: seen.append("after"))
    sequential(torch.randn(4, 16))
    assert seen == ["before", "after"]


def test_a_subclass_with_a_forward_of_its_own():
    class Twice(ops.Sequential):
        def forward(self, x):
            return super().forward(super().forward(x))

    assert Twice(ops.ConstantScale(3.0))(torch.ones(2, 2))[0, 0] == 9
    sequential = ops.Sequential(ops.ConstantScale(3.0))
    sequential.forward = lambda x: x
    assert sequential(torch.ones(2, 2))[0, 0] == 1


def test_errors_are_of_te_fast():
    with pytest.raises(TeFastError):
        ops.Sequential(ops.SwiGLU())(torch.zeros(2, 3))
    assert ops is te.ops


def test_explain_and_print():
    sequential = chain()
    assert "ops 0-3" not in repr(sequential)
    sequential.append(ops.Dropout(0.1)).append(torch.nn.ReLU())
    sequential(torch.randn(4, 16))
    text = sequential.explain()
    for part in ("ops 0-4:", "0: LayerNorm", "1.0: BasicLinear", "1.1: Bias", "3: BasicLinear"):
        assert part in text
    assert "Python operation Dropout of 4: Dropout" in text
    assert "ReLU: a plain module" in text
    assert text in repr(sequential)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ops.Sequential(ops.GELU()),
        lambda: ops.Sequential(ops.GELU(), torch.nn.Identity()),
        ops.GELU,
        lambda: ops.Linear(4, 4, device="cpu"),
    ],
)
def test_the_input_by_its_name(make):
    module, x = make(), torch.ones(2, 4)
    for _ in range(2):  # the second call runs the program at once
        assert torch.equal(module(input=x), module(x))


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (lambda **o: ops.ConstantScale(o.get("scale", 2.0)), "scale", 3.0),
        (lambda **o: te.LayerNorm(8, device="cpu", **o), "eps", 10.0),
        (lambda **o: ops.RMSNorm(8, device="cpu", **o), "zero_centered_gamma", True),
        (ops.ClampedSwiGLU, "limit", 0.1),
        (ops.SwiGLU, "glu_interleave_size", 2),
        (ops.GELU, "cache_quantized_input", True),
    ],
)
def test_constants_that_change_after_a_forward(make, name, value):
    op, other = make(), make(**{name: value})
    if name == "zero_centered_gamma":
        other.load_state_dict(op.state_dict())
    chain = ops.Sequential(op, ops.Identity())
    x = torch.randn(4, 8, requires_grad=True)
    for module in (op, chain):
        module(x).sum().backward()
    setattr(op, name, value)
    wanted = other(x)
    (grad,) = torch.autograd.grad(wanted.sum(), x)
    for module in (op, chain):
        y = module(x)
        assert torch.equal(y, wanted)
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], grad)


@pytest.mark.parametrize("index", ["a", None, [0], (0,), b"0"])
def test_an_index_that_is_none_is_refused(index):
    """Transformer Engine raises ``TypeError`` here, whichever method uses the index."""
    chain = ops.Sequential(ops.ReLU(), ops.SiLU())
    for use in (
        lambda: chain[index],
        lambda: chain.__setitem__(index, ops.ReLU()),
        lambda: chain.__delitem__(index),
        lambda: chain.insert(index, ops.ReLU()),
        lambda: chain.pop(index),
    ):
        with pytest.raises(TypeError, match="an index must be an integer or a slice") as caught:
            use()
        assert type(caught.value) is ArgumentError
    assert [type(op) for op in chain] == [ops.ReLU, ops.SiLU]


def test_indices_of_other_number_classes():
    """A number that equals an integer is an index; Transformer Engine raises ``RuntimeError`` for others."""
    chain = ops.Sequential(ops.ReLU(), ops.SiLU())
    assert chain[1.0] is chain[-1.0] is chain[True] is chain[torch.tensor(1)] is chain[1]
    with pytest.raises(RuntimeError, match=r"got 0\.5") as caught:
        chain[0.5]
    assert isinstance(caught.value, ArgumentError)
    for index in (2, -3, 2.0):
        with pytest.raises(IndexError, match="out of range, there are 2 modules"):
            chain[index]
    with pytest.raises(IndexError, match="no module to replace"):
        chain[2:] = ops.ReLU()


class Doubled(torch.nn.Module):
    """A parametrization."""

    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize("ran", [False, True])
def test_a_parametrized_operation_is_refused(ran):
    linear = ops.BasicLinear(16, 16, device="cpu")
    chain, x = ops.Sequential(linear, ops.ReLU()), torch.randn(8, 16)
    wanted = chain(x) if ran else None
    torch.nn.utils.parametrize.register_parametrization(linear, "weight", Doubled())
    for _ in range(2):
        for run in (chain, linear):
            with pytest.raises(UnsupportedError, match="parametrize does not work.*remove_param"):
                run(x)
    torch.nn.utils.parametrize.remove_parametrizations(linear, "weight", leave_parametrized=False)
    if wanted is not None:
        assert torch.equal(chain(x), wanted)


def test_a_container_does_not_hold_itself():
    chain = ops.Sequential(ops.GELU())
    for edit in (
        lambda: chain.append(chain),
        lambda: chain.insert(0, chain),
        lambda: chain.append(torch.nn.Sequential(chain)),
    ):
        with pytest.raises(ArgumentError, match="cannot hold itself"):
            edit()
    assert len(chain) == 1


def test_arguments_of_another_class_are_named():
    chain = ops.Sequential(ops.GELU())
    with pytest.raises(ArgumentError, match="op_kwargs must have a dict .* got int"):
        chain(torch.ones(2, 2), op_kwargs={0: 3})
    with pytest.raises(ArgumentError, match="expected an iterable of modules, got int"):
        chain.extend(3)
