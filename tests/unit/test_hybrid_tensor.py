"""Tensors of two quantised values, beside the values that each quantizer makes alone."""

import copy
import io

import pytest
import torch

import te_fast.pytorch as te
from recipes import RECIPES
from te_fast.errors import QuantizedTensorError, UnsupportedError
from te_fast.pytorch.tensor.storage.hybrid_tensor_storage import HybridQuantizedTensorStorage
from te_fast.pytorch.tensor.utils import clear_columnwise_cache

E4M3, E5M2 = te.DType.kFloat8E4M3, te.DType.kFloat8E5M2
QUANTIZERS = {
    "e4m3": lambda: te.Float8CurrentScalingQuantizer(E4M3, "cpu"),
    "e5m2": lambda: te.Float8CurrentScalingQuantizer(E5M2, "cpu"),
    "block": lambda: te.Float8BlockQuantizer(
        E4M3, rowwise=True, columnwise=True, block_scaling_dim=2
    ),
    "identity": te.IdentityQuantizer,
}
PAIRS = [("e4m3", "identity"), ("identity", "e5m2"), ("block", "e4m3"), ("identity", "identity")]


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def hybrid(rows, columns, **options):
    return te.HybridQuantizer(
        rowwise_quantizer=QUANTIZERS[rows](), columnwise_quantizer=QUANTIZERS[columns](), **options
    )


def values(name, x, **usage):
    """What a quantizer alone makes of the values."""
    quantizer = QUANTIZERS[name]()
    quantizer.set_usage(**({"rowwise": True, "columnwise": False} | usage))
    return quantizer(x).dequantize()


def both(tensor):
    return [one.dequantize() for one in (tensor.rowwise_sub_storage, tensor.columnwise_sub_storage)]


def same(tensor, *expected):
    for one, other in zip(both(tensor), expected, strict=True):
        assert torch.equal(one, other)


@pytest.fixture(params=PAIRS, ids="-".join)
def pair(request):
    return request.param


def test_each_direction_has_its_quantizers_values(pair):
    x = randn(128, 256)
    tensor = hybrid(*pair)(x)
    assert (type(tensor), tensor.shape, tensor.dtype) == (
        te.HybridQuantizedTensor,
        x.shape,
        x.dtype,
    )
    same(tensor, values(pair[0], x), values(pair[1], x))
    assert torch.equal(tensor.dequantize(), values(pair[0], x))
    assert tensor.dequantize(dtype=torch.bfloat16).dtype == torch.bfloat16
    assert tensor.get_usages() == {"rowwise": True, "columnwise": True}
    parts = (tensor.rowwise_sub_storage, tensor.columnwise_sub_storage)
    expected = [data for one in parts for data in one.get_data_tensors()]
    assert all(one is other for one, other in zip(tensor.get_data_tensors(), expected, strict=True))


def test_columns_may_be_made_of_the_rows_values():
    x = randn(32, 64)
    quantizer = hybrid("e4m3", "identity", columnwise_source="rowwise_dequantized")
    rows = values("e4m3", x)
    same(quantizer(x), rows, rows)
    quantizer.set_usage(rowwise=False)
    tensor = quantizer(x)
    assert tensor.rowwise_sub_storage is None
    assert torch.equal(tensor.dequantize(), rows)


def test_directions_that_are_not_used_are_not_made(pair):
    quantizer, x = hybrid(*pair), randn(32, 64)
    for rowwise in (False, True):
        for columnwise in (False, True):
            quantizer.set_usage(rowwise=rowwise, columnwise=columnwise)
            for made in (quantizer(x), quantizer.make_empty(x.shape, device="cpu")):
                assert made.get_usages() == {"rowwise": rowwise, "columnwise": columnwise}
                assert made.shape == x.shape


def test_updates_write_the_directions_that_are_used(pair):
    quantizer, x, y = hybrid(*pair), randn(32, 64), 8 * randn(32, 64, seed=1)
    tensor = quantizer(x.clone())
    former = [one.clone() for one in both(tensor)]
    quantizer.update_quantized(y, tensor, noop_flag=torch.ones(1))
    same(tensor, *former)
    quantizer.set_usage(columnwise=False)
    quantizer.update_quantized(y, tensor)
    # Two directions of one plain tensor share its memory, as two identity tensors of it do.
    if pair != ("identity", "identity"):
        same(tensor, values(pair[0], y), former[1])
    quantizer.set_usage(columnwise=True)
    assert tensor.quantize_(y) is tensor
    same(tensor, values(pair[0], y), values(pair[1], y))
    with pytest.raises(TypeError, match="expected a torch.Tensor"):
        quantizer.update_quantized([1.0], tensor)
    with pytest.raises(ValueError, match="can only update a HybridQuantizedTensorStorage"):
        quantizer.update_quantized(y, torch.empty(32, 64))


def test_layouts_are_dropped_and_not_made_again():
    tensor = hybrid("e4m3", "identity")(randn(32, 64))
    tensor.update_usage(columnwise_usage=False)
    rows = tensor.rowwise_sub_storage
    with pytest.raises(RuntimeError, match="no columnwise sub-storage"):
        tensor.update_usage(rowwise_usage=False, columnwise_usage=True)
    assert tensor.rowwise_sub_storage is rows
    tensor.update_usage(rowwise_usage=False)
    assert "rowwise=None" in repr(tensor)
    with pytest.raises(QuantizedTensorError, match="both directions were dropped"):
        tensor.dequantize()
    tensor.clear()


def test_operations(pair):
    x = randn(64, 32)
    tensor = hybrid(*pair)(x)
    rows = values(pair[0], x)
    assert type(tensor @ x.t()) is torch.Tensor
    assert torch.equal(tensor @ x.t(), rows @ x.t())
    detached = tensor.detach()
    assert detached.rowwise_sub_storage is not tensor.rowwise_sub_storage
    pairs = zip(detached.get_data_tensors(), tensor.get_data_tensors(), strict=True)
    assert all(one is None or one.data_ptr() == other.data_ptr() for one, other in pairs)
    cloned = tensor.clone()
    assert type(cloned) is te.HybridQuantizedTensor
    assert tensor.contiguous() is tensor
    moved = tensor.to("cpu", copy=True)
    same(moved, *both(tensor))
    cloned.mul_(2)
    assert torch.equal(tensor.dequantize(), rows)
    assert torch.equal(cloned.dequantize(), 2 * rows)
    cloned.copy_(tensor)
    same(cloned, *both(tensor))
    cloned.copy_(torch.ones(64, 32))
    same(cloned, torch.ones(64, 32), torch.ones(64, 32))
    plain = torch.zeros(64, 32)
    assert torch.equal(plain.copy_(tensor), rows)
    zeros = tensor.new_zeros((16, 16))
    assert type(zeros) is te.HybridQuantizedTensor
    same(zeros, torch.zeros(16, 16), torch.zeros(16, 16))


def test_views_keep_the_class_where_both_values_have_them():
    x = randn(64, 32)
    tensor = hybrid("identity", "identity")(x)
    for view in (lambda t: t.view(32, 64), lambda t: t[8:40:2], lambda t: t.t()):
        assert type(view(tensor)) is te.HybridQuantizedTensor
        assert view(tensor).stride() == view(x).stride()
        same(view(tensor), view(x), view(x))
    first, second = torch.split(tensor, 40)
    same(first, x[:40], x[:40])
    same(second, x[40:], x[40:])
    blocks = hybrid("block", "identity")(x)
    assert type(blocks[3:5]) is torch.Tensor  # it would cut a block
    assert torch.equal(blocks[3:5], values("block", x)[3:5])


def test_gradients_and_parameters(pair):
    x = randn(32, 32).requires_grad_()
    (hybrid(*pair)(x).dequantize() * 3).sum().backward()
    assert torch.equal(x.grad, torch.full((32, 32), 3.0))
    weight = torch.nn.Parameter(hybrid(*pair)(randn(32, 32)))
    assert type(weight) is te.HybridQuantizedTensor
    (weight * 2).sum().backward()
    assert torch.equal(weight.grad, torch.full((32, 32), 2.0))
    before = weight.detach().dequantize().clone()
    torch.optim.SGD([weight], lr=0.5).step()
    assert torch.equal(weight.detach().dequantize(), values(pair[0], before - 1))


def test_saved_for_backward(pair):
    tensor = hybrid(*pair)(randn(32, 64))
    expected = both(tensor)
    tensors, rest = tensor.prepare_for_saving()
    same(tensor, *expected)
    assert rest.restore_from_saved([*tensors, None]) == [None]
    same(rest, *expected)


def test_pickles_and_copies(pair):
    tensor = hybrid(*pair, columnwise_source="rowwise_dequantized")(randn(32, 64))
    weight = torch.nn.Parameter(hybrid(*pair)(randn(32, 64)))
    stream = io.BytesIO()
    torch.save([tensor, weight], stream)
    stream.seek(0)
    one, two = torch.load(stream, weights_only=True)
    assert isinstance(two, torch.nn.Parameter)
    same(one, *both(tensor))
    same(two.detach(), *both(weight.detach()))
    assert one._quantizer.columnwise_source == "rowwise_dequantized"
    other = copy.deepcopy(weight)
    with torch.no_grad():
        other.zero_()
    assert weight.detach().dequantize().abs().sum() > 0


def test_storages(pair):
    quantizer, x = hybrid(*pair), randn(32, 64)
    quantizer.internal = True
    storage = quantizer(x)
    assert type(storage) is HybridQuantizedTensorStorage
    assert (storage.size(), storage.device.type) == (x.shape, "cpu")
    assert torch.equal(storage.dequantize(), values(pair[0], x))
    tensors, rest = storage.prepare_for_saving()
    rest.restore_from_saved(tensors)
    same(storage, values(pair[0], x), values(pair[1], x))
    other = HybridQuantizedTensorStorage(**storage.get_metadata())
    assert other.rowwise_sub_storage is storage.rowwise_sub_storage
    with pytest.raises(TypeError, match="requires a parent HybridQuantizer"):
        HybridQuantizedTensorStorage(rowwise_storage=None, columnwise_storage=None, quantizer=None)
    with pytest.raises(TypeError, match="requires a parent HybridQuantizer"):
        te.HybridQuantizedTensor(
            (1, 1), x.dtype, rowwise_storage=None, columnwise_storage=None, quantizer=None
        )


def test_storage_only_values_are_refused_where_copies_are_needed():
    quantizer = hybrid("identity", "e4m3")
    quantizer.columnwise_quantizer.internal = True
    tensor = quantizer(randn(32, 64))
    with pytest.raises(NotImplementedError, match="storage-only columnwise sub-storage"):
        tensor.detach()
    with pytest.raises(NotImplementedError, match="storage-only columnwise sub-storage"):
        tensor.fsdp_pre_all_gather(None, tensor.shape, tensor.stride(), None, None)
    with pytest.raises(UnsupportedError, match="keep the parameter in high precision"):
        hybrid("identity", "e4m3")(randn(8, 16)).fsdp_pre_all_gather(
            None, (8, 16), (16, 1), None, None
        )


def test_parts_are_not_written():
    tensor = hybrid("e4m3", "identity")(
        torch.rand(32, 16, generator=torch.Generator().manual_seed(0))
    )
    former = [one.clone() for one in both(tensor)]
    for write in (lambda t: t.copy_(torch.full((16, 16), 100.0)), lambda t: t.mul_(100)):
        with pytest.raises(QuantizedTensorError, match="a part of a tensor"):
            write(tensor[:16])
    same(tensor, *former)


@pytest.mark.parametrize(
    "write",
    [
        lambda t: t.zero_(),
        lambda t: t.quantize_(torch.zeros(32, 32)),
        lambda t: setattr(t, "data", torch.zeros(32, 32)),
    ],
)
def test_autograd_sees_writes(write, pair):
    tensor, weight = hybrid(*pair)(randn(32, 32)), torch.ones(32, 32, requires_grad=True)
    y = tensor * weight
    with torch.no_grad():
        write(tensor)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize(
    "write", [lambda t: t.__setitem__(0, 9.0), lambda t: t.fill_diagonal_(9.0)]
)
def test_writes_of_a_part_reach_both_values(write, pair):
    x = randn(128, 128)
    tensor = hybrid(*pair)(x.clone())
    expected = values(pair[0], x).clone()
    write(tensor)
    write(expected)
    columns = values(pair[1], expected, rowwise=False, columnwise=True)
    same(tensor, values(pair[0], expected), columns)


def test_lists_of_tensors(pair):
    def made():
        return [quantizer(randn(32, 32)) for quantizer in (QUANTIZERS["e4m3"](), hybrid(*pair))]

    for order in (1, -1):
        tensors, expected = made()[::order], [one.dequantize() + 1 for one in made()[::order]]
        torch._foreach_add_(tensors, 1.0)
        near = [(a.dequantize() - b).abs().max() for a, b in zip(tensors, expected, strict=True)]
        assert max(near) < 0.3
        sources, targets = made()[::order], made()[::order]
        with torch.no_grad():
            for one in targets:
                one.zero_()
        torch._foreach_copy_(targets, sources)
        for one, other in zip(targets, sources, strict=True):
            assert torch.equal(one.dequantize(), other.dequantize())
    one, two = hybrid(*pair)(randn(32, 32)), hybrid(*pair)(randn(32, 32, seed=1))
    torch._foreach_copy_([one], [two])
    same(one, *both(two))


def test_copies_of_another_kind_are_quantised_again():
    target, source = (
        hybrid("e4m3", "e4m3")(randn(32, 32)),
        hybrid("e5m2", "e5m2")(randn(32, 32, seed=1)),
    )
    target.copy_(source)
    same(target, *(values("e4m3", one) for one in both(source)))
    target.copy_(torch.arange(32).expand(32, 32))
    assert torch.equal(target.dequantize(), values("e4m3", torch.arange(32.0).expand(32, 32)))


def test_views_in_inference_mode(pair):
    x = randn(32, 32)
    tensor = hybrid(*pair)(x)
    with torch.inference_mode():
        for view in (lambda t: t.detach(), lambda t: t[0], lambda t: t.view(-1), lambda t: t.t()):
            found = view(tensor)
            found = found.dequantize() if isinstance(found, te.QuantizedTensor) else found
            assert torch.equal(found, view(values(pair[0], x)))


def test_other_nominal_types_and_strides(pair):
    x = randn(32, 16)
    half = hybrid(*pair).quantize(x, dtype=torch.bfloat16)
    assert (half.dtype, half.dequantize().dtype) == (torch.bfloat16, torch.bfloat16)
    with pytest.raises(QuantizedTensorError, match=r"expected dtype torch.bfloat16"):
        half.data = hybrid(*pair)(x)
    turned = hybrid(*pair)(x.t())
    flat = turned.view(-1)
    flat = flat.dequantize() if isinstance(flat, te.QuantizedTensor) else flat
    assert torch.equal(flat, values(pair[0], x.t()).reshape(-1))
    clear_columnwise_cache(half)
    assert half.get_usages() == {"rowwise": True, "columnwise": False}


def test_settings_for_several_ranks_go_to_both():
    quantizer = hybrid("e4m3", "identity")
    assert not quantizer.with_amax_reduction
    quantizer.with_amax_reduction = True
    quantizer.amax_reduction_group = "ranks"
    assert quantizer.rowwise_quantizer.with_amax_reduction
    assert (
        quantizer.amax_reduction_group
        == quantizer.rowwise_quantizer.amax_reduction_group
        == "ranks"
    )


def test_quantizers_tell_what_both_can():
    quantizer = hybrid("identity", "identity")
    assert quantizer.is_requantization_safe()
    assert quantizer._get_compatible_recipe() is te.IdentityQuantizer()._get_compatible_recipe()
    other = quantizer.copy()
    assert other.columnwise_quantizer is not quantizer.columnwise_quantizer


@pytest.mark.parametrize("name", [*RECIPES, None])
def test_layers_read_the_values(name, pair):
    recipe = RECIPES[name]() if name else None
    layer, x = te.Linear(32, 32, device="cpu"), randn(16, 32)
    results = []
    for given in (values(pair[0], x), hybrid(*pair)(x)):
        if name == "delayed":
            layer.reset_fp8_meta_tensors()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            results.append(layer(given))
    assert torch.equal(*results)
