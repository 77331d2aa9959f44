"""torch's operations on quantised tensors: which keep the class, which write, which dequantise."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch

import te_fast.pytorch as te
from quantized_tensors import FP8, KINDS, parts, quantizer, values
from te_fast import dispatch
from te_fast.errors import DtypeError, QuantizedTensorError, UnsupportedError
from te_fast.tensor import operations

PER_TENSOR = ("delayed", "current")


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def x():
    return torch.randn(32, 256).bfloat16()


@pytest.fixture
def tensor(kind, x):
    return quantizer(kind)(x)


def holds(tensor, expected, like):
    """Whether a tensor is of the class of `like`, and dequantises to these values, in each layout."""
    assert type(tensor) is type(like)
    assert torch.equal(tensor.dequantize(), expected)
    assert torch.equal(tensor.detach().clone().dequantize(), expected)
    if tensor.get_usages()["columnwise"]:
        columns = tensor.detach()
        columns.update_usage(rowwise_usage=False)
        assert columns.dequantize().shape == expected.shape


def test_what_torch_sees(tensor, x):
    assert isinstance(tensor, torch.Tensor)
    assert isinstance(tensor, te.QuantizedTensor)
    assert (tensor.shape, tensor.dtype, tensor.device) == (x.shape, x.dtype, x.device)
    assert (tensor.numel(), tensor.stride(), tensor.is_contiguous()) == (
        x.numel(),
        x.stride(),
        True,
    )
    assert tensor.type() == "torch.BFloat16Tensor"
    assert tensor.data_ptr() == 0
    assert tensor.untyped_storage().nbytes() == 0
    assert not tensor.is_pinned()
    assert "data=tensor(" in repr(tensor)
    tensor.clear()
    assert "not to be read" in repr(tensor)


def test_parameters(tensor, kind, x):
    parameter = torch.nn.Parameter(tensor)
    assert type(parameter) is type(tensor)
    assert isinstance(parameter, torch.nn.Parameter)
    assert parameter.requires_grad
    assert parameter.is_leaf
    assert parts(parameter) == parts(tensor)
    for other in (parameter.detach(), parameter.data):
        assert isinstance(other, te.QuantizedTensor)
        assert not other.requires_grad
        assert parts(other) == parts(parameter)
    alias = parameter.expand_as(parameter)
    assert alias.grad_fn.next_functions[0][0].variable is parameter


def test_copies_have_bytes_and_scales_of_their_own(tensor, kind, x):
    copied = tensor.clone()
    assert not set(map(id, parts(copied)[:2])) & set(map(id, parts(tensor)[:2]))
    copied.quantize_(x * 8)
    holds(copied, values(x * 8, kind), tensor)
    holds(tensor, values(x, kind), tensor)


def test_moves_keep_the_class(tensor, kind, x):
    assert tensor.to("cpu") is tensor
    assert tensor.contiguous() is tensor
    assert tensor.to(x.dtype) is tensor
    holds(tensor.to("cpu", copy=True), values(x, kind), tensor)
    meta = tensor.to("meta")
    assert type(meta) is type(tensor)
    assert meta.device.type == "meta"
    assert parts(meta)[0].is_meta
    plain = tensor.to(torch.float16)
    assert type(plain) is torch.Tensor
    assert torch.equal(plain, values(x.float(), kind).bfloat16().half())


def test_operations_without_fp8_give_plain_tensors(tensor, kind, x):
    expected = values(x, kind)
    weight = torch.randn(8, 256).bfloat16()
    for operation in (
        lambda t: t + 1,
        lambda t: 2 * t,
        torch.neg,
        lambda t: t.sum(),
        lambda t: t > 0,
        lambda t: torch.nn.functional.linear(t, weight),
        lambda t: torch.cat([t, t]),
        lambda t: torch.stack([t, t]),
        lambda t: t.norm(),
        lambda t: t.t(),
        lambda t: t.unsqueeze(0),
        lambda t: t.unbind()[3],
        torch.zeros_like,
        torch.ones_like,
    ):
        result = operation(tensor)
        assert type(result) is torch.Tensor
        assert torch.equal(result, operation(expected))


def test_views(tensor, kind, x):
    expected = values(x, kind)
    for size in ((2, 16, 256), (-1, 256), (32, 256)):
        holds(tensor.view(size), expected.view(size), tensor)
        holds(tensor.reshape(*size), expected.view(size), tensor)
    back = tensor.view(4, 8, 256).view(32, 256)
    assert parts(back)[0].data_ptr() == parts(tensor)[0].data_ptr()
    holds(tensor.view(-1), expected.view(-1), tensor)
    holds(torch.flatten(tensor), expected.flatten(), tensor)
    if kind in PER_TENSOR:
        return
    with pytest.warns(UserWarning, match="cuts the blocks"):
        plain = tensor.view(64, 128)
    assert type(plain) is torch.Tensor
    assert torch.equal(plain, expected.view(64, 128))
    with pytest.raises(UnsupportedError, match="cuts the blocks"):
        torch.flatten(tensor.view(2, 16, 256), 1)
    flat = tensor.view(-1)
    flat.mul_(0.5)
    assert torch.equal(tensor.dequantize(), expected * 0.5)


def test_views_of_flat_views(tensor, kind, x):
    expected = values(x, kind)
    flat = tensor.view(-1)
    holds(flat.reshape(-1), expected.view(-1), tensor)
    holds(flat.view(2, 16, 256), expected.view(2, 16, 256), tensor)
    assert parts(flat.view(32, 256))[0].data_ptr() == parts(tensor)[0].data_ptr()
    if kind in PER_TENSOR:
        holds(flat.view(1, -1), expected.view(1, -1), tensor)
        return
    with pytest.warns(UserWarning, match="cuts the blocks"):
        one_row = flat.view(1, -1)
    assert torch.equal(one_row, expected.view(1, -1))


def test_a_tensor_is_detached_in_place(kind):
    tensor = quantizer(kind)(torch.randn(256, 256).bfloat16())
    expected, before = tensor.dequantize(), parts(tensor)
    if kind == "delayed":
        tensor._quantizer.scale = torch.full((1,), 2.0**-12)  # bytes of this scale would be others
    with torch.inference_mode():
        assert tensor.detach_() is tensor
    assert parts(tensor) == before
    assert torch.equal(tensor.dequantize(), expected)


@pytest.mark.parametrize(
    "change",
    [
        torch.Tensor.t_,
        lambda t: t.transpose_(0, 1),
        lambda t: t.unsqueeze_(0),
        lambda t: t.resize_(128, 512),
    ],
)
def test_shapes_are_not_changed_in_place(kind, change):
    tensor = quantizer(kind)(torch.randn(256, 256).bfloat16())
    expected = tensor.dequantize()
    with pytest.raises(NotImplementedError, match="not changed in place") as raised:
        change(tensor.detach())
    assert isinstance(raised.value, UnsupportedError)
    assert torch.equal(tensor.dequantize(), expected)
    tensor.set_(torch.ones(256, 256).bfloat16())
    assert tensor.dequantize().unique().tolist() == [1.0]


def test_flat_views_of_different_rows_exchange_values(kind):
    x, y = torch.randn(256, 130).bfloat16(), torch.randn(130, 256).bfloat16()
    target, source = quantizer(kind)(x), quantizer(kind)(y)
    expected = source.dequantize().view(256, 130)
    target.view(-1).copy_(source.view(-1))
    assert (target.dequantize() - expected).abs().max() <= expected.abs().max() / 16
    rows = torch.empty_like(source.view(-1))
    if kind in PER_TENSOR:
        rows.copy_from_storage(source)
        assert torch.equal(rows.dequantize(), source.dequantize().view(-1))
        return
    before = target.dequantize()
    for other in (rows, source.view(-1), quantizer(kind)(x[:128])):
        with pytest.raises(QuantizedTensorError, match="copy_from_storage takes values of that"):
            target.view(-1).copy_from_storage(other)
    assert torch.equal(target.dequantize(), before)


def test_a_write_of_a_flat_view_without_a_row_layout(x):
    tensor = quantizer("2d")(x)
    tensor.update_usage(rowwise_usage=False)
    tensor._quantizer.set_usage(rowwise=False)
    tensor.view(-1).copy_(2 * x.view(-1))
    assert torch.equal(tensor.dequantize(), values(2 * x, "2d"))


@pytest.mark.parametrize("kind", PER_TENSOR)
def test_a_strided_part_keeps_its_strides(tensor, kind, x):
    part, expected = tensor[::2], values(x, kind)[::2]
    for same in (part.detach(), part.view_as(expected), type(part).make_like(part)):
        assert same.stride() == expected.stride()
        assert torch.equal(same.flatten().dequantize(), expected.flatten())


@pytest.mark.parametrize("kind", PER_TENSOR)
def test_a_part_is_not_quantised_anew(tensor, kind, x):
    part, expected = tensor[:16], tensor.dequantize()
    for write in (
        part.quantize_,
        part.to_dtype(torch.float32).quantize_,
        lambda values: part._quantizer.update_quantized(values, part),
    ):
        with pytest.raises(QuantizedTensorError, match="part of a tensor"):
            write(9 * x[:16])
    weight = torch.nn.Parameter(part)
    weight.grad = torch.ones_like(x[:16])
    optimizer = te.optimizers.FusedAdam([weight], master_weights=True)
    with pytest.raises(QuantizedTensorError, match="part of a tensor"):
        optimizer.step()
    assert not optimizer.state
    holds(tensor, expected, tensor)


def test_a_tensor_like_a_part_is_a_part(kind):
    x = torch.randn(256, 128).bfloat16()
    tensor = quantizer(kind)(x)
    part, expected = tensor[128:], tensor.dequantize()
    if not isinstance(part, te.QuantizedTensor):
        return
    like = type(part).make_like(part)
    if kind in PER_TENSOR:
        with pytest.raises(QuantizedTensorError, match="part of a tensor"):
            like.fill_(2.0)
    else:
        like.fill_(2.0)
        expected[128:] = 2.0
    holds(tensor, expected, tensor)
    tensor.update_usage(columnwise_usage=True)
    tensor.update_usage(rowwise_usage=False)
    assert torch.equal(tensor.dequantize(), expected)


def test_a_write_shows_in_views(tensor, kind, x):
    view = tensor.view(2, 16, 256)
    tensor.quantize_(y := torch.randn(32, 256).bfloat16())
    assert torch.equal(view.dequantize(), values(y, kind).view(2, 16, 256))


@pytest.mark.parametrize("kind", PER_TENSOR)
def test_a_write_of_a_view_whose_columns_differ_leaves_no_old_column_layout(kind, x):
    tensor = quantizer(kind)(x)
    view = tensor.view(-1)
    view.mul_(0.5)
    tensor.update_usage(columnwise_usage=True)
    columns = tensor.detach()
    columns.update_usage(rowwise_usage=False)
    assert torch.equal(columns.dequantize(), tensor.dequantize())
    view = tensor.view(64, 128)
    view.update_usage(columnwise_usage=True)
    tensor.quantize_(x.flip(0))
    assert not view.get_usages()["columnwise"]


@pytest.mark.parametrize("kind", PER_TENSOR)
def test_a_number_in_other_shapes(kind):
    tensor = quantizer(kind)(torch.tensor(3.0))
    for size in ((), (1,), (1, 1)):
        view = tensor.reshape(size)
        assert torch.equal(view.dequantize(), torch.full(size, 3.0))
        assert torch.equal(view.reshape(()).dequantize(), torch.tensor(3.0))


def test_parts(tensor, kind, x):
    expected = values(x, kind)
    for part in (
        lambda t: t[4:20],
        lambda t: t[3],
        lambda t: t.narrow(0, 8, 8),
        lambda t: t[:, 16:48],
        lambda t: t.split(16)[1],
        lambda t: t.chunk(3)[2],
        lambda t: t.split([10, 22])[1],
        lambda t: t.as_strided((3, 5), (256, 1), 2),
    ):
        got = part(tensor)
        assert isinstance(got, te.QuantizedTensor) == (kind in PER_TENSOR)
        got = got.dequantize() if kind in PER_TENSOR else got
        assert torch.equal(got, part(expected))
    for whole in (tensor[:], tensor[0:32], tensor.as_strided((32, 256), (256, 1))):
        holds(whole, expected, tensor)


def test_a_part_is_no_place_for_new_scales(x):
    for kind in PER_TENSOR:
        tensor = quantizer(kind)(x)
        for write in (
            lambda t: t[:16].copy_(x[:16]),
            lambda t: t[:16].zero_(),
            lambda t: t.view(-1)[5:].mul_(2),
        ):
            with pytest.raises(QuantizedTensorError, match="part of a tensor"):
                write(tensor)
        holds(tensor, values(x, kind), tensor)
        shard = quantizer(kind)(x)[16:]
        tensor.new_zeros(20, 256).narrow(0, 0, 16).copy_(shard)


def test_a_part_takes_bytes_of_its_own_scale_alone(x):
    for kind in PER_TENSOR:
        tensor, larger = (
            quantizer(kind)(x),
            te.Float8CurrentScalingQuantizer(FP8["e4m3"], "cpu")(9 * x),
        )
        with pytest.raises(QuantizedTensorError, match="part of a tensor"):
            tensor[:16].copy_(larger[:16])
        holds(tensor, values(x, kind), tensor)
        tensor[:16].copy_(tensor[16:])
        holds(tensor, values(x, kind)[16:].repeat(2, 1), tensor)


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (0, 1.0),
        ((3, 4), 7.0),
        ((slice(None), 0), 9.0),
        ((0, torch.tensor([1, 5])), 2.0),
        ([2, 7], 3.0),
        (slice(0, 32), torch.full((256,), 2.0)),
        (..., 0.5),
        ((slice(4, 20), slice(16, 48)), torch.full((16, 32), -2.0)),
    ],
)
def test_an_index_is_written(tensor, kind, index, value):
    version, expected = tensor._version, tensor.dequantize()
    tensor[index] = value
    expected[index] = value
    holds(tensor, values(expected, kind), tensor)
    assert tensor._version > version


def test_an_index_takes_quantised_values_and_bytes_of_one_scale(kind, x):
    tensor, larger = quantizer(kind)(x), quantizer(kind)(4 * x)
    expected = tensor.dequantize()
    expected[:16] = larger.dequantize()[:16]
    tensor[:16] = larger[:16]
    holds(tensor, values(expected, kind), tensor)
    if kind in PER_TENSOR:
        scale = parts(tensor)[1].clone()
        tensor[:16] = tensor[16:]
        assert torch.equal(parts(tensor)[1], scale)
        assert torch.equal(tensor.dequantize(), values(expected, kind)[16:].repeat(2, 1))


def test_an_index_of_whole_blocks_writes_these_alone():
    tensor = quantizer("2d")(torch.randn(256, 128))
    before = parts(tensor)[0].clone()
    tensor[:128] = 5.0
    assert torch.equal(parts(tensor)[0][128:], before[128:])
    assert torch.equal(tensor.dequantize()[:128], torch.full((128, 128), 5.0))


def test_a_diagonal_is_filled(tensor, kind):
    expected = tensor.dequantize().fill_diagonal_(9.0)
    assert tensor.fill_diagonal_(9.0) is tensor
    holds(tensor, values(expected, kind), tensor)


def test_an_index_of_a_part_or_a_leaf_is_refused(kind, x):
    leaf = quantizer(kind)(x).requires_grad_()
    with pytest.raises(RuntimeError, match="leaf"):
        leaf[0] = 1.0
    if kind in PER_TENSOR:
        with pytest.raises(QuantizedTensorError, match="part of a tensor"):
            leaf.detach()[:16][0] = 1.0


def test_the_gradient_of_a_written_index(kind, x):
    base, value = x.float().requires_grad_(), torch.ones(256, requires_grad=True)
    tensor = quantizer(kind)(base)
    tensor[3] = value
    (tensor * 2).sum().backward()
    expected = torch.full((32, 256), 2.0)
    expected[3] = 0
    assert torch.equal(base.grad, expected)
    assert torch.equal(value.grad, torch.full((256,), 2.0))


def test_other_libraries_get_the_values(kind, x):
    tensor = quantizer(kind)(x.float())
    expected = tensor.dequantize()
    assert torch.equal(torch.from_dlpack(tensor), expected)
    assert torch.equal(torch.from_numpy(np.asarray(tensor)), expected)
    assert np.from_dlpack(tensor).tolist() == expected.tolist()
    assert tensor.tolist() == expected.tolist()
    assert type(tensor).__dlpack_c_exchange_api__ is None
    assert not hasattr(tensor, "__cuda_array_interface__")
    with pytest.raises(TypeError):  # NumPy has no bfloat16
        quantizer(kind)(x).numpy()
    with pytest.raises((BufferError, RuntimeError), match="require gradient"):
        torch.from_dlpack(tensor.requires_grad_())


def test_processes_do_not_share_values(tensor):
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(tensor)
    with pytest.raises(UnsupportedError, match="Tensor: processes do not share FP8 values; share"):
        layer.share_memory()


@pytest.mark.parametrize("kind", [*PER_TENSOR, "2d"])
def test_a_write_of_a_part_leaves_no_old_column_layout(kind):
    tensor = quantizer(kind)(torch.randn(256, 128))
    if kind in PER_TENSOR:
        tensor[:128].copy_(tensor[128:])
    else:
        tensor[:128].mul_(3)
    expected = tensor.dequantize()
    tensor.update_usage(rowwise_usage=True, columnwise_usage=True)
    tensor.update_usage(rowwise_usage=False)
    assert torch.equal(tensor.dequantize(), expected)


@pytest.mark.parametrize("kind", [*PER_TENSOR, "2d"])
def test_an_old_column_layout_is_neither_pickled_nor_taken_over(kind):
    tensor = quantizer(kind)(torch.randn(256, 128))
    tensor._value.row.zero_()
    for made in (pickle.loads(pickle.dumps(tensor)), type(tensor).make_like(tensor)):
        assert made.get_usages() == {"rowwise": True, "columnwise": False}
        assert not made.dequantize().any()


def test_a_deep_copy_of_a_part_is_whole(x):
    for kind in PER_TENSOR:
        tensor = quantizer(kind)(x)
        made = copy.deepcopy(tensor[:16])
        made.copy_(y := torch.randn(16, 256).bfloat16())
        assert torch.equal(made.dequantize(), values(y, kind))
        assert torch.equal(tensor.dequantize(), values(x, kind))


def test_new_tensors_follow_the_type_that_is_asked(tensor, kind):
    for made in (torch.empty_like(tensor), tensor.new_empty(16, 128)):
        assert type(made) is type(tensor)
        assert made.get_usages() == tensor.get_usages()
    for made in (
        torch.empty_like(tensor, dtype=torch.float32),
        tensor.new_empty(16, 128, dtype=torch.float32),
        tensor.new_zeros(16, 128, dtype=torch.float32),
    ):
        assert type(made) is torch.Tensor
        assert made.dtype is torch.float32
    zeros = tensor.new_zeros(16, 128)
    assert isinstance(zeros, te.QuantizedTensor) == (kind != "1d")
    assert float(zeros.float().abs().sum()) == 0
    made = torch.empty_like(tensor)
    made.copy_(tensor)
    holds(made, tensor.dequantize(), tensor)


def test_in_place_operations_quantise_again(tensor, kind, x):
    expected, version = values(x, kind), tensor._version
    other = torch.randn_like(x)
    for operation in (
        lambda t: t.add_(1),
        lambda t: t.mul_(0.5),
        lambda t: t.lerp_(other, 0.25),
        lambda t: t.addcdiv_(other, other.abs() + 1, value=-0.1),
        lambda t: t.fill_(3),
        lambda t: t.copy_(other),
        lambda t: t.zero_(),
        lambda t: torch.add(other, 1, out=t),
        lambda t: torch._foreach_mul_([t, other.clone()], 2.0),
    ):
        result = operation(tensor)
        plain = expected.clone()
        operation(plain)
        expected = values(plain, kind)
        holds(tensor, expected, tensor)
        assert result is tensor or result is None or isinstance(result, tuple | list)
        assert tensor._version > version
        version = tensor._version


def test_loops_of_python_in_place(tensor, kind, x):
    other = torch.randn(32, 256).bfloat16()
    expected = values(x, kind)
    for operation in (
        lambda t: t.apply_(lambda value: value / 2),
        lambda t: t.map_(other, lambda value, one: value + one),
        lambda t: t.map2_(other, other, lambda value, one, two: value - one + 2 * two),
    ):
        assert operation(tensor) is tensor
        expected = values(operation(expected), kind)
        holds(tensor, expected, tensor)
    tensor.map2_(tensor, tensor, lambda value, one, two: 1)
    holds(tensor, torch.ones_like(x), tensor)


def test_random_values_in_place(tensor, kind):
    torch.manual_seed(5)
    expected = torch.empty(32, 256, dtype=torch.bfloat16).normal_()
    torch.manual_seed(5)
    holds(tensor.normal_(), values(expected, kind), tensor)


def test_copies_between_tensors(kind, x):
    y = torch.randn(32, 256).bfloat16()
    one, other = quantizer(kind)(x), quantizer(kind)(y * 4)
    inner = parts(one)
    one.copy_(other)
    assert all(a is b for a, b in zip(parts(one), inner, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(parts(one)[::2], parts(other)[::2], strict=True))
    holds(one, values(y * 4, kind), other)
    for dtype in (torch.float32, torch.float16, torch.int32):
        plain = torch.zeros(32, 256, dtype=dtype)
        assert plain.copy_(one) is plain
        assert torch.equal(plain, values((y * 4).float(), kind).to(dtype))


def test_many_copies_at_once_are_those_one_by_one(kind, x):
    y = torch.randn(32, 256).bfloat16()

    def made():
        ones = [quantizer(kind)(x) for _ in range(4)]
        return [*ones, torch.zeros(32, 256), torch.zeros(32, 256)]

    sources = [y, y.float() * 3, y[0], quantizer(kind)(y * 4), quantizer(kind)(y), y]
    together, single = made(), made()
    with dispatch.record() as launches:
        torch._foreach_copy_(together[:2], sources[:2])
    assert not any("dequantize" in launch.name for launch in launches)
    torch._foreach_copy_(together[2:], sources[2:])
    for target, source in zip(single, sources, strict=True):
        target.copy_(source)
    for one, other in zip(together, single, strict=True):
        if isinstance(one, te.QuantizedTensor):
            holds(one, other.dequantize(), other)
        else:
            assert torch.equal(one, other)


def test_many_copies_of_any_type_in_any_order(kind, x):
    sources = [x.double(), (x * 4).int(), torch.arange(256.0).bfloat16()]
    together, single = ([quantizer(kind)(x * 2) for _ in sources] for _ in range(2))
    torch._foreach_copy_(together, sources)
    for target, source in zip(single, sources, strict=True):
        target.copy_(source)
    for one, source, other in zip(together, sources, single, strict=True):
        expected = source.bfloat16().expand(32, 256)
        holds(one, values(expected, kind), other)
        assert torch.equal(one.dequantize(), other.dequantize())
    plain, quantized = torch.full((32, 256), 2.0), quantizer(kind)(x)
    torch._foreach_copy_([quantized, plain], [plain, torch.full((32, 256), 7.0)])
    assert torch.equal(quantized.dequantize(), torch.full((32, 256), 2.0, dtype=torch.bfloat16))
    assert torch.equal(plain, torch.full((32, 256), 7.0))
    with pytest.raises(RuntimeError, match="Tensor lists must"):
        torch._foreach_copy_([quantized], [plain, plain])


def test_copies_to_a_part_write_nothing_of_the_others():
    one, other = (
        quantizer("current")(torch.ones(32, 256)),
        quantizer("current")(torch.ones(32, 256)),
    )
    with pytest.raises(QuantizedTensorError, match="a part of a tensor cannot be written"):
        torch._foreach_copy_([one, other[:16]], [torch.zeros(32, 256), torch.zeros(16, 256)])
    assert torch.equal(one.dequantize(), torch.ones(32, 256))


def test_bytes_are_copied_where_the_other_layout_can_be_made(kind, x):
    y = torch.randn(32, 256).bfloat16()
    one, rows = quantizer(kind)(x), quantizer(kind, columnwise=False)(y)
    one.copy_(rows)
    assert one.get_usages() == {"rowwise": True, "columnwise": True}
    expected = values(y, kind)
    holds(one, values(expected, "1d") if kind == "1d" else expected, one)
    rows.copy_(quantizer(kind)(x))
    assert rows.get_usages() == {"rowwise": True, "columnwise": False}
    holds(rows, values(x, kind), rows)


def test_copies_of_another_scaling_quantise_again(x):
    one = quantizer("current")(x)
    y = torch.randn(32, 256).bfloat16()
    for other in (quantizer("2d")(y), quantizer("current", fmt="e5m2")(y)):
        one.copy_(other)
        holds(one, values(other.dequantize(), "current"), one)
    with pytest.raises(QuantizedTensorError, match="same scaling"):
        one.copy_from_storage(quantizer("current", fmt="e5m2")(y))


def test_data_is_exchanged(tensor, kind, x):
    parameter, y = torch.nn.Parameter(tensor), torch.randn(32, 256).bfloat16()
    parameter.main_grad = marker = torch.ones(1)
    parameter.data = y
    holds(parameter, values(y, kind), tensor)
    holds(tensor, values(x, kind), tensor)
    assert parameter.requires_grad
    assert isinstance(parameter, torch.nn.Parameter)
    other = quantizer(kind)(x * 2)
    parameter.data = other
    assert parts(parameter) == parts(other)
    for fresh in (y.float(), torch.randn(4, 128).bfloat16()):
        parameter.data = fresh
        # Transformer Engine's class for blocks keeps its nominal type, unlike the other classes.
        dtype = fresh.dtype if kind in ("delayed", "current") else torch.bfloat16
        assert (parameter.dtype, parameter.shape) == (dtype, fresh.shape)
        holds(parameter, values(fresh, kind), tensor)
        assert parameter.requires_grad
        assert parameter.main_grad is marker
    with pytest.raises(DtypeError, match="expected a torch.Tensor"):
        parameter.data = 3


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}, {"capturable": False}])
def test_optimizers_step_on_quantised_parameters(kind, x, options):
    parameter = torch.nn.Parameter(quantizer(kind)(x))
    plain = torch.nn.Parameter(values(x, kind))
    grad = torch.randn_like(x)
    steps = (
        [torch.optim.SGD, torch.optim.Adam] if "capturable" not in options else [torch.optim.Adam]
    )
    for optimizer in steps:
        options = {} if optimizer is torch.optim.SGD and "capturable" in options else options
        mine, theirs = (optimizer([p], lr=0.125, **options) for p in (parameter, plain))
        parameter.grad, plain.grad = grad.clone(), grad.clone()
        before = parameter.dequantize().detach()
        mine.step()
        theirs.step()
        holds(parameter, values(plain, kind), parameter)
        # The fused optimizers of old versions of torch leave bfloat16 on the CPU unchanged.
        is_still = torch.equal(plain, before)
        assert torch.equal(before, parameter.dequantize()) == is_still
        with torch.no_grad():
            plain.copy_(values(plain, kind))
        for state in mine.state.values():
            assert all(type(part) is torch.Tensor for part in state.values() if part is not None)


def test_a_fused_step_enters_the_dispatch_once_and_quantises_by_one_launch(kind, monkeypatch):
    shapes = [(32, 256), (128, 128), (16, 48)]
    parameters = [torch.nn.Parameter(quantizer(kind)(torch.randn(s).bfloat16())) for s in shapes]
    optimizer = torch.optim.AdamW(parameters, lr=0.125, fused=True)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter.dequantize())
    optimizer.step()  # this step creates the states
    entries = []

    def noted(func, *rest):
        entries.append(func)
        return operations.dispatch(func, *rest)

    monkeypatch.setattr("te_fast.tensor.tensor.dispatch", noted)
    versions = [[part._version for part in (p, *p.get_data_tensors())] for p in parameters]
    with dispatch.record() as launches:
        optimizer.step()
    assert entries == [torch.ops.aten._fused_adamw_.default]
    names = [launch.name for launch in launches]
    assert sum("dequantize" in name for name in names) == len(shapes)
    # Blocks of 1x128 are quantised one by one.
    assert sum(name.startswith("cast") for name in names) == (3 if kind == "1d" else 1)
    for parameter, before in zip(parameters, versions, strict=True):
        after = [part._version for part in (parameter, *parameter.get_data_tensors())]
        assert all(new > old for new, old in zip(after, before, strict=True))


def test_keyword_arguments_and_tuples_are_written(tensor, kind, x):
    other = torch.randn_like(x)
    expected = values(tensor.dequantize() + other, kind)
    with torch.no_grad():
        torch.ops.aten.add.out(tensor.dequantize(), other, out=tensor)
    holds(tensor, expected, tensor)
    second = quantizer(kind)(x)
    wanted = [values(t.dequantize() * 2, kind) for t in (tensor, second)]
    with torch.no_grad():
        torch._foreach_mul_((tensor, second), 2.0)
    for one, value in zip((tensor, second), wanted, strict=True):
        holds(one, value, one)


def test_gradients_of_leaves_and_through_operations(tensor, kind):
    parameter = torch.nn.Parameter(tensor)
    grad = torch.randn(32, 256).bfloat16()
    (parameter * grad).sum().backward()
    assert torch.equal(parameter.grad, grad)
    assert type(parameter.grad) is torch.Tensor
    parameter.grad = None
    parameter.view(2, 16, 256).dequantize().mul(grad.view(2, 16, 256)).sum().backward()
    assert torch.equal(parameter.grad, grad)


def test_operators_that_take_quantised_tensors_as_they_are(tensor, kind):
    from te_fast.pytorch.quantized_tensor import _quantized_tensor_passthrough_ops as ops

    seen = []
    library = torch.library.Library(f"te_fast_test_{kind}", "DEF")
    library.define("look(Tensor x) -> Tensor")
    library.impl(
        "look", lambda x: seen.append(type(x)) or torch.zeros(1), "CompositeExplicitAutograd"
    )
    operator = getattr(torch.ops, f"te_fast_test_{kind}").look.default
    operator(tensor)
    ops.add(operator)
    try:
        operator(tensor)
    finally:
        ops.discard(operator)
    assert seen == [torch.Tensor, type(tensor)]


def test_a_parameter_is_one_again_after_pickling(kind, x):
    parameter = torch.nn.Parameter(quantizer(kind)(x))
    for weights_only, saved in ((True, parameter), (False, torch.nn.ParameterList([parameter]))):
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=weights_only)
        made = loaded if weights_only else loaded[0]
        assert isinstance(made, torch.nn.Parameter)
        assert made.requires_grad
        assert parts(made)[0].equal(parts(parameter)[0])
        made.data.copy_(x)  # the loaded parameter has a quantizer


def test_inner_tensors_for_compilers(tensor, kind, x):
    names, about = tensor.__tensor_flatten__()
    inner = {name: getattr(tensor, name) for name in names}
    made = type(tensor).__tensor_unflatten__(inner, about, tensor.shape, tensor.stride())
    holds(made, values(x, kind), tensor)
    assert made.get_usages() == tensor.get_usages()


def test_state_dicts(kind, x):
    class Module(torch.nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = torch.nn.Parameter(weight)

    y = torch.randn(32, 256).bfloat16()
    mine, plain = Module(quantizer(kind)(x)), Module(y)
    state = mine.state_dict()
    assert isinstance(state["weight"], te.QuantizedTensor)
    mine.load_state_dict(plain.state_dict())
    holds(mine.weight, values(y, kind), mine.weight)
    plain.load_state_dict(Module(quantizer(kind)(x)).state_dict())
    assert type(plain.weight) is torch.nn.Parameter
    assert torch.equal(plain.weight, values(x, kind))
    again = Module(quantizer(kind)(x))
    again.load_state_dict(mine.state_dict(), assign=True)
    assert isinstance(again.weight, torch.nn.Parameter)
    assert parts(again.weight) == parts(mine.weight)
    moved = Module(quantizer(kind)(x)).to("meta")
    assert isinstance(moved.weight, te.QuantizedTensor)
    assert moved.weight.requires_grad


def test_stale_numbers_never_come_from_collectives(tensor, tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        with pytest.raises(UnsupportedError, match="collective may end after"):
            torch.distributed.all_reduce(tensor)
    finally:
        torch.distributed.destroy_process_group()
