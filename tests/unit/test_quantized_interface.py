"""The interface of quantised tensors that programs for Transformer Engine use, beside the values."""

import pickle

import pytest
import torch

import te_fast.pytorch as te
from selection import every_pair, sampled
from te_fast.errors import (
    ArgumentError,
    DtypeError,
    QuantizedTensorError,
    RanksError,
    ShapeError,
    UnsupportedError,
)
from te_fast.pytorch.tensor.utils import clear_columnwise_cache

E4M3 = te.DType.kFloat8E4M3
KINDS = ("delayed", "current", "1d", "2d")


def quantizer(kind):
    if kind == "delayed":
        return te.Float8Quantizer(torch.full((1,), 3.0), torch.zeros(1), E4M3)
    if kind == "current":
        return te.Float8CurrentScalingQuantizer(E4M3, "cpu")
    return te.Float8BlockQuantizer(
        E4M3, rowwise=True, columnwise=True, block_scaling_dim=int(kind[0])
    )


def sample(shape=(256, 384), dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(dtype)


def storage(kind, x):
    made = quantizer(kind)
    made.internal = True
    return made(x)


def bytes_and_scales(tensor):
    return {name: getattr(tensor, name) for name in type(tensor)._INNER_TENSORS}


@pytest.mark.parametrize("kind", KINDS)
def test_a_storage_has_a_shape(kind):
    x = sample((2, 128, 384))
    made = storage(kind, x)
    assert made.shape == x.shape
    assert isinstance(made.shape, torch.Size)
    if kind != "1d":
        made.update_usage(rowwise_usage=False)
        assert made.shape == x.shape


@pytest.mark.parametrize("kind", KINDS)
def test_a_storage_is_viewed_in_another_shape(kind):
    x = sample()
    made = storage(kind, x)
    viewed = made.view(torch.Size((2, 128, 384)))
    assert type(viewed) is type(made)
    assert viewed.shape == (2, 128, 384)
    assert torch.equal(viewed.dequantize(), made.dequantize().view(2, 128, 384))
    if kind.endswith("d") and kind != "delayed":
        for size in ((768, 128), (256 * 384,)):
            with pytest.raises(UnsupportedError, match="cuts the blocks"):
                made.view(size)


@pytest.mark.parametrize(
    ("kind", "layouts", "shape"),
    sampled(
        KINDS,
        [(True, True), (True, False), (False, True)],
        [(256, 384), (2, 100, 130)],
        quick=every_pair,
    ),
)
def test_specs_are_the_inner_tensors_that_a_quantizer_makes(kind, layouts, shape):
    maker = quantizer(kind)
    maker.set_usage(rowwise=layouts[0], columnwise=layouts[1])
    specs = maker.inner_tensor_specs(shape)
    made = {k: v for k, v in bytes_and_scales(maker(sample(shape))).items() if v is not None}
    assert specs == {name: (tuple(inner.shape), inner.dtype) for name, inner in made.items()}
    assert list(specs) == list(made)
    allocated = maker.alloc_tensors(shape, device="cpu")
    assert {name: (tuple(one.shape), one.dtype) for name, one in allocated.items()} == specs


def test_a_column_layout_has_the_last_dimension_first():
    assert quantizer("current").get_columnwise_shape((2, 3, 4)) == [4, 2, 3]
    assert quantizer("delayed").get_columnwise_shape(torch.Size((5, 6))) == [6, 5]
    assert quantizer("1d").get_columnwise_shape((2, 3, 4)) == (4, 2, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_like_another_has_another_nominal_type(kind):
    tensor = quantizer(kind)(sample())
    made = type(tensor).make_like(tensor, dtype=torch.float32, requires_grad=True)
    assert made.dtype is torch.float32
    assert made.requires_grad
    assert torch.equal(made.dequantize(), tensor.dequantize(dtype=torch.float32))


def test_a_tensor_like_another_has_the_shape_of_its_bytes():
    tensor = quantizer("current")(sample())
    made = te.Float8Tensor.make_like(tensor, data=tensor._data[:128].clone())
    assert made.shape == (128, 384)
    assert made._transpose is None
    assert torch.equal(made.dequantize(), tensor.dequantize()[:128])
    turned = tensor._transpose[:, :128].contiguous()
    both = te.Float8Tensor.make_like(tensor, data=tensor._data[:128].clone(), data_transpose=turned)
    assert both.get_usages() == {"rowwise": True, "columnwise": True}


@pytest.mark.parametrize("kind", KINDS)
def test_the_nominal_type_can_be_set(kind):
    tensor = quantizer(kind)(sample()).requires_grad_()
    expected = tensor.dequantize(dtype=torch.float32)
    tensor._dtype = torch.float32
    assert tensor.dtype is tensor._dtype is torch.float32
    assert tensor.requires_grad
    assert torch.equal(tensor.dequantize(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_that_is_taken_apart_comes_back_as_a_tensor(kind):
    tensor = quantizer(kind)(sample())
    expected = tensor.dequantize()
    parts, rest = tensor.prepare_for_saving()
    assert type(rest) is type(tensor)
    assert rest.shape == tensor.shape
    assert torch.equal(tensor.dequantize(), expected)  # the user's own tensor stays whole
    with pytest.raises(RuntimeError, match="no data"):
        rest.dequantize()
    assert rest.restore_from_saved([*parts, None]) == [None]
    assert torch.equal(rest.dequantize(), expected)
    assert rest.get_usages() == {"rowwise": True, "columnwise": True}


@pytest.mark.parametrize("kind", ["1d", "2d"])
def test_data_of_blocks_keeps_the_nominal_type(kind):
    tensor = quantizer(kind)(sample())
    tensor.data = sample(dtype=torch.float32) * 2
    assert tensor.dtype is torch.bfloat16
    expected = quantizer(kind)(sample(dtype=torch.float32) * 2)
    assert torch.equal(tensor._rowwise_data, expected._rowwise_data)
    assert torch.equal(tensor.dequantize(dtype=torch.float32), expected.dequantize())


def test_data_of_one_scale_takes_over_the_nominal_type():
    tensor = quantizer("current")(sample())
    tensor.data = sample(dtype=torch.float32)
    assert tensor.dtype is torch.float32


def test_a_column_layout_can_be_said_to_be_stale():
    tensor = quantizer("current")(sample())
    about = tensor.get_metadata() | {"data_transpose": torch.zeros_like(tensor._transpose)}
    made = te.Float8Tensor(shape=tensor.shape, dtype=tensor.dtype, transpose_invalid=True, **about)
    assert made._transpose_invalid
    assert not made.get_usages()["columnwise"]
    made.update_usage(columnwise_usage=True)
    assert torch.equal(made._transpose, tensor._transpose)
    about["fake_dtype"] = torch.float32
    assert te.Float8TensorStorage(transpose_invalid=True, **about)._transpose_invalid


@pytest.mark.parametrize("kind", KINDS)
def test_a_column_cache_can_be_cleared(kind):
    tensor = quantizer(kind)(sample())
    clear_columnwise_cache(tensor)
    assert tensor.get_usages() == {"rowwise": True, "columnwise": False}
    clear_columnwise_cache(torch.ones(2))


@pytest.mark.parametrize("kind", ["current", "2d"])
def test_older_pickles_name_a_method_of_the_class(kind):
    tensor = quantizer(kind)(sample())

    class Old:
        def __reduce__(self):
            fields = tensor.__reduce_ex__(2)[1]
            return type(tensor)._make_in_reduce_ex, fields[: 5 if kind == "current" else 10]

    assert torch.equal(pickle.loads(pickle.dumps(Old())).dequantize(), tensor.dequantize())


def test_modules_have_the_names_of_transformer_engine():
    assert te.tensor.cast_master_weights_to_fp8 is te.tensor.utils.cast_master_weights_to_fp8
    assert te.tensor.replace_raw_data is te.tensor.utils.replace_raw_data
    known = te.tensor.get_all_tensor_types()
    assert {torch.Tensor, torch.nn.Parameter, te.Float8Tensor, te.Float8BlockwiseQTensor} <= {
        *known
    }


def test_errors_are_those_of_transformer_engine():
    one, block = quantizer("current")(sample()), quantizer("2d")(sample())
    for first, second in ((one, block), (block, one)):
        with pytest.raises(TypeError, match="same class") as caught:
            first.copy_from_storage(second)
        assert isinstance(caught.value, DtypeError)
    with pytest.raises(AssertionError, match=r"torch\.uint8"):
        quantizer("current").create_tensor_from_data(torch.ones(16, 16))
    with pytest.raises(ValueError, match="99") as caught:
        te.DType.cast(99)
    assert isinstance(caught.value, ArgumentError)
    one.update_usage(rowwise_usage=False)
    with pytest.raises(NotImplementedError, match="own shape"):
        one.view(2, 128, 384)


@pytest.mark.parametrize("kind", ["1d", "2d"])
def test_blocks_are_seen_in_another_type_as_plain_values(kind):
    tensor = quantizer(kind)(sample())
    seen = tensor.view(torch.uint8)
    assert type(seen) is torch.Tensor
    assert torch.equal(seen, tensor.dequantize().view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other", [torch.float32, torch.int32, torch.bfloat16])
def test_data_that_are_no_bytes_are_refused(kind, other):
    tensor = quantizer(kind)(sample())
    expected = tensor.dequantize()
    wide = torch.zeros(256, 384, dtype=other)
    about = tensor.get_metadata()
    name = "data" if "data" in about else "rowwise_data"
    with pytest.raises(DtypeError, match=r"torch\.uint8"):
        type(tensor)(shape=tensor.shape, dtype=tensor.dtype, **about | {name: wide})
    for name in ("_data", "_transpose") if hasattr(tensor, "_data") else ("_rowwise_data",):
        with pytest.raises(DtypeError, match=r"torch\.uint8"):
            setattr(tensor, name, wide)
    assert torch.equal(tensor.dequantize(), expected)


@pytest.mark.parametrize("count", [3, 5, 1000])
def test_scales_that_do_not_divide_the_values_are_refused(count):
    tensor = quantizer("current")(sample())
    about = tensor.get_metadata() | {"fp8_scale_inv": torch.ones(count), "data_transpose": None}
    with pytest.raises(ValueError, match=f"stack of {count} values"):
        te.Float8Tensor(shape=tensor.shape, dtype=tensor.dtype, **about)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("internal", [False, True])
def test_metadata_and_inner_tensors_make_a_tensor(kind, internal):
    maker = quantizer(kind)
    maker.internal = internal
    x = sample()
    made = maker(x)
    about = maker.storage_metadata(torch.bfloat16)
    names = {
        "_data": "data",
        "_transpose": "data_transpose",
        "_scale_inv": "fp8_scale_inv",
    }
    tensors = {
        names.get(name, name.removeprefix("_")): getattr(made, name)
        for name in maker.inner_tensor_specs(x.shape)
    }
    outside = {} if internal else {"shape": x.shape, "dtype": x.dtype}
    other = about["cls"](**outside, **tensors, **about["nontensor_kwargs"])
    assert type(other) is type(made)
    assert torch.equal(other.dequantize(), made.dequantize())


def test_a_quantizer_without_bytes_has_no_metadata():
    with pytest.raises(UnsupportedError, match="storage_metadata"):
        te.IdentityQuantizer().storage_metadata(torch.bfloat16)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_tensor_is_not_quantised(kind):
    sparse = torch.eye(16).to_sparse()
    for write in (quantizer(kind), quantizer(kind)(sample()).quantize_):
        with pytest.raises(DtypeError, match=r"got torch\.sparse_coo; give its to_dense"):
            write(sparse)
    with pytest.raises(DtypeError, match=r"expected a torch.Tensor, got list"):
        quantizer(kind)([1.0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("internal", [False, True])
def test_what_is_no_quantizer_is_not_taken(kind, internal):
    maker = quantizer(kind)
    maker.internal = internal
    made = maker(sample())
    outside = {} if internal else {"shape": made.shape, "dtype": made.dtype}
    with pytest.raises(DtypeError, match="must be a Quantizer or None, got str"):
        type(made)(**outside, **made.get_metadata() | {"quantizer": "x"})


@pytest.mark.parametrize("epsilon", ["a", -1.0, float("nan"), None])
def test_a_least_maximum_is_a_number(epsilon):
    with pytest.raises(ArgumentError, match="amax_epsilon must be a number of 0 or more"):
        te.Float8CurrentScalingQuantizer(E4M3, "cpu", amax_epsilon=epsilon)
    with pytest.raises(ArgumentError, match="amax_epsilon must be a number of 0 or more"):
        te.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, amax_epsilon=epsilon)


def test_maxima_of_ranks_need_a_group():
    maker = te.Float8CurrentScalingQuantizer(E4M3, "cpu", with_amax_reduction=True)
    with pytest.raises(RanksError, match="needs a process group"):
        maker(sample())


@pytest.mark.parametrize("kind", KINDS)
def test_values_that_do_not_expand_are_not_copied(kind):
    made = quantizer(kind)(sample())
    expected = made.dequantize()
    with pytest.raises(QuantizedTensorError, match=r"shape \[256, 384\].* got \[3, 3\]"):
        made.copy_(torch.zeros(3, 3))
    assert torch.equal(made.dequantize(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_another_size_are_refused(kind):
    made = quantizer(kind)(sample())
    fields = made.get_metadata()
    expected = made.dequantize()
    for name in [name for name in type(made)._INNER_TENSORS if "scale" not in name]:
        with pytest.raises(ShapeError, match="must be of 98304 bytes"):
            setattr(made, name, torch.zeros(3, 3, dtype=torch.uint8))
        setattr(made, name, getattr(made, name).clone())
    assert torch.equal(made.dequantize(), expected)
    for name, value in fields.items():
        if isinstance(value, torch.Tensor) and value.dtype is torch.uint8:
            with pytest.raises(ShapeError, match="must be of 98304 bytes"):
                type(made)(made.shape, made.dtype, **fields | {name: value[:8]})


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_the_same_size_and_none_are_taken(kind):
    made = quantizer(kind)(sample())
    row, column = (
        type(made)._INNER_TENSORS[0],
        "_transpose" if kind in ("delayed", "current") else "_columnwise_data",
    )
    expected, flat = made.dequantize(), getattr(made, row).clone().view(-1)
    setattr(made, column, None)
    setattr(made, row, None)
    setattr(made, row, flat)
    assert getattr(made, row) is flat
    setattr(made, row, flat.view(made.shape))
    assert torch.equal(made.dequantize(), expected)
