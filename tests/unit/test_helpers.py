"""The small functions of te_fast.pytorch.utils, beside what torch and Python do."""

import contextlib
import math

import pytest
import torch
import torch.distributed as dist

import te_fast.pytorch as te
from te_fast.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    RanksError,
    ShapeError,
    StateError,
)
from te_fast.pytorch import utils
from te_fast.runtime.collectives import named


@pytest.mark.parametrize(
    ("init", "std"),
    [
        (utils.init_method_normal(0.5), 0.5),
        (utils.scaled_init_method_normal(0.5, 8), 0.5 / math.sqrt(16)),
        (utils.get_default_init_method(), 0.023),
    ],
)
def test_normal_values(init, std):
    torch.manual_seed(1)
    tensor = torch.empty(64, 32, dtype=torch.float64)
    assert init(tensor) is tensor
    torch.manual_seed(1)
    assert torch.equal(tensor, torch.empty_like(tensor).normal_(0.0, std))


@pytest.mark.parametrize("value", [0.0, 1.0, -2.5, math.inf])
def test_constant_values(value):
    parameter = torch.nn.Parameter(torch.randn(3, 2))
    assert utils.init_method_constant(value)(parameter) is parameter
    assert (parameter == value).all()


@pytest.mark.parametrize("numerator", [0, 1, 7, 8, 9, 128])
@pytest.mark.parametrize("denominator", [1, 8, 3])
def test_division(numerator, denominator):
    up = math.ceil(numerator / denominator)
    assert utils.ceil_div(numerator, denominator) == up
    assert utils.round_up_to_nearest_multiple(numerator, denominator) == up * denominator
    if numerator % denominator:
        with pytest.raises(ValueError, match=f"{numerator} is not divisible by {denominator}"):
            utils.divide(numerator, denominator)
    else:
        assert utils.divide(numerator, denominator) == up
        assert utils.ensure_divisibility(numerator, denominator) is None


def test_division_by_zero():
    with pytest.raises(ArgumentError, match="ceil_div: denominator"):
        utils.ceil_div(1, 0)
    with pytest.raises(ArgumentError, match="multiple must not be 0"):
        utils.round_up_to_nearest_multiple(1, 0)


@pytest.mark.parametrize(
    ("shape", "fits"),
    [((8, 16), True), ((0, 0), True), ((7, 16), False), ((8, 15), False), ((16, 32), True)],
)
def test_shapes_for_fp8(shape, fits):
    x = torch.empty(shape)
    assert utils.check_dim_for_fp8_exec(x) is fits
    assert utils.check_dim_for_fp8_exec(x[None]) is False
    check = contextlib.nullcontext() if fits else pytest.raises(ShapeError, match="multiple of 8")
    with check:
        utils.assert_dim_for_fp8_exec(torch.empty(2, 4, 16), x[None])


def test_questions_of_tensors():
    leaf = torch.ones(2, requires_grad=True)
    assert utils.requires_grad(None, torch.ones(2), leaf * 2) is True
    assert utils.requires_grad(None, torch.ones(2), leaf.detach()) is False
    assert utils.requires_grad() is False
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device="cpu")
    assert utils.needs_quantized_gemm(quantizer(torch.ones(16, 16))) is True
    for plain in (torch.ones(2), torch.nn.Parameter(torch.ones(2))):
        assert utils.needs_quantized_gemm(plain) is False
        assert utils.needs_quantized_gemm(plain, rowwise=False) is False


def test_a_context_manager_is_tried():
    entered = []

    @contextlib.contextmanager
    def context():
        entered.append(True)
        yield

    assert utils.validate_ctx_manager(context) is None
    assert entered == [True]
    for wrong in (lambda: 3, lambda: 1 / 0, 3):
        with pytest.raises(ValueError, match="context manager") as caught:
            utils.validate_ctx_manager(wrong)
        assert caught.value.__cause__ is not None


class Tracker:
    def get_states(self):
        return {}

    def set_states(self, states):
        pass

    def fork(self, name="states"):
        return contextlib.nullcontext()


def test_a_tracker_is_checked():
    assert utils.validate_rng_states_func(Tracker) is None
    with pytest.raises(DtypeError, match="must be a function, got Tracker"):
        utils.validate_rng_states_func(Tracker())
    with pytest.raises(StateError, match=r"get_rng_tracker\(\) has failed"):
        utils.validate_rng_states_func(lambda: [][0])
    for name in ("get_states", "set_states", "fork"):
        lacking = type("Lacking", (Tracker,), {name: None})
        with pytest.raises(TypeError, match=f"method {name}, which Lacking lacks"):
            utils.validate_rng_states_func(lacking)
    broken = type("Broken", (Tracker,), {"fork": lambda self: 3})
    with pytest.raises(ArgumentError, match="context manager"):
        utils.validate_rng_states_func(broken)


def test_views_are_refused():
    base = torch.ones(2, 3)
    assert utils.assert_viewless_tensor(base) is base
    assert utils.assert_viewless_tensor("text") == "text"
    assert utils.assert_viewless_tensor([base, 3]) == [base, 3]
    for view in (base[0], [base, base[0]]):
        with pytest.raises(ValueError, match=r"a view \[3\] of a tensor \[2, 3\].*hint"):
            utils.assert_viewless_tensor(view, "hint")
    with pytest.raises(ArgumentError, match=r"new data has shape \[4\]"):
        utils.safely_set_viewless_tensor_data(base[0], torch.zeros(4))
    new = torch.zeros(4)
    utils.safely_set_viewless_tensor_data(base, new)
    assert base.data_ptr() == new.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_freed(dtype):
    x = torch.ones(2, 3, dtype=dtype)
    kept = torch.ones(3)
    kept._do_not_clear = True
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device="cpu")
    quantized = quantizer(torch.ones(16, 16))
    protected = quantizer(torch.ones(16, 16))
    protected._data._do_not_clear = True
    utils.clear_tensor_data(x, None, kept, quantized)
    assert (x.shape, x.dtype) == ((0,), dtype)
    assert kept.shape == (3,)
    assert quantized._data.numel() == 0


def test_casts():
    x = torch.randn(3, requires_grad=True)
    assert utils.cast_if_needed(None, torch.float32) is None
    assert utils.cast_if_needed(x, torch.float32) is x
    with torch.no_grad():
        cast = utils.cast_if_needed(x, torch.bfloat16)
    assert torch.equal(cast, x.bfloat16())
    cast.sum().backward()
    assert torch.equal(x.grad, torch.ones(3))


def test_masked_scores_and_cached_ones():
    scores = torch.tensor([[0.5, math.nan], [math.inf, 1.0]])
    mask = torch.tensor([[False, True], [True, False]])
    assert utils.attention_mask_func(scores, mask) is scores
    assert scores.tolist() == [[0.5, -10000.0], [-10000.0, 1.0]]
    device = torch.device("cpu")
    with torch.inference_mode():
        ones = utils.get_cached_ones_tensor(3, torch.float64, device)
    assert not ones.is_inference()
    assert torch.equal(ones, torch.ones(3, dtype=torch.float64))
    assert utils.get_cached_ones_tensor(3, torch.float64, device) is ones
    assert utils.get_cached_ones_tensor(4, torch.float64, device) is not ones


def test_devices_and_types(monkeypatch):
    cpu, second = torch.device("cpu"), torch.device("cuda", 1)
    assert utils.canonicalize_dtype(None) is torch.get_default_dtype()
    assert utils.canonicalize_dtype(torch.float16) is torch.float16
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert utils.canonicalize_device("cuda:1") == second
    assert utils.canonicalize_device(cpu) == utils.canonicalize_device(None) == cpu
    assert utils.devices_match("cuda", torch.device("cuda"))
    assert not utils.devices_match(cpu, second)
    assert utils.devices_match("cuda:1", second)
    for call in (
        lambda: utils.canonicalize_device("cuda"),
        lambda: utils.devices_match("cuda", second),
        utils.get_sm_count,
    ):
        with pytest.raises(DeviceError, match="GPU"):
            call()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert utils.canonicalize_device(None) == utils.canonicalize_device("cuda") == second
    assert utils.devices_match("cuda", second)
    assert not utils.devices_match("cuda:0", "cuda")


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((9, 0), False), ((10, 0), True), ((11, 0), True), ((12, 0), False), ((13, 0), True)],
)
def test_layouts_of_fp8_products(monkeypatch, capability, expected):
    from te_fast.helpers import machine

    monkeypatch.setattr(machine, "get_device_compute_capability", lambda: capability)
    assert utils.is_non_tn_fp8_gemm_supported() is expected


@pytest.mark.parametrize(
    ("number", "expected"),
    [(None, (0, 0, 0)), (8907, (8, 9, 7)), (90201, (9, 2, 1)), (92600, (9, 26, 0))],
)
def test_the_version_of_cudnn(monkeypatch, number, expected):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: number)
    assert utils.get_cudnn_version() == te.get_cudnn_version() == expected


def test_autocast_of_the_gpu():
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        assert utils.torch_get_autocast_gpu_dtype() is torch.bfloat16
    finally:
        torch.set_autocast_dtype("cuda", before)
    assert utils.gpu_autocast_ctx.keywords == {"device_type": "cuda"}


@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
def test_process_groups(tmp_path):
    group = object()
    assert utils.canonicalize_process_group(group) is group
    with pytest.raises(RanksError, match="init_process_group"):
        utils.canonicalize_process_group(None)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert utils.canonicalize_process_group(None) is dist.group.WORLD
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
def test_a_collective_on_a_device_without_a_backend_says_how_to_get_one(tmp_path):
    """Parameters that FSDP2 offloads lie on the CPU, which a group of NCCL does not serve."""
    options = {"init_method": f"file://{tmp_path}/store", "rank": 0, "world_size": 1}
    dist.init_process_group("cuda:gloo", **options)
    try:
        match = r"FSDP2: .* init_process_group\('cpu:gloo,cuda:nccl'\)"
        with pytest.raises(RanksError, match=match), named("FSDP2", "a collective"):
            dist.all_reduce(torch.ones(1))
    finally:
        dist.destroy_process_group()


def test_comparisons(capsys, monkeypatch):
    a = torch.tensor([1.0, math.inf])
    assert utils.all_close(a, a + 1e-9)
    assert not utils.all_close(a, torch.tensor([1.1, math.inf]))
    utils.compare_tensors(torch.ones(2), torch.ones(3))
    utils.compare_tensors(torch.tensor([1.0, 5.0]), torch.tensor([3.0, 4.0]))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Tensors have different shape"
    assert lines[-1] == "max err=2.0, max a=5.0, max b=4.0"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    utils.print_rank_0("of another rank")
    assert capsys.readouterr().out == ""


@pytest.fixture
def ranges(monkeypatch):
    from te_fast import _config

    told = []
    monkeypatch.setattr(_config, "nvtx_is_enabled", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda msg: told.append(msg))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: told.append(None))
    return told


def test_nvtx_ranges(ranges):
    utils.nvtx_range_push("outer")
    utils.nvtx_range_push("inner")
    utils.nvtx_range_pop("inner")
    utils.nvtx_range_pop()
    with utils.get_nvtx_range_context("both"):
        pass
    assert ranges == ["outer", "inner", None, None, "both", None]
    with pytest.raises(StateError, match="no range is open"):
        utils.nvtx_range_pop()
    utils.nvtx_range_push("outer")
    with pytest.raises(ValueError, match="'outer', got 'other'"):
        utils.nvtx_range_pop("other")


def test_nvtx_ranges_are_off_by_default(monkeypatch):
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", None)
    utils.nvtx_range_push("x")
    utils.nvtx_range_pop("y")
    with utils.get_nvtx_range_context("z"):
        pass


def test_nvtx_ranges_are_on_by_the_environment(fresh):
    code = (
        "import os; os.environ['NVTE_NVTX_ENABLED'] = '1'\n"
        "from te_fast.pytorch.utils import nvtx_range_pop\n"
        "try:\n    nvtx_range_pop()\nexcept RuntimeError as error:\n    print('empty' in str(error) or error)"
    )
    assert "no range is open" in fresh(code)
