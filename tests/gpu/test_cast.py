"""The cast kernels against torch references, bit for bit, in poisoned buffers between canaries."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
import cast_kernels as kernels  # noqa: E402
from cast_kernels import FLOATS, FP8_MAX, Guarded, ceil_div  # noqa: E402

import reference  # noqa: E402

pytestmark = pytest.mark.gpu

FMTS = list(FP8_MAX)
SHAPES = [
    (0, 64),
    (5, 0),
    (1, 1),
    (1, 128),
    (7, 33),
    (128, 128),
    (129, 136),
    (300, 520),
    (513, 1031),
    (1000, 1024),
]
SMALL = [(1, 1), (37, 24), (130, 136), (19, 131)]
SPECIAL = [
    0.0,
    -0.0,
    1e-45,
    -1e-40,
    6e-8,
    2.0**-10,
    2.0**-9,
    0.5,
    464.0,
    465.0,
    61440.0,
    -3e38,
    1e30,
    448.0,
]
SPECIAL += [float("inf"), float("-inf"), float("nan")]


def data(rows: int, cols: int, name: str, *, special: bool = True, offset: int = 0) -> torch.Tensor:
    """Random values of many magnitudes, some special, `offset` elements into an allocation."""
    generator = torch.Generator(device="cuda").manual_seed(rows * 7919 + cols)
    whole = torch.randn(rows * cols + offset, device="cuda", generator=generator)
    whole *= torch.exp2(
        torch.randint(-12, 12, whole.shape, device="cuda", generator=generator).float()
    )
    if special and whole.numel() > 64:
        where = torch.randint(0, whole.numel(), (len(SPECIAL),), device="cuda", generator=generator)
        whole[where] = torch.tensor(SPECIAL, device="cuda")
    return whole.to(FLOATS[name])[offset:].view(rows, cols)


def scalar(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float32, device="cuda")


def same(got: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """Bitwise equality, whatever the dtype."""
    expected = expected.contiguous()
    assert got.numel() == expected.numel(), what
    left, right = got.contiguous().flatten().view(torch.uint8), expected.flatten().view(torch.uint8)
    if not torch.equal(left, right):
        bad = (left != right).nonzero().flatten()
        pytest.fail(f"{what}: {bad.numel()} of {left.numel()} bytes differ, first at {bad[:8].tolist()}: "
                    f"{left[bad[:8]].tolist()} for {right[bad[:8]].tolist()}")  # fmt: skip


def transposed(data: torch.Tensor, ld: int) -> torch.Tensor:
    out = data.new_zeros(data.shape[1], ld)
    out[:, : data.shape[0]] = data.t()
    return out


def check_cast(rows: int, cols: int, name: str, fmt: str, offset: int = 0) -> None:
    x, scale = data(rows, cols, name, offset=offset), scalar(1.7)
    out, scale_inv, amax = Guarded(rows * cols), Guarded(4), scalar(0.25)
    kernels.cast(
        x, out, scale, fmt, name=name, scale_inv=scale_inv, amax=amax, reverse=rows % 2 == 1
    )()
    same(out.read(), reference.quantize_per_tensor(x, scale, fmt), "cast")
    same(scale_inv.read(torch.float32), reference.reciprocal(scale), "scale_inv")
    same(amax, torch.maximum(reference.amax_of(x), scalar(0.25)), "amax")


def check_cast_transpose(
    rows: int,
    cols: int,
    name: str,
    fmt: str,
    *,
    row=True,
    column=True,
    dbias=True,
    offset=0,
    strip=1,
):
    x, scale = data(rows, cols, name, special=not dbias, offset=offset), scalar(0.3)
    ld_t = ceil_div(rows, 16) * 16
    out = Guarded(rows * cols) if row else None
    out_t = Guarded(cols * ld_t) if column else None
    scale_inv, amax = Guarded(4), scalar(0.0)
    extra: dict[str, Any] = {}
    if dbias:
        tiles_rows = max(1, ceil_div(rows, 128))
        extra = {
            "dbias": Guarded(cols * x.element_size()),
            "partial": Guarded(tiles_rows * cols * 4),
            "counters": Guarded(max(1, ceil_div(cols, 128)) * 4, fill=0),
        }
    extra |= {"scale_inv": scale_inv, "amax": amax, "reverse": cols % 2 == 1, "strip": strip}
    extra["ld_t"] = ld_t if column else 0
    launch = kernels.cast_transpose(x, out, out_t, scale, fmt, name=name, **extra)
    launch()
    if dbias:
        first = extra["dbias"].read().clone()
        launch()  # the first launch has reset the counters
        same(extra["dbias"].read(), first, "dbias twice")
        assert not extra["counters"].read().any()
        tiles = ceil_div(rows, 128)
        strips = [min(strip, tiles - first) for first in range(0, tiles, strip)]
        same(extra["dbias"].read(x.dtype), reference.column_sums(x, strips), "dbias")
    expected = reference.quantize_per_tensor(x, scale, fmt)
    if row:
        same(out.read(), expected, "row layout")
    if column:
        same(out_t.read(), transposed(expected, ld_t), "transposed layout")
    same(scale_inv.read(torch.float32), reference.reciprocal(scale), "scale_inv")
    same(amax, reference.amax_of(x), "amax")


def check_cast_block(
    rows, cols, name, fmt, dims, *, row=True, column=True, pow2=True, eps=0.0, offset=0
):
    x = data(rows, cols, name, offset=offset)
    if rows > 128:
        x[:128] = 0  # a block without a maximum
    ld_t = ceil_div(rows, 16) * 16
    quantize = {1: reference.quantize_1d, 2: reference.quantize_2d}[dims]
    expected, expected_scale = quantize(x, fmt, eps=eps, pow2=pow2)
    expected_t, expected_scale_t = quantize(x.t().contiguous(), fmt, eps=eps, pow2=pow2)
    out = Guarded(rows * cols) if row else None
    out_t = Guarded(cols * ld_t) if column else None
    scale_inv = Guarded(expected_scale.numel() * 4) if row else None
    scale_inv_t = Guarded(expected_scale_t.numel() * 4) if column else None
    if rows and cols:
        kernels.cast_block(
            x, out, out_t, scale_inv, scale_inv_t, fmt, name=name, dims=dims, pow2=pow2, eps=eps
        )()
    if row:
        same(out.read(), expected, "row layout")
        same(scale_inv.read(torch.float32), expected_scale, "scale_inv")
    if column:
        same(out_t.read(), transposed(expected_t.t(), ld_t), "transposed layout")
        same(scale_inv_t.read(torch.float32), expected_scale_t, "scale_inv_t")


def check_amax(
    rows: int,
    cols: int,
    name: str,
    fmt: str,
    *,
    value: float | None = None,
    eps=0.0,
    pow2=False,
    offset=0,
):
    x = data(rows, cols, name, special=False, offset=offset)
    if value is not None and x.numel():
        x.zero_()
        x.view(-1)[x.numel() // 2] = value
    workspace = Guarded(8, fill=0)
    amax, scale, scale_inv = Guarded(4), Guarded(4), Guarded(4)
    launch = kernels.amax(
        x,
        workspace,
        fmt,
        name=name,
        amax=amax,
        scale=scale,
        scale_inv=scale_inv,
        eps=eps,
        pow2=pow2,
    )
    launch()
    launch()  # the first launch has reset the workspace
    assert not workspace.read().any()
    expected = reference.amax_of(x)
    expected_scale = reference.amax_to_scale(expected, FP8_MAX[fmt], eps=eps, pow2=pow2)
    same(amax.read(torch.float32), expected, "amax")
    same(scale.read(torch.float32), expected_scale, "scale")
    same(scale_inv.read(torch.float32), reference.reciprocal(expected_scale), "scale_inv")
    only = Guarded(4)
    kernels.amax(x, workspace, fmt, name=name, amax=only)()
    same(only.read(torch.float32), expected, "amax alone")
    later, later_inv = Guarded(4), Guarded(4)
    kernels.scale_from_amax(only, later, later_inv, fmt, eps=eps, pow2=pow2)()
    same(later.read(), scale.read(), "scale_from_amax")
    same(later_inv.read(), scale_inv.read(), "scale_from_amax")


def check_scale_update(length: int, layers: int, *, most_recent: bool, with_reduced: bool) -> None:
    torch.manual_seed(length)
    entries, states = [], []
    for layer in range(layers):
        count = 1 + layer % 4
        history = torch.rand(length, count) * 3
        history[0, layer % count] = [0.0, 1e-44, float("inf"), 2.5, float("nan")][layer % 5]
        scale, reduced = torch.rand(count) + 0.5, torch.rand(count) if with_reduced else None
        if with_reduced:
            reduced[0] = 0
        fp8_max = FP8_MAX[FMTS[layer % 2]]
        on_device = [
            Guarded(t.numel() * 4) if t is not None else None for t in (history, scale, reduced)
        ]
        for guarded, t in zip(on_device, (history, scale, reduced), strict=True):
            if t is not None:
                guarded.bytes.copy_(t.flatten().view(torch.uint8))
        entries.append((*on_device, count, fp8_max * 0.5))
        states.append((history, scale, reduced, fp8_max, on_device))
    kernels.scale_update(entries, length=length, most_recent=most_recent, few=layers <= 62)()
    for history, scale, reduced, fp8_max, on_device in states:
        expected = reference.delayed_update(
            history, scale, fp8_max, margin=1, most_recent=most_recent, reduced=reduced
        )
        same(on_device[0].read(torch.float32).cpu(), expected[0], "history")
        same(on_device[1].read(torch.float32).cpu(), expected[1], "scale")


def check_dequantize(rows: int, cols: int, name: str, fmt: str, dims: int) -> None:
    generator = torch.Generator(device="cuda").manual_seed(rows + cols)
    ld = ceil_div(cols, 16) * 16
    q = torch.randint(0, 256, (rows, ld), device="cuda", dtype=torch.uint8, generator=generator)
    shape = {
        0: (1, 1),
        1: (ceil_div(cols, 128), rows + 3),
        2: (ceil_div(rows, 128), ceil_div(cols, 128) + 2),
    }[dims]
    scale_inv = torch.rand(shape, device="cuda", generator=generator) + 0.1
    spread = scale_inv
    if dims == 1:
        spread = scale_inv[:, :rows].t().repeat_interleave(128, 1)[:, :cols]
    elif dims == 2:
        spread = (
            scale_inv[:, :-2].repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]
        )
    out = Guarded(rows * cols * FLOATS[name].itemsize)
    kernels.dequantize(
        q, out, scale_inv, rows, cols, ld, fmt, name=name, dims=dims, scale_ld=shape[1]
    )()
    got = out.read(FLOATS[name]).view(rows, cols)
    expected = reference.dequantize(q[:, :cols].contiguous(), spread, fmt, FLOATS[name])
    assert torch.equal(got.isnan(), expected.isnan())
    same(got.where(~got.isnan(), 0), expected.where(~expected.isnan(), 0))


@pytest.mark.parametrize("fmt", FMTS)
@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
class TestShapes:
    def test_cast(self, shape, name, fmt):
        check_cast(*shape, name, fmt)
        check_cast(*shape, name, fmt, offset=1)

    def test_cast_transpose(self, shape, name, fmt):
        for row, column in [(True, True), (False, True), (True, False)]:
            for dbias in (False, True):
                check_cast_transpose(*shape, name, fmt, row=row, column=column, dbias=dbias)
        check_cast_transpose(*shape, name, fmt, offset=3, dbias=False)
        check_cast_transpose(*shape, name, fmt, strip=3)

    @pytest.mark.parametrize("dims", [1, 2])
    def test_cast_block(self, shape, name, fmt, dims):
        for row, column in [(True, True), (False, True), (True, False)]:
            check_cast_block(*shape, name, fmt, dims, row=row, column=column)
        check_cast_block(*shape, name, fmt, dims, pow2=False, eps=2.0, offset=1)

    def test_amax(self, shape, name, fmt):
        check_amax(*shape, name, fmt)
        check_amax(*shape, name, fmt, pow2=True, offset=1)

    @pytest.mark.parametrize("dims", [0, 1, 2])
    def test_dequantize(self, shape, name, fmt, dims):
        check_dequantize(*shape, name, fmt, dims)


@pytest.mark.parametrize("fmt", FMTS)
@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize(
    "value", [0.0, 1e-45, 1e-7, 1e-38, 448.0, 3e38, float("inf"), float("nan"), -5.0]
)
def test_amax_values(value, name, fmt):
    for eps, pow2 in [(0.0, False), (0.0, True), (1e-3, False)]:
        check_amax(33, 40, name, fmt, value=value, eps=eps, pow2=pow2)


@pytest.mark.parametrize("value", [1e-45, 1e-38, 1e-7, 3e38])
@pytest.mark.parametrize("name", FLOATS)
def test_block_scale_extremes(name, value):
    x = torch.full((128, 128), value, device="cuda").to(FLOATS[name])
    for dims, quantize in [(1, reference.quantize_1d), (2, reference.quantize_2d)]:
        expected, expected_scale = quantize(x, "e4m3", pow2=False)
        out, scale_inv = Guarded(x.numel()), Guarded(expected_scale.numel() * 4)
        kernels.cast_block(
            x, out, None, scale_inv, None, "e4m3", name=name, dims=dims, pow2=False
        )()
        same(out.read(), expected)
        same(scale_inv.read(torch.float32), expected_scale)


@pytest.mark.parametrize("image", ["cast", "cast_software"])
@pytest.mark.parametrize("fmt", FMTS)
@pytest.mark.parametrize("name", FLOATS)
def test_every_bit_pattern(name, fmt, image):
    """All 65536 patterns of the 16-bit types, and 4M of f32; by hardware, and in software as on sm_80."""
    if name == "f32":
        bits = torch.randint(-(2**31), 2**31, (1 << 22,), device="cuda", dtype=torch.int64).to(
            torch.int32
        )
    else:
        bits = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16)
    x = bits.view(FLOATS[name])
    if image == "cast_software" and not (kernels.IMAGES / "cast_software.fatbin").exists():
        pytest.skip("cast_software.fatbin is cast.cu as compute_80 PTX; not built")
    for value in (1.0, 2.0**-100, 3.7e4, 1e-6):
        out = Guarded(x.numel())
        kernels.cast(x, out, scalar(value), fmt, name=name, image=image)()
        same(out.read(), reference.quantize_per_tensor(x, value, fmt), f"scale {value}")


def test_noop_leaves_everything():
    x, one = data(130, 136, "bf16"), scalar(1.0)
    out, out_t, scale_inv, amax = (
        Guarded(x.numel()),
        Guarded(136 * 144),
        Guarded(4 * 144),
        Guarded(4),
    )
    scale_inv_t = Guarded(4 * 2 * 136)
    kernels.cast(x, out, one, "e4m3", name="bf16", scale_inv=scale_inv, amax=amax, noop=one)()
    kernels.cast_transpose(
        x, out, out_t, one, "e4m3", name="bf16", ld_t=144, scale_inv=scale_inv, amax=amax, noop=one
    )()
    kernels.cast_block(
        x, out, out_t, scale_inv, scale_inv_t, "e4m3", name="bf16", dims=1, noop=one
    )()
    for buffer in (out, out_t, scale_inv, scale_inv_t, amax):
        assert (buffer.read() == kernels.POISON).all()
    kernels.cast(x, out, one, "e4m3", name="bf16", noop=scalar(0.0))()
    same(out.read(), reference.quantize_per_tensor(x, 1.0, "e4m3"))


@pytest.mark.parametrize("with_reduced", [False, True])
@pytest.mark.parametrize("most_recent", [False, True])
@pytest.mark.parametrize(
    ("length", "layers"), [(1, 3), (2, 5), (16, 62), (256, 7), (257, 7), (1024, 100)]
)
def test_scale_update(length, layers, most_recent, with_reduced):
    check_scale_update(length, layers, most_recent=most_recent, with_reduced=with_reduced)


def check_amax_gather(layers: int) -> None:
    torch.manual_seed(layers)
    counts = [[1, 3, 40][layer % 3] for layer in range(layers)]
    maxima = [torch.rand(count) for count in counts]
    gathered, entries, first = Guarded(4 * sum(counts)), [], 0
    for layer, (count, values) in enumerate(zip(counts, maxima, strict=True)):
        live = Guarded(4 * count)
        live.bytes.copy_(values.view(torch.uint8))
        if layer % 7 == 5:  # a freed layer
            values.zero_()
        entries.append((None if layer % 7 == 5 else live, first, count))
        first += count
    kernels.amax_gather(entries, gathered, few=layers <= 62)()
    same(gathered.read(torch.float32).cpu(), torch.cat(maxima), "gathered")


@pytest.mark.parametrize("layers", [1, 8, 62, 63, 200])
def test_amax_gather(layers):
    check_amax_gather(layers)


def test_column_sums_alone():
    x = data(700, 264, "bf16", special=False)
    dbias, partial, counters = Guarded(264 * 2), Guarded(6 * 264 * 4), Guarded(3 * 4, fill=0)
    kernels.cast_transpose(
        x, None, None, None, "e4m3", name="bf16", dbias=dbias, partial=partial, counters=counters
    )()
    same(dbias.read(torch.bfloat16), reference.column_sums(x))


def test_sanitize():
    """Small cases of every kernel, run under compute-sanitizer."""
    for rows, cols in SMALL:
        check_cast(rows, cols, "bf16", "e4m3")
        check_cast_transpose(rows, cols, "bf16", "e5m2")
        check_cast_transpose(rows, cols, "f32", "e4m3", offset=1, dbias=False)
        check_amax(rows, cols, "f16", "e4m3")
        for dims in (1, 2):
            check_cast_block(rows, cols, "bf16", "e4m3", dims)
            check_cast_block(rows, cols, "f32", "e4m3", dims)
            check_dequantize(rows, cols, "bf16", "e4m3", dims)
    check_scale_update(300, 5, most_recent=False, with_reduced=True)
    check_amax_gather(8)
