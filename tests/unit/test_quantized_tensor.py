"""Quantizers and quantised tensors against independent torch code: bytes, scales, layouts, saved data."""

import copy
import io
import pickle
import warnings

import pytest
import torch

import te_fast.pytorch as te
from quantized_tensors import FP8, KINDS, layout, parts, quantizer, scales_there, values
from reference import amax_of
from selection import sampled
from te_fast.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    QuantizedTensorError,
    ShapeError,
    UnsupportedError,
)
from te_fast.runtime.compiling import CAN_COMPILE

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = ((32, 256), (2, 16, 144), (7, 130), (300, 40), (5,), (0, 128))


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def sample(shape=(32, 256), dtype=torch.bfloat16):
    return torch.randn(shape).mul_(torch.rand(shape).mul_(8).exp_()).to(dtype)


def check_layouts(tensor, x, kind, fmt="e4m3", *, rowwise=True, columnwise=True):
    matrix = x.reshape(-1, x.shape[-1])
    row, row_scale, col, col_scale = parts(tensor)
    for there, got, scale, source, shape in (
        (rowwise, row, row_scale, matrix, x.shape),
        (columnwise, col, col_scale, matrix.t().contiguous(), (x.shape[-1], *x.shape[:-1])),
    ):
        if not there:
            assert got is None
            continue
        data, scales, _ = layout(source, kind, fmt)
        assert tuple(got.shape) == tuple(shape)
        assert torch.equal(got.reshape(source.shape), data)
        assert torch.equal(*scales_there(scale, scales))


# Quantising --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "shape", "fmt"), sampled(KINDS, SHAPES, FP8), indirect=["kind"])
def test_bytes_and_scales_are_those_of_the_formulas(kind, shape, fmt):
    for dtype in DTYPES:
        x = sample(shape, dtype)
        tensor = quantizer(kind, fmt=fmt)(x)
        if x.numel():
            check_layouts(tensor, x, kind, fmt)
        assert tensor.shape == x.shape
        assert tensor.dtype == dtype
        assert torch.equal(tensor.dequantize(), values(x, kind, fmt) if x.numel() else x)


@pytest.mark.parametrize("usage", [(True, False), (False, True)])
def test_one_layout_alone(kind, usage):
    x = sample((48, 272))
    tensor = quantizer(kind, rowwise=usage[0], columnwise=usage[1])(x)
    check_layouts(tensor, x, kind, rowwise=usage[0], columnwise=usage[1])
    assert tensor.get_usages() == {"rowwise": usage[0], "columnwise": usage[1]}
    expected = values(x, kind) if usage[0] else values(x.t().contiguous(), kind).t()
    assert torch.equal(tensor.dequantize(), expected)


def test_edge_values(kind):
    x = torch.zeros(16, 128, dtype=torch.float32)
    numbers = [-0.0, 1e-45, 1e-40, 448.0, -57344.0, float("inf"), -float("inf"), float("nan")]
    x.view(-1)[: len(numbers)] = torch.tensor(numbers)
    tensor = quantizer(kind)(x)
    check_layouts(tensor, x, kind)
    result, expected = tensor.dequantize(), values(x, kind)
    assert torch.allclose(result, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(result.signbit() & ~x.isnan(), expected.signbit() & ~x.isnan())


def test_delayed_scaling_raises_the_maximum_and_current_scaling_has_none():
    x, made = sample(), quantizer("delayed")
    made(x)
    assert torch.equal(made.amax, amax_of(x).reshape(1))
    made(x / 2)
    assert torch.equal(made.amax, amax_of(x).reshape(1))
    made.calibrate(x / 2)
    assert torch.equal(made.amax, amax_of(x / 2).reshape(1))


def test_the_inverse_scale_is_that_of_these_bytes():
    x, made = sample(), quantizer("delayed")
    tensor = made(x)
    made.scale.fill_(7.0)
    assert torch.equal(tensor.dequantize(), values(x, "delayed"))


def test_quantising_into_what_is_there(kind):
    made, x, y = quantizer(kind), sample(), sample()
    tensor = made(x)
    before = parts(tensor)
    version = tensor._version
    assert tensor.quantize_(y) is tensor
    check_layouts(tensor, y, kind)
    assert all(one is other for one, other in zip(parts(tensor), before, strict=True))
    assert tensor._version > version
    assert made.quantize(x, out=tensor) is tensor
    check_layouts(tensor, x, kind)


def test_layouts_follow_the_quantizer(kind):
    x, y = sample(), sample()
    tensor = quantizer(kind)(x)
    quantizer(kind, columnwise=False).update_quantized(y, tensor)
    check_layouts(tensor, y, kind, columnwise=False)
    quantizer(kind).update_quantized(x, tensor)
    check_layouts(tensor, x, kind)


def test_the_flag_that_leaves_everything_as_it_is(kind):
    for shape in ((32, 256), (9, 130)):
        x, y = sample(shape), sample(shape)
        tensor = quantizer(kind)(x)
        tensor.quantize_(y, noop_flag=torch.ones(1))
        check_layouts(tensor, x, kind)
        tensor.quantize_(y, noop_flag=torch.zeros(1))
        check_layouts(tensor, y, kind)


def test_memory_of_others_that_kernels_cannot_write(kind):
    x, y = sample((32, 256)), sample((32, 256))
    tensor = quantizer(kind)(x)
    flat = torch.zeros(32 * 256 + 3, dtype=torch.uint8)
    place = flat[3:].view(32, 256)
    place.copy_(tensor._value.row)
    tensor._value.row = place
    tensor.quantize_(y)
    check_layouts(tensor, y, kind)
    assert tensor._value.row is place
    assert flat[:3].sum() == 0


def test_gradients_pass_unchanged(kind):
    x = sample(dtype=torch.float32).requires_grad_()
    tensor = quantizer(kind)(x)
    grad = torch.randn(32, 256)
    tensor.dequantize(dtype=torch.bfloat16).float().mul(grad).sum().backward()
    assert torch.equal(x.grad, grad.bfloat16().float())
    with torch.no_grad():
        assert not quantizer(kind)(x).requires_grad


def test_nominal_types(kind):
    x = sample()
    named = quantizer(kind).quantize(x, dtype=torch.float32)
    assert named.dtype is torch.float32
    tensor = quantizer(kind)(x)
    other = tensor.to_dtype(torch.float16)
    assert other.dtype is torch.float16
    assert parts(other)[0] is parts(tensor)[0]
    expected = values(x.float(), kind)
    for dtype, result in (
        (torch.float32, tensor.float()),
        (torch.float16, tensor.half()),
        (torch.bfloat16, tensor.bfloat16()),
    ):
        assert type(result) is torch.Tensor
        assert torch.equal(result, expected.to(dtype))


def test_internal_quantizers_make_storages(kind):
    made, x = quantizer(kind), sample()
    made.internal = True
    storage = made(x)
    assert not isinstance(storage, torch.Tensor)
    assert isinstance(storage, te.QuantizedTensorStorage)
    check_layouts(storage, x, kind)
    assert torch.equal(storage.dequantize(dtype=torch.bfloat16), values(x, kind))
    assert storage.size() == x.shape
    assert storage.device == x.device
    storage.quantize_(x * 2)
    check_layouts(storage, x * 2, kind)


def test_empty_tensors_have_the_layouts_of_the_usages(kind):
    made = quantizer(kind, columnwise=False)
    tensor = made.make_empty((16, 128), dtype=torch.bfloat16, device="cpu", requires_grad=True)
    assert tensor.requires_grad
    assert tensor.get_usages() == {"rowwise": True, "columnwise": False}
    with torch.no_grad():
        tensor.copy_(x := sample((16, 128)))
    check_layouts(tensor, x, kind, columnwise=False)


def test_scale_shapes_are_those_of_the_page():
    shapes = {
        ((300, 200), 2, False): (3, 4),
        ((300, 200), 2, True): (2, 4),
        ((300, 200), 1, False): (2, 300),
        ((301, 200), 1, False): (2, 304),
        ((300, 202), 1, True): (3, 204),
        ((2, 3, 5, 700), 2, False): (1, 8),
    }
    for (shape, dim, columnwise), expected in shapes.items():
        made = quantizer(f"{dim}d")
        assert made.get_scale_shape(shape, columnwise) == expected
    assert made.get_columnwise_shape((2, 3, 5)) == (5, 2, 3)
    assert made.is_quantizable(torch.empty(256, 128))
    assert not made.is_quantizable(torch.empty(100, 128))


# The other layout --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(32, 256), (3, 10, 144), (7, 130)])
def test_the_column_layout_is_made_of_the_row_layout(shape):
    for kind in ("delayed", "current", "2d"):
        x = sample(shape)
        tensor = quantizer(kind, columnwise=False)(x)
        tensor.update_usage(columnwise_usage=True)
        check_layouts(tensor, x, kind)
        tensor.update_usage(rowwise_usage=False)
        assert tensor.get_usages() == {"rowwise": False, "columnwise": True}
        assert torch.equal(tensor.dequantize(), values(x, kind))
        with pytest.raises(QuantizedTensorError, match="row layout is gone"):
            tensor.update_usage(rowwise_usage=True)
        with pytest.raises(QuantizedTensorError, match="one layout must stay"):
            tensor.update_usage(rowwise_usage=False, columnwise_usage=False)


def test_column_blocks_of_1x128_have_scales_of_their_own():
    tensor = quantizer("1d", columnwise=False)(sample())
    with pytest.raises(QuantizedTensorError, match="quantise with rowwise and columnwise"):
        tensor.update_usage(columnwise_usage=True)


def test_every_write_of_the_row_layout_makes_the_column_layout_stale():
    for kind in ("delayed", "2d"):
        x, y = sample(), sample()
        other = quantizer(kind, columnwise=False)(y)
        for write in (
            lambda t, o: setattr(t._value, "row", o._value.row.clone()),
            lambda t, o: t._value.row.copy_(o._value.row),
            lambda t, o: t.detach()._value.row.copy_(o._value.row),
            lambda t, o: t.get_data_tensors()[0].view(-1).copy_(o._value.row.view(-1)),
        ):
            tensor = quantizer(kind)(x)
            write(tensor, other)
            assert tensor.get_usages() == {"rowwise": True, "columnwise": False}
            tensor._value.row_scale.copy_(other._value.row_scale)
            tensor.update_usage(columnwise_usage=True)
            check_layouts(tensor, y, kind)


def test_a_write_through_one_tensor_is_seen_by_those_that_share_its_bytes():
    x, y = sample(), sample()
    tensor = quantizer("current")(x)
    other = tensor.detach()
    other._quantizer.set_usage(columnwise=False)
    other.quantize_(y)
    assert other.get_usages()["columnwise"] is False
    assert tensor._transpose_invalid
    tensor._create_transpose()
    check_layouts(tensor, y, "current")


def test_the_fields_of_transformer_engine():
    x = sample()
    tensor = quantizer("current")(x)
    assert tensor._data is parts(tensor)[0]
    assert tensor._transpose is parts(tensor)[2]
    assert tensor._scale_inv.shape == (1,)
    assert tensor._fp8_dtype is te.DType.kFloat8E4M3
    assert tensor._transpose_invalid is False
    tensor._reset_caches()
    assert tensor._transpose_invalid is True
    assert tensor._transpose is not None
    tensor.remove_caches()
    assert tensor._transpose is None
    block = quantizer("2d")(x)
    assert block._is_2D_scaled
    assert not quantizer("1d")(x)._is_2D_scaled
    assert block._rowwise_data is parts(block)[0]
    assert block._columnwise_scale_inv is parts(block)[3]
    for made in (tensor, block):
        again = type(made)(shape=made.shape, dtype=made.dtype, **made.get_metadata())
        assert torch.equal(again.dequantize(), values(x, "current" if made is tensor else "2d"))
        assert made._quantizer is not again._quantizer


# Saving for backward, copies, pickles ------------------------------------------------------------


def test_storages_are_taken_apart_and_put_together(kind):
    made, x = quantizer(kind), sample()
    made.internal = True
    storage, plain = made(x), torch.ones(3)
    made.internal = False
    tensor = made(x)
    saved, objects = te.prepare_for_saving(storage, None, plain, tensor)
    assert all(part is None or isinstance(part, torch.Tensor) for part in saved)
    assert parts(storage) == (None, None, None, None)
    back, rest = te.restore_from_saved(objects, [*saved, plain], return_saved_tensors=True)
    assert back[0] is storage
    assert back[1] is None
    assert back[2] is plain
    assert back[3] is tensor
    assert len(rest) == 1
    assert rest[0] is plain
    check_layouts(storage, x, kind)
    assert storage.get_usages() == {"rowwise": True, "columnwise": True}


def test_contexts_of_autograd_let_go_of_their_objects():
    class Context:
        tensor_objects = None
        saved_tensors = ()

    with pytest.raises(AttributeError, match="tensor_objects"):
        te.restore_from_func_ctx(Context())
    made = quantizer("current")
    made.internal = True
    storage, context = made(x := sample()), Context()
    context.saved_tensors, context.tensor_objects = te.prepare_for_saving(storage)
    assert te.restore_from_func_ctx(context)[0] is storage
    assert context.tensor_objects is None
    check_layouts(storage, x, "current")


def test_deep_copies_share_nothing(kind):
    x = sample()
    parameter = torch.nn.Parameter(quantizer(kind)(x))
    parameter.main_grad, parameter.grad = torch.ones(2), torch.ones_like(parameter)
    made = copy.deepcopy({"a": parameter, "b": parameter})
    assert made["a"] is made["b"]
    assert isinstance(made["a"], torch.nn.Parameter)
    copied = made["a"]
    assert copied.requires_grad
    assert torch.equal(copied.main_grad, torch.ones(2))
    assert copied.grad is not parameter.grad
    assert torch.equal(copied.grad, parameter.grad)
    with torch.no_grad():
        copied.copy_(x * 2)
    check_layouts(parameter, x, kind)
    check_layouts(copied, x * 2, kind)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_a_checkpoint_in_the_background_has_the_values_of_its_call(kind, tmp_path):
    """Torch copies the attributes of tensors one by one before it writes them."""
    import torch.distributed.checkpoint as dcp

    tensor = quantizer(kind)(sample())
    kept = tensor.dequantize()
    saved = dcp.async_save({"weight": tensor}, checkpoint_id=tmp_path)
    if CAN_COMPILE:  # older torch copies no tensor that is on the CPU
        tensor.quantize_(sample())
    saved.result()
    dcp.load({"weight": tensor}, checkpoint_id=tmp_path)
    assert torch.equal(tensor.dequantize(), kept)


@pytest.mark.parametrize("weights_only", [True, False])
def test_saved_tensors_are_loaded_without_code_of_theirs(kind, weights_only):
    x = sample()
    tensor = torch.nn.Parameter(quantizer(kind)(x))
    stream = io.BytesIO()
    torch.save({"w": tensor}, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=weights_only)["w"]
    assert type(loaded) is type(tensor)
    assert loaded.dtype is tensor.dtype
    assert torch.equal(loaded.dequantize(), values(x, kind))
    loaded.quantize_(x * 2)
    assert torch.equal(loaded.dequantize(), values(x * 2, kind))
    again = pickle.loads(pickle.dumps(tensor))
    assert torch.equal(again.dequantize(), values(x, kind))


def test_streams_of_transformer_engine_have_no_quantizer():
    x = sample()
    tensor = quantizer("current")(x)
    from te_fast.pytorch.tensor.float8_tensor import _make_float8_tensor_in_reduce_ex as rebuild

    made = rebuild(
        tensor._data, tensor._fp8_dtype, tensor._scale_inv, tensor.dtype, tensor.shape, None
    )
    assert torch.equal(made.dequantize(), values(x, "current"))
    with pytest.raises(QuantizedTensorError, match="has none"):
        made.quantize_(x)
    made.copy_(quantizer("current")(x * 2))
    assert torch.equal(made.dequantize(), values(x * 2, "current"))


def test_quantizers_are_compared_by_what_they_make():
    for kind in ("current", "2d", "1d"):
        one, other = quantizer(kind), quantizer(kind)
        assert one == other
        assert hash(one) == hash(other)
        assert one.copy() == one
        other.set_usage(columnwise=False)
        assert one != other
    delayed = quantizer("delayed")
    made = delayed.copy()
    assert made != delayed
    assert made.scale is delayed.scale
    assert made.amax is delayed.amax


def test_compatible_recipes():
    from te_fast.common import recipe

    classes = {
        "delayed": recipe.DelayedScaling,
        "current": recipe.Float8CurrentScaling,
        "2d": recipe.Float8BlockScaling,
        "1d": recipe.Float8BlockScaling,
    }
    for kind, expected in classes.items():
        assert quantizer(kind)._get_compatible_recipe() is expected
        assert quantizer(kind).is_requantization_safe() == (kind != "delayed")
        assert quantizer(kind).supports_only_rowwise_all_gather() == (
            kind in ("delayed", "current")
        )


# Bad input ---------------------------------------------------------------------------------------


def test_what_does_not_fit_changes_nothing(kind):
    x = sample()
    tensor = quantizer(kind)(x)
    other = quantizer("2d" if kind in ("delayed", "current") else "current")
    cases = (
        (lambda: tensor.quantize_(sample((32, 128))), ShapeError),
        (lambda: tensor.quantize_(torch.ones(32, 256, dtype=torch.int32)), DtypeError),
        (lambda: other.update_quantized(x, tensor), QuantizedTensorError),
        (lambda: quantizer(kind).quantize(3), (DtypeError, AttributeError)),
        (lambda: quantizer(kind, rowwise=False, columnwise=False)(x), ShapeError),
        (lambda: tensor.dequantize(dtype=torch.int8), DtypeError),
        (lambda: tensor.get_data_tensors(rowwise_data=False, columnwise_data=False), ArgumentError),
    )
    for call, error in cases:
        with pytest.raises(error):
            call()
        check_layouts(tensor, x, kind)


def test_constructors_refuse_what_they_cannot_mean():
    with pytest.raises(DtypeError, match="kFloat8E4M3"):
        te.Float8CurrentScalingQuantizer(te.DType.kBFloat16, "cpu")
    with pytest.raises(ArgumentError, match="element type"):
        te.Float8CurrentScalingQuantizer("e4m3", "cpu")
    with pytest.raises(ArgumentError, match="block_scaling_dim"):
        te.Float8BlockQuantizer(FP8["e4m3"], rowwise=True, columnwise=True, block_scaling_dim=3)
    with pytest.warns(DeprecationWarning, match="no effect"):
        te.Float8CurrentScalingQuantizer(FP8["e4m3"], "cpu", use_existing_amax=True)
    tensor = quantizer("current")(sample())
    with pytest.raises(QuantizedTensorError, match="fake_dtype"):
        te.Float8Tensor(
            tensor.shape,
            torch.float32,
            tensor._data,
            tensor._scale_inv,
            FP8["e4m3"],
            fake_dtype=torch.bfloat16,
        )
    for call in (quantizer("current").onnx_quantize, quantizer("current").onnx_dequantize):
        with pytest.raises(UnsupportedError):
            call(sample())


def test_another_quantizer():
    tensor = quantizer("delayed")(x := sample())
    tensor._quantizer = None
    with pytest.raises(QuantizedTensorError, match="no quantizer"):
        tensor.update_quantizer(quantizer("delayed"))
    tensor = quantizer("delayed")(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor.update_quantizer(quantizer("delayed"))
        with pytest.raises(UserWarning, match="may affect"):
            tensor.update_quantizer(quantizer("current"))


def test_numbers_of_types():
    assert te.DType.cast(torch.float8_e5m2) is te.DType.kFloat8E5M2
    assert int(te.DType.kBFloat16) == 6
    assert te.DType.cast(7) is te.DType.kFloat8E4M3
    from te_fast.pytorch.constants import TE_DType, TE_DType_To_Torch

    assert all(TE_DType[TE_DType_To_Torch[kind]] is kind for kind in TE_DType_To_Torch)


def test_scales_of_another_device():
    made = quantizer("delayed")
    made.scale = made.scale.to("meta")
    with pytest.raises((DeviceError, ShapeError, DtypeError)):
        made(sample())
