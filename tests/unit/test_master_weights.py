"""Slices of master weights on several ranks, against a cast of the whole weight, bit for bit."""

import threading

import pytest
import torch

import te_fast.pytorch as te
from quantized_tensors import layout, parts, quantizer, scales_there
from reference import quantize_per_tensor, reciprocal
from selection import sampled
from te_fast import dispatch
from te_fast.errors import ArgumentError, DeviceError, DtypeError, ShapeError, UnsupportedError
from te_fast.pytorch.tensor.utils import (
    cast_master_weights_to_fp8,
    post_all_gather_processing,
    quantize_master_weights,
    replace_raw_data,
)

KINDS = ("delayed", "current", "2d")
SHAPES = ((256, 384), (130, 272), (5, 16))


class Ranks:
    """Threads that stand for ranks, and an all-reduce that waits for all of them."""

    def __init__(self, monkeypatch, count):
        self.count, self.barrier = count, threading.Barrier(count)
        self.tensors, self.reductions, self.errors = [None] * count, 0, []
        self.rank = threading.local()
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: count)
        monkeypatch.setattr(torch.distributed, "all_reduce", self.all_reduce)

    def all_reduce(self, tensor, op, group):
        assert op == torch.distributed.ReduceOp.MAX
        assert group == "ranks"
        number = self.rank.number
        self.tensors[number] = tensor.clone()
        self.reductions += number == 0
        self.barrier.wait()
        tensor.copy_(torch.stack(self.tensors).amax(0))
        self.barrier.wait()

    def run(self, body):
        def one(number):
            self.rank.number = number
            try:
                body(number)
            except BaseException as error:
                self.errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=one, args=(number,)) for number in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]


def slices(numel, count):
    """Boundaries of uneven slices; the last of three ranks has an empty slice."""
    if count == 3:
        return [0, numel // 3 + 5, numel, numel]
    return [numel * rank // count for rank in range(count + 1)]


def weights(values, kind):
    made = torch.nn.Parameter(quantizer(kind)(values))
    if kind == "delayed":
        made._quantizer.scale.fill_(2.5)
        made._quantizer.amax.zero_()
    return made


@pytest.mark.parametrize(("count", "manual"), sampled([1, 2, 3], [False, True]))
def test_slices_of_ranks_make_the_bytes_of_the_whole(monkeypatch, count, manual):
    ranks = Ranks(monkeypatch, count)
    initial = [torch.randn(shape).bfloat16() for _ in KINDS for shape in SHAPES]
    kinds = [kind for kind in KINDS for _ in SHAPES]
    masters = [torch.randn(values.shape) * 3 for values in initial]
    masters[1][0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
    models = [
        [weights(values, kind) for values, kind in zip(initial, kinds, strict=True)]
        for _ in range(count)
    ]

    def step(rank):
        bounds = [slices(master.numel(), count)[rank : rank + 2] for master in masters]
        shares = [
            master.view(-1)[begin:end] if end > begin else None
            for master, (begin, end) in zip(masters, bounds, strict=True)
        ]
        starts = [begin if end > begin else None for begin, end in bounds]
        versions = [weight._version for weight in models[rank]]
        quantize_master_weights(
            models[rank], shares, starts, "ranks", manual_post_all_gather_processing=manual
        )
        assert all(w._version > v for w, v in zip(models[rank], versions, strict=True))

    ranks.run(step)
    assert ranks.reductions == (count > 1)
    for number, (kind, master) in enumerate(zip(kinds, masters, strict=True)):
        bounds = slices(master.numel(), count)
        gathered = torch.cat(
            [
                models[rank][number]._value.row.view(-1)[bounds[rank] : bounds[rank + 1]]
                for rank in range(count)
            ]
        ).view(master.shape)
        whole = weights(initial[number], kind)
        whole.quantize_(master.bfloat16())
        for rank in range(count):
            weight = models[rank][number]
            assert weight.get_usages()["columnwise"] == (count == 1)
            assert (weight._value.col is not None) == (manual or count == 1)
            weight._value.row.copy_(gathered)
        post_all_gather_processing([models[0][number]])
        for got, expected in zip(parts(models[0][number]), parts(whole), strict=True):
            if got.dtype is torch.uint8:
                assert torch.equal(got, expected)
        row, scales, _ = layout(master.bfloat16(), "current" if kind == "delayed" else kind)
        if kind == "delayed":
            assert torch.equal(models[0][number]._quantizer.amax, whole._quantizer.amax)
            assert torch.equal(models[0][number]._scale_inv, whole._scale_inv)
        elif bool(master.isfinite().all()):
            for rank in range(count):
                assert torch.equal(*scales_there(models[rank][number]._value.row_scale, scales))
            assert torch.equal(gathered, row)


def test_shards_and_the_former_name():
    for kind in KINDS:
        master = torch.randn(256, 128)
        weight, whole = (
            weights(torch.zeros(256, 128).bfloat16(), kind),
            weights(torch.zeros(256, 128).bfloat16(), kind),
        )
        before = weight._value.row.clone()
        shard = torch.zeros(64 * 128, dtype=torch.uint8)
        part = master.view(-1)[64 * 128 : 128 * 128]
        cast_master_weights_to_fp8([weight], [part], [64 * 128], None, [shard])
        assert torch.equal(weight._value.row, before)
        cast_master_weights_to_fp8([whole], [part], [64 * 128], None)
        assert torch.equal(shard, whole._value.row.view(-1)[64 * 128 : 128 * 128])
        assert int(shard.count_nonzero()) > 0


def test_scales_of_every_maximum_are_those_of_the_cast():
    from te_fast.runtime import native
    from te_fast.tensor.masters import scales_of

    numbers = torch.cat(
        [
            torch.tensor([0.0, 1e-45, 1e-40, 1e-38, 3e38, float("inf"), 448.0, 1.0]),
            torch.rand(200).mul_(80).sub_(40).exp_(),
        ]
    )
    for eps, pow2 in ((0.0, False), (0.0, True), (0.125, False), (0.125, True)):
        expected = [native.scale_of_amax(one.view(1), "e4m3", eps, pow2) for one in numbers]
        assert torch.equal(scales_of(numbers, 448.0, eps, pow2), torch.cat(expected))


def test_init_values_are_freed():
    from te_fast.common.recipe import Float8CurrentScaling

    with te.quantized_model_init(
        recipe=Float8CurrentScaling(), preserve_high_precision_init_val=True
    ):
        layer = te.Linear(128, 256, params_dtype=torch.bfloat16, device="cpu")
    master = layer.weight.get_high_precision_init_val().float().view(-1)
    expected = layer.weight.dequantize().detach()
    quantize_master_weights([layer.weight], [master], [0], None)
    assert layer.weight.get_high_precision_init_val() is None
    assert torch.equal(layer.weight.dequantize(), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 7])
def test_whole_masters_are_rounded_and_cast_together(kind, count):
    """Masters may be flat, have the weight's shape, need a gradient, or have sizes that no vector width divides."""
    shapes = [(16, 48), (5, 17), (130, 272), (32, 16), (3, 3), (256, 128), (7, 160)][-count:]
    masters = [torch.randn(shape) * 4.0**number for number, shape in enumerate(shapes)]
    masters[0].view(-1)[:4] = torch.tensor([0.0, -0.0, 1e-30, 3e4])
    made = [weights(torch.zeros(shape).bfloat16(), kind) for shape in shapes]
    versions = [weight._version for weight in made]
    given = [m if number % 2 else m.view(-1) for number, m in enumerate(masters)]
    given[-1] = given[-1].clone().requires_grad_()
    with dispatch.record() as launches:
        cast_master_weights_to_fp8(made, given, [0] * count, None)
    if count > 1:
        assert sum("cast" in launch.name for launch in launches) == 1
    for weight, master, version in zip(made, masters, versions, strict=True):
        scale = torch.tensor(2.5) if kind == "delayed" else None
        nominal = master.bfloat16()
        data, inverse = _reference(nominal, kind, scale)
        row, row_scale, col, _ = parts(weight)
        assert torch.equal(row, data)
        assert torch.equal(*scales_there(row_scale, inverse))
        assert torch.equal(col, data.t())
        assert weight.get_usages() == {"rowwise": True, "columnwise": True}
        assert weight._version > version
        if kind == "delayed":
            assert weight._quantizer.amax == nominal.abs().max()


def _reference(values, kind, scale):
    if kind != "delayed":
        return layout(values, kind)[:2]
    return quantize_per_tensor(values, scale, "e4m3"), reciprocal(scale).reshape(1)


class _Noting(te.Float8CurrentScalingQuantizer):
    """A user's own quantizer."""

    def update_quantized(self, src, dst, *, noop_flag=None):
        updates.append(dst)
        return super().update_quantized(src, dst, noop_flag=noop_flag)


updates = []


def test_quantizers_of_users_update_weights_themselves():
    updates.clear()
    first, second = (
        torch.nn.Parameter(_Noting(te.DType.kFloat8E4M3, "cpu")(torch.ones(16, 16)))
        for _ in range(2)
    )
    masters = [torch.full((256,), value) for value in (2.0, 3.0)]
    quantize_master_weights([first, second], masters, [0, 0], None)
    assert len(updates) == 2
    with torch.no_grad():
        torch._foreach_mul_([first, second], 2.0)
    assert len(updates) == 4
    assert torch.equal(first.dequantize(), torch.full((16, 16), 4.0))
    assert torch.equal(second.dequantize(), torch.full((16, 16), 6.0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("write", ["quantize_", "mul_", "fused", "masters"])
def test_bytes_that_are_written_after_a_cast_make_the_columns_stale(kind, write):
    weight = weights(torch.randn(32, 48).bfloat16(), kind)
    if write == "quantize_":
        weight.quantize_(torch.randn(32, 48).bfloat16())
    elif write == "mul_":
        with torch.no_grad():
            weight.mul_(0.5)
    elif write == "fused":
        weight.grad = torch.randn(32, 48).bfloat16()
        torch.optim.SGD([weight], lr=0.5, fused=True).step()
    else:
        quantize_master_weights([weight], [torch.randn(32 * 48)], [0], None)
    assert weight.get_usages()["columnwise"]
    parts(weight)[0].zero_()
    assert not weight.get_usages()["columnwise"]
    weight.update_usage(columnwise_usage=True)
    assert not parts(weight)[2].any()


def test_a_step_of_a_distributed_optimizer():
    """As in Megatron-LM: flat buffers for bytes, float32 masters of the initial values, a cast, and a forward."""
    from te_fast.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

    for recipe in (DelayedScaling(), Float8CurrentScaling(), Float8BlockScaling()):
        with te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
            layer = te.LayerNormMLP(128, 256, params_dtype=torch.bfloat16, device="cpu")
        layer.bfloat16()
        mine = [layer.fc1_weight, layer.fc2_weight]
        flat = torch.zeros(sum(w.numel() for w in mine), dtype=torch.uint8)
        begin, masters = 0, []
        for weight in mine:
            place = flat[begin : begin + weight.numel()].view(weight.shape)
            data = weight._value.row
            replace_raw_data(weight, place)
            assert torch.equal(weight._value.row, data)
            assert weight.get_usages() == {"rowwise": True, "columnwise": True}
            begin += weight.numel()
            masters.append(weight.get_high_precision_init_val().view(-1).clone().float())
        x = torch.randn(32, 128).bfloat16()
        for _ in range(2):
            with te.autocast(recipe=recipe):
                layer(x).float().square().mean().backward()
            for weight, master in zip(mine, masters, strict=True):
                master.sub_(weight.grad.float().view(-1), alpha=0.5)
                weight.grad = None
            quantize_master_weights(mine, masters, [0, 0], None, None, True)
            post_all_gather_processing(mine)
            for weight, master in zip(mine, masters, strict=True):
                values = weight.dequantize().detach().float().view(-1)
                assert float((values - master).norm() / master.norm()) < 0.04
                assert weight.get_usages()["columnwise"]
        assert torch.equal(flat, torch.cat([weight._value.row.view(-1) for weight in mine]))


def test_raw_memory_that_does_not_fit_is_refused():
    tensor = quantizer("current")(torch.randn(16, 32).bfloat16())
    for memory in (
        torch.zeros(16, 32),
        torch.zeros(32, 16, dtype=torch.uint8),
        torch.zeros(5, dtype=torch.uint8),
    ):
        with pytest.raises(ValueError, match="replace_raw_data: expected"):
            replace_raw_data(tensor, memory)
    with pytest.raises(ArgumentError):
        replace_raw_data(torch.zeros(3), torch.zeros(3))
    with pytest.raises(ArgumentError, match="expected a tensor as new memory, got NoneType"):
        replace_raw_data(tensor, None)


def test_lists_that_do_not_fit_are_refused():
    weight, master = weights(torch.randn(256, 128).bfloat16(), "current"), torch.randn(256 * 128)
    before = weight._value.row.clone()
    for call, error in (
        (lambda: quantize_master_weights([weight], [], [0], None), ArgumentError),
        (lambda: quantize_master_weights([weight], [master], [1], None), ShapeError),
        (lambda: quantize_master_weights([weight], [master], [-1], None), ShapeError),
        (
            lambda: quantize_master_weights([weight, weight], [master, master], [0, 7], None),
            ShapeError,
        ),
        (lambda: quantize_master_weights([master], [master], [0], None), ArgumentError),
        (
            lambda: quantize_master_weights(
                [weight], [master], [0], None, [torch.zeros(3, dtype=torch.uint8)]
            ),
            ShapeError,
        ),
    ):
        with pytest.raises(error):
            call()
        assert torch.equal(weight._value.row, before)
    rows = torch.nn.Parameter(quantizer("1d")(torch.randn(256, 128).bfloat16()))
    with pytest.raises(UnsupportedError, match="1x128"):
        quantize_master_weights([rows], [master], [0], None)
    quantize_master_weights([], [], [], None)
    post_all_gather_processing([torch.zeros(3)])


@pytest.mark.parametrize(
    ("master", "start", "error", "text"),
    [
        (torch.ones(256), None, ArgumentError, "start_offset must be an int.*got None"),
        (torch.ones(256), "0", ArgumentError, "start_offset must be an int.*got '0'"),
        ([1.0] * 256, 0, ArgumentError, "got list"),
        (torch.ones(256, dtype=torch.int32), 0, DtypeError, "torch.int32"),
        (torch.ones(256, device="meta"), 0, DeviceError, "meta device"),
    ],
    ids=["no offset", "text", "list", "integers", "meta"],
)
@pytest.mark.parametrize("length", [256, 64])
def test_masters_are_checked_before_any_weight_is_written(master, start, error, text, length):
    """Of the two lengths the first is that of a whole weight, which a native call takes."""
    made = [quantizer("current")(torch.ones(16, 16)) for _ in range(2)]
    before = [weight._value.row.clone() for weight in made]
    good, bad = torch.full((length,), 5.0), master[:length]
    with pytest.raises(error, match=text):
        quantize_master_weights(made, [good, bad], [0, start], None)
    shards = [torch.zeros(length, dtype=torch.uint8, device=place) for place in ("cpu", "meta")]
    with pytest.raises(DeviceError, match="shard on cpu, got one on meta"):
        quantize_master_weights(made, [good, good], [0, 0], None, shards)
    assert not shards[0].any()
    for weight, row in zip(made, before, strict=True):
        assert torch.equal(weight._value.row, row)
    quantize_master_weights(made, [good, None], [0, None], None)
    assert torch.equal(made[0].dequantize().view(-1)[:length], good)


@pytest.mark.parametrize("kind", KINDS)
def test_one_weight_is_processed_without_a_list(kind):
    weight = weights(torch.randn(128, 256).bfloat16(), kind)
    row, _, _, _ = parts(weight)
    torch.randint(0, 100, row.shape, dtype=torch.uint8, out=row)
    post_all_gather_processing(weight)
    assert weight.get_usages()["columnwise"]
    assert torch.equal(parts(weight)[2], row.t())


def test_weights_of_two_values_are_moved():
    made = te.HybridQuantizer(
        rowwise_quantizer=quantizer("current"), columnwise_quantizer=te.IdentityQuantizer()
    )(torch.randn(16, 32).bfloat16())
    rows, columns = made.rowwise_sub_storage, made.columnwise_sub_storage.dequantize().clone()
    before, memory = rows._value.row.clone(), torch.zeros(16, 32, dtype=torch.uint8)
    replace_raw_data(made, memory)
    assert rows._value.row is memory
    assert torch.equal(memory, before)
    rows.update_usage(columnwise_usage=True)
    memory.copy_(before.flip(0))
    post_all_gather_processing(made)
    assert torch.equal(rows._value.col, before.flip(0).t())
    assert torch.equal(made.columnwise_sub_storage.dequantize(), columns)
    made.update_usage(rowwise_usage=False)
    with pytest.raises(UnsupportedError, match="no rowwise sub-storage"):
        replace_raw_data(made, memory)
    post_all_gather_processing(made)


PAIRS = [
    ("current", None),
    ("2d", None),
    ("current", "current"),
    (None, "current"),
    ("2d", "current"),
    (None, None),
]


def two_values(rows, columns, **options):
    made = [te.IdentityQuantizer() if name is None else quantizer(name) for name in (rows, columns)]
    return te.HybridQuantizer(rowwise_quantizer=made[0], columnwise_quantizer=made[1], **options)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("value", [0.0, 3.5, float("inf")])
def test_weights_of_two_values_take_whole_masters(pair, value):
    """Each value is that which its quantizer alone makes of the rounded master weight."""
    weight = two_values(*pair)(torch.randn(128, 256).bfloat16())
    master = torch.randn(128 * 256) * 3
    master[17] = value
    quantize_master_weights([weight], [master], [0], None)
    rounded = master.bfloat16().view(128, 256)
    halves = (weight.rowwise_sub_storage, weight.columnwise_sub_storage)
    for name, half in zip(pair, halves, strict=True):
        expected = rounded
        if name is not None:
            alone = quantizer(name)
            alone.set_usage(rowwise=True, columnwise=False)
            expected = alone(rounded).dequantize()
        assert torch.equal(half.dequantize(), expected)


def test_whole_masters_of_two_values_in_plain_torch():
    weight = two_values("current", None)(torch.zeros(16, 32).bfloat16())
    master = torch.randn(512)
    quantize_master_weights([weight], [master], [0], None)
    rounded = master.bfloat16().float().view(16, 32)
    scale = 448 / rounded.abs().max()
    rows = (rounded * scale).to(torch.float8_e4m3fn)
    assert torch.equal(weight.rowwise_sub_storage._data, rows.view(torch.uint8))
    assert torch.equal(weight.columnwise_sub_storage.dequantize().float(), rounded)


def test_slices_of_weights_of_two_values():
    x = torch.randn(32, 16).bfloat16()
    weight = two_values("current", None)(x)
    before = weight.dequantize().clone()
    with pytest.raises(ArgumentError, match="slice of a weight of two values"):
        quantize_master_weights([weight], [torch.ones(8)], [16], None)
    assert torch.equal(weight.dequantize(), before)
    weight.update_usage(rowwise_usage=False)  # one value takes slices
    quantize_master_weights([weight], [torch.full((8,), 2.0)], [16], None)
    x.view(-1)[16:24] = 2.0
    assert torch.equal(weight.dequantize(), x)
    weight.update_usage(columnwise_usage=False)
    with pytest.raises(ArgumentError, match="neither"):
        quantize_master_weights([weight], [torch.ones(512)], [0], None)


def test_columns_that_follow_from_rows_take_no_masters():
    weight = two_values("current", None, columnwise_source="rowwise_dequantized")(
        torch.ones(16, 16)
    )
    with pytest.raises(UnsupportedError, match="rowwise_dequantized"):
        quantize_master_weights([weight], [torch.ones(256)], [0], None)
    weight.update_usage(columnwise_usage=False)
    quantize_master_weights([weight], [torch.full((256,), 0.5)], [0], None)
    assert torch.equal(weight.dequantize(), torch.full((16, 16), 0.5))
