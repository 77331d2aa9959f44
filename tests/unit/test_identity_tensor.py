"""Tensors that quantise nothing, beside the plain tensors that they hold."""

import copy
import io

import pytest
import torch

import te_fast.pytorch as te
from graphs import needs_compile
from recipes import RECIPES
from te_fast.errors import ArgumentError, DtypeError, QuantizedTensorError, UnsupportedError
from te_fast.pytorch.tensor.storage.identity_tensor_storage import IdentityTensorStorage
from te_fast.pytorch.tensor.utils import (
    clear_columnwise_cache,
    post_all_gather_processing,
    quantize_master_weights,
    replace_raw_data,
)

aten = torch.ops.aten


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def identity(x, **options):
    return te.IdentityQuantizer(**options)(x)


def is_over(tensor, values):
    """Whether it is an identity tensor that looks as `values` do, over the same memory."""
    outside = [
        (one.shape, one.stride(), one.storage_offset(), one.dtype) for one in (tensor, values)
    ]
    return (
        type(tensor) is te.IdentityTensor
        and outside[0] == outside[1]
        and tensor._hp_data.data_ptr() == values.data_ptr()
    )


def test_it_is_over_the_values():
    x = randn(4, 8, dtype=torch.bfloat16)
    tensor = identity(x)
    assert is_over(tensor, x)
    assert torch.equal(tensor.dequantize(), x)
    assert torch.equal(tensor.float(), x.float())
    assert tensor.get_usages() == {"rowwise": True, "columnwise": True}
    tensor.update_usage(rowwise_usage=False)
    assert torch.equal(tensor.dequantize(), x)
    assert tensor.get_data_tensors()[0] is tensor.get_data_tensors(columnwise_data=False)
    assert tensor.get_data_tensors()[1] is None
    with pytest.raises(ArgumentError, match="rowwise_data or columnwise_data"):
        tensor.get_data_tensors(False, False)


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, float("inf"), float("nan"), 3.4e38])
def test_edge_values_keep_their_bits(value):
    x = torch.full((3,), value)
    assert torch.equal(identity(x).dequantize().view(torch.int32), x.view(torch.int32))


def test_a_cast_has_memory_of_its_own():
    x = randn(4, 8)
    tensor = identity(x, dtype=torch.bfloat16)
    assert tensor.dtype == torch.bfloat16
    assert torch.equal(tensor.dequantize(), x.bfloat16())
    tensor.zero_()
    assert x.abs().sum() > 0


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.view(3, 8),
        lambda x: x[1:5:2],
        lambda x: x[:, ::2],
        lambda x: x.t(),
        lambda x: x.select(0, 2),
        lambda x: torch.as_strided(x, (3, 4), (4, 1), 4),
        lambda x: aten.as_strided.default(x[2:], [2, 4], [4, 1]),
        lambda x: aten.as_strided.default(x[2:], [2, 4], [4, 1], 0),
        lambda x: x.unsqueeze(0).expand(2, 6, 4),
        lambda x: torch.split(x, 4)[1],
        lambda x: torch.split(x, [1, 5])[1],
        lambda x: x.detach(),
        lambda x: aten.alias(x),
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_views_share_the_memory(view, inference):
    x = torch.arange(24.0).reshape(6, 4)
    tensor = identity(x)
    with torch.inference_mode(inference):
        found, expected = view(tensor), view(x)
        assert is_over(found, expected)
        if 0 not in found.stride():
            found.copy_(torch.full_like(expected, -3))
            assert torch.equal(found.dequantize(), torch.full_like(expected, -3))
    assert torch.equal(tensor.dequantize(), x)


def test_copies_have_their_own_memory():
    x = randn(6, 4)
    for made in (identity(x).clone(), identity(x.t()).clone(), identity(x.t()).contiguous()):
        assert type(made) is te.IdentityTensor
        assert made.stride() == made._hp_data.stride()
        made.zero_()
    assert x.abs().sum() > 0
    assert identity(x.t()).contiguous().is_contiguous()
    moved = identity(x).to("cpu", copy=True)
    assert type(moved) is te.IdentityTensor
    assert type(identity(x).to(torch.float64)) is torch.Tensor
    zeros = identity(x).new_zeros((2, 3))
    assert type(zeros) is te.IdentityTensor
    assert torch.equal(zeros.dequantize(), torch.zeros(2, 3))
    assert type(torch.empty_like(identity(x))) is te.IdentityTensor


def test_other_operations_run_on_the_values():
    x, y = randn(4, 8), randn(8, 4, seed=1)
    assert torch.equal(identity(x) @ y, x @ y)
    assert torch.equal(torch.cat([identity(x), x]), torch.cat([x, x]))
    assert type(identity(x) * 2) is torch.Tensor
    assert torch.equal(torch.stack([identity(x), identity(x)]).sum(0), 2 * x)


def test_writes_in_place_keep_the_tensor():
    x = randn(4, 8)
    tensor, expected = identity(x.clone()), x.clone()
    version = tensor._version
    assert tensor.mul_(2) is tensor
    assert torch.equal(tensor.dequantize(), expected.mul_(2))
    assert tensor._version > version
    tensor[1:, 2] = 3.0
    expected[1:, 2] = 3.0
    assert tensor.fill_diagonal_(7.0) is tensor
    assert torch.equal(tensor.dequantize(), expected.fill_diagonal_(7.0))
    torch._foreach_add_([tensor], [x])
    assert torch.equal(tensor.dequantize(), expected.add_(x))
    plain = torch.zeros(4, 8)
    assert plain.copy_(tensor) is plain
    assert torch.equal(plain, expected)
    tensor.copy_(identity(x))
    assert torch.equal(tensor.dequantize(), x)
    with pytest.raises(UnsupportedError, match="not changed in place"):
        tensor.t_()
    with torch.inference_mode():
        assert tensor.detach_() is tensor
    assert tensor.shape == (4, 8)


def test_beside_quantised_tensors():
    x = randn(16, 16)
    fp8 = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, "cpu")(x)
    values = fp8.dequantize()
    tensor = identity(torch.zeros(16, 16))
    tensor.copy_(fp8)
    assert torch.equal(tensor.dequantize(), values)
    fp8.copy_(identity(2 * x))
    assert torch.equal(fp8.dequantize(), 2 * values)  # a power of two changes the scale alone
    assert torch.equal(identity(fp8).dequantize(), fp8.dequantize())
    tensor.quantize_(fp8)
    assert torch.equal(tensor.dequantize(), fp8.dequantize())


def test_gradients_are_those_of_the_values():
    x = randn(4, 8).requires_grad_()
    (identity(x).dequantize() * 3).sum().backward()
    assert torch.equal(x.grad, torch.full((4, 8), 3.0))
    weight = torch.nn.Parameter(identity(randn(4, 8)))
    assert type(weight) is te.IdentityTensor
    (weight * weight).sum().backward()
    assert torch.equal(weight.grad, 2 * weight.detach().dequantize())
    assert not weight._hp_data.requires_grad
    weight.dequantize().sum().backward()
    assert not weight._hp_data.requires_grad


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_optimizers_step_on_it(options):
    start = randn(4, 8)
    plain = torch.nn.Parameter(start.clone())
    weight = torch.nn.Parameter(identity(start.clone()))
    for one in (plain, weight):
        optimizer = torch.optim.Adam([one], lr=0.1, **options)
        for _ in range(3):
            (one * one).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(weight.detach().dequantize(), plain)


def test_updates():
    quantizer = te.IdentityQuantizer()
    tensor = quantizer(torch.full((4, 8), 3.0))
    for noop, expected in ((1, 3.0), (0, 7.0)):
        flag = torch.tensor(float(noop))
        quantizer.update_quantized(torch.full((4, 8), 7.0), tensor, noop_flag=flag)
        assert torch.equal(tensor.dequantize(), torch.full((4, 8), expected))
    empty = quantizer.make_empty((4, 8), dtype=torch.bfloat16, device="cpu", requires_grad=True)
    assert (empty.dtype, empty.requires_grad) == (torch.bfloat16, True)
    empty.mark = 1
    te.IdentityQuantizer(dtype=torch.float32).update_quantized(torch.ones(2, 8), empty.detach())
    other = quantizer.make_empty((4, 8), dtype=torch.bfloat16, device="cpu")
    other.mark = 1
    te.IdentityQuantizer(dtype=torch.float32).update_quantized(torch.ones(2, 8), other)
    assert (other.dtype, other.shape, other.mark) == (torch.float32, (2, 8), 1)
    other.data = torch.zeros(3)
    assert (other.shape, other.dequantize().sum()) == ((3,), 0)
    with pytest.raises(ValueError, match="can only update an IdentityTensorStorage"):
        quantizer.update_quantized(torch.ones(2), torch.ones(2))
    with pytest.raises(DtypeError, match="expected a torch.Tensor"):
        quantizer([1.0])


def test_storages():
    x = randn(4, 8)
    quantizer = te.IdentityQuantizer()
    quantizer.internal = True
    storage = quantizer(x)
    assert type(storage) is IdentityTensorStorage
    assert storage.size() == x.shape
    assert storage.view(8, 4).size() == (8, 4)
    assert storage.dequantize().data_ptr() == x.data_ptr()
    assert (
        IdentityTensorStorage(hp_data=x, fake_dtype=torch.bfloat16).dequantize().dtype
        == torch.bfloat16
    )
    tensors, rest = storage.prepare_for_saving()
    assert storage._hp_data is None
    with pytest.raises(QuantizedTensorError, match="no data is there"):
        storage.dequantize()
    assert rest.restore_from_saved([*tensors, None]) == [None]
    assert torch.equal(storage.dequantize(), x)
    other = quantizer.make_empty((4, 8), device="cpu")
    other.copy_from_storage(storage)
    assert torch.equal(other.dequantize(), x)
    with pytest.raises(TypeError, match="same class"):
        other.copy_from_storage(
            te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, "cpu")(randn(16, 16))
        )
    other.clear()
    assert other.dequantize().numel() == 0
    assert "IdentityTensorStorage" in repr(storage)


def test_saving_leaves_the_users_tensor_whole():
    tensor = identity(randn(4, 8))
    saved, rest = tensor.prepare_for_saving()
    assert torch.equal(tensor.dequantize(), saved[0])
    assert rest.restore_from_saved(saved) == []
    assert torch.equal(rest.dequantize(), tensor.dequantize())


def test_pickles_and_copies():
    weight = torch.nn.Parameter(identity(randn(4, 8), dtype=torch.bfloat16))
    tensor = identity(randn(4, 8).t())
    stream = io.BytesIO()
    torch.save([tensor, weight], stream)
    stream.seek(0)
    one, two = torch.load(stream, weights_only=True)
    assert type(one) is type(two) is te.IdentityTensor
    assert isinstance(two, torch.nn.Parameter)
    assert one.stride() == tensor.stride()
    assert torch.equal(one.dequantize(), tensor.dequantize())
    assert two._quantizer.dtype == torch.bfloat16
    other = copy.deepcopy(weight)
    assert isinstance(other, torch.nn.Parameter)
    with torch.no_grad():
        other.zero_()
    assert weight.detach().dequantize().abs().sum() > 0


def test_masters_are_rounded_into_it():
    x = randn(4, 8, dtype=torch.bfloat16)
    fp8 = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, "cpu")(randn(16, 16))
    weight, master = torch.nn.Parameter(identity(x.clone())), randn(32, seed=1)
    version = weight._version
    whole = randn(256, seed=2)
    quantize_master_weights([weight, fp8], [master[12:], whole], [12, 0], None)
    expected = torch.cat([x.view(-1)[:12], master[12:].bfloat16()])
    assert torch.equal(weight.detach().dequantize().view(-1), expected)
    assert weight._version > version
    again = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, "cpu")(whole.view(16, 16))
    assert torch.equal(fp8._data, again._data)
    shard = torch.empty(64, dtype=torch.uint8)
    quantize_master_weights([weight], [master], [0], None, [shard])
    assert torch.equal(shard.view(torch.bfloat16), master.bfloat16())
    assert torch.equal(weight.detach().dequantize().view(-1), expected)
    post_all_gather_processing([weight])
    with pytest.raises(ValueError, match="33 elements at 0"):
        quantize_master_weights([weight], [torch.ones(33)], [0], None)


def test_values_move_to_other_memory():
    x = randn(4, 8)
    tensor, memory = identity(x), torch.empty(4, 8)
    replace_raw_data(tensor, memory)
    assert tensor._hp_data is memory
    assert torch.equal(memory, x)
    with pytest.raises(ValueError, match="expected torch.float32"):
        replace_raw_data(tensor, torch.empty(4, 8, dtype=torch.uint8))


@pytest.mark.parametrize(
    "write",
    [
        lambda t: t.zero_(),
        lambda t: t.quantize_(torch.zeros(8, 8)),
        lambda t: torch._foreach_zero_([t]),
        lambda t: torch.add(t, 1, out=t),
        lambda t: quantize_master_weights([t], [torch.zeros(64)], [0], None),
    ],
)
@pytest.mark.parametrize("read", [lambda t: t.dequantize(), lambda t: t])
def test_a_backward_refuses_values_that_were_written_since(read, write):
    weight, tensor = torch.ones(8, 8, requires_grad=True), identity(randn(8, 8))
    y = read(tensor) * weight
    with torch.no_grad():
        write(tensor)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_results_of_another_shape_are_refused():
    with pytest.raises(
        QuantizedTensorError, match=r"shape \[4, 4\], and out= is an IdentityTensor of \[2, 2\]"
    ):
        torch.add(torch.ones(4, 4), 1, out=identity(torch.zeros(2, 2)))


def test_taken_values_have_no_gradient_and_keep_their_strides():
    one, other = identity(randn(4, 4)), torch.nn.Parameter(identity(randn(4, 4, seed=1)))
    one.data = other
    assert not one._hp_data.requires_grad
    one.data = randn(4, 4).t()
    assert one.stride() == one._hp_data.stride() == (1, 4)
    assert not one.is_contiguous()
    with pytest.raises(ValueError, match="expected strides"):
        replace_raw_data(one, torch.empty(4, 4))


def test_an_emptied_tensor_has_copies():
    tensor = identity(randn(4, 8))
    saved, rest = tensor.prepare_for_saving()
    whole = rest.detach()
    assert (whole.shape, whole._hp_data) == (tensor.shape, None)
    whole.restore_from_saved(saved)
    assert torch.equal(whole.dequantize(), tensor.dequantize())
    clear_columnwise_cache(tensor)
    assert torch.equal(whole.dequantize(), tensor.dequantize())


@needs_compile
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_functions_take_it():
    compiled = torch.compile(lambda t, w: (t * w).sum(), backend="aot_eager", fullgraph=True)
    weight = randn(4, 8, seed=1)
    for seed in range(2):
        x = randn(4, 8, seed=seed)
        assert torch.equal(compiled(identity(x), weight), (x * weight).sum())


def test_subclasses_stay():
    class Derived(te.IdentityTensor):
        pass

    tensor = identity(randn(4, 8))
    tensor.__class__ = Derived
    assert type(tensor.detach()) is type(torch.nn.Parameter(tensor)) is Derived


def test_it_is_gathered():
    x = randn(4, 8)
    tensor = identity(x)
    gathered, about = tensor.fsdp_pre_all_gather(None, x.shape, x.stride(), None, None)
    whole, outputs = tensor.fsdp_post_all_gather(gathered, about, x.dtype)
    assert outputs is gathered
    assert torch.equal(whole.dequantize(), x)
    again, _ = tensor.fsdp_post_all_gather((2 * x,), about, x.dtype, out=whole)
    assert again is whole
    assert torch.equal(whole.dequantize(), 2 * x)
    with pytest.raises(QuantizedTensorError, match="expected torch.bfloat16"):
        tensor.fsdp_post_all_gather(gathered, about, torch.bfloat16)


@pytest.mark.parametrize("kind", [te.Linear, te.LayerNormLinear, te.LayerNormMLP])
@pytest.mark.parametrize("name", [*RECIPES, None])
def test_layers_read_the_values(kind, name):
    recipe = RECIPES[name]() if name else None
    layer = kind(32, 32, params_dtype=torch.bfloat16, device="cpu")
    results = []
    for given in (lambda x: x, identity):
        x = randn(16, 32, dtype=torch.bfloat16).requires_grad_()
        if name == "delayed":
            layer.reset_fp8_meta_tensors()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(given(x))
        y.square().sum().backward()
        results.append((y, x.grad))
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)
