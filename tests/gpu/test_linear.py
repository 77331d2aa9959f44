"""The linear layer on the GPU: against FP64 references and the host backend, with streams, graphs and several GPUs."""

import gc
import threading

import pytest
import torch

import te_fast
import te_fast.pytorch as te
from te_fast import dispatch
from te_fast.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

RECIPES = {"delayed": DelayedScaling, "current": Float8CurrentScaling, "block": Float8BlockScaling}
# Relative error in the Frobenius norm. E4M3 has 3 mantissa bits, E5M2 has 2: rounding errors are 2^-4 and 2^-3 of an
# element at most, about 0.4 of the maximum on average, and occur twice in a product.
BOUND = {"y": 0.045, "dx": 0.075, "dw": 0.075, "db": 0.01}


def relative(got, reference):
    return ((got.double() - reference.double()).norm() / reference.double().norm()).item()


def make(rows, inputs, outputs, dtype, device="cuda", **options):
    torch.manual_seed(rows * 7 + inputs + outputs)
    layer = te.Linear(inputs, outputs, device=device, params_dtype=dtype, **options)
    with torch.no_grad():
        layer.weight.normal_(std=0.05)
        if layer.use_bias:
            layer.bias.normal_()
    x = torch.randn(rows, inputs, dtype=dtype, device=device, requires_grad=True)
    grad = torch.randn(rows, outputs, dtype=dtype, device=device)
    return layer, x, grad


def step(layer, x, grad, recipe, **options):
    with te.autocast(recipe=recipe):
        y = layer(x, **options)
    y.backward(grad)
    return y


def reference(layer, x, grad):
    x, w = x.detach().double(), layer.weight.detach().double()
    y = x @ w.t() + (layer.bias.detach().double() if layer.use_bias else 0)
    g = grad.double()
    return {"y": y, "dx": g @ w, "dw": g.t() @ x, "db": g.sum(0)}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape",
    [(256, 1024, 1024), (8, 16, 16), (40, 144, 272), (128, 512, 256), (1000, 784, 1040)],
    ids=str,
)
def test_against_fp64_and_host(name, dtype, shape):
    layer, x, grad = make(*shape, dtype)
    recipe = RECIPES[name]()
    for _ in range(2):  # the second step of delayed scaling has scales that fit
        layer.zero_grad()
        x.grad = None
        y = step(layer, x, grad, recipe)
    expected = reference(layer, x, grad)
    got = {"y": y, "dx": x.grad, "dw": layer.weight.grad, "db": layer.bias.grad}
    for key, value in got.items():
        assert torch.isfinite(value).all(), key
        assert relative(value, expected[key]) < BOUND[key], key
    # The host backend quantises to the same bytes; only the order of sums differs.
    host = te.Linear(*shape[1:], device="cpu", params_dtype=dtype)
    host.load_state_dict(
        {key: value.cpu() for key, value in layer.state_dict().items() if key != "_extra_state"}
    )
    hx = x.detach().cpu().requires_grad_()
    for _ in range(2):
        host.zero_grad()
        hx.grad = None
        hy = step(host, hx, grad.cpu(), recipe)
    same = {"y": hy, "dx": hx.grad, "dw": host.weight.grad, "db": host.bias.grad}
    rounding = {torch.bfloat16: 4e-3, torch.float16: 2e-3, torch.float32: 2e-3}[dtype]
    for key, value in same.items():
        assert relative(got[key].cpu(), value) < rounding, key


@pytest.mark.parametrize("name", RECIPES)
def test_any_rows(name):
    former = te_fast.auto_pad(True)
    try:
        for rows in (1, 3, 7, 9, 13, 17, 129):
            layer, x, grad = make(rows, 256, 128, torch.bfloat16)
            for _ in range(2):
                layer.zero_grad()
                x.grad = None
                y = step(layer, x, grad, RECIPES[name]())
            expected = reference(layer, x, grad)
            for key, value in {"y": y, "dx": x.grad, "dw": layer.weight.grad}.items():
                assert relative(value, expected[key]) < 0.1, (rows, key)
    finally:
        te_fast.auto_pad(former)


@pytest.mark.parametrize("name", RECIPES)
def test_views_and_frozen_parts(name):
    layer, x, grad = make(64, 256, 128, torch.bfloat16)
    recipe = RECIPES[name]()
    with torch.no_grad(), te.autocast(recipe=recipe):
        plain = layer(x)
        offset = torch.empty(64 * 256 + 1, dtype=x.dtype, device="cuda")[1:].view(64, 256).copy_(x)
        assert torch.equal(layer(offset), plain)
        assert torch.equal(layer(x.t().contiguous().t()), plain)
        assert torch.equal(layer(x.view(4, 16, 256)).view(64, 128), plain)
    layer.weight.requires_grad_(False)
    step(layer, x, grad, recipe)
    assert layer.weight.grad is None
    assert relative(x.grad, reference(layer, x, grad)["dx"]) < 0.1
    layer.weight.requires_grad_(True)
    step(layer, x.detach(), grad, recipe)
    assert relative(layer.weight.grad, reference(layer, x, grad)["dw"]) < 0.1


def test_main_grad_is_added_to():
    layer, x, grad = make(64, 256, 128, torch.bfloat16, fuse_wgrad_accumulation=True)
    plain, *_ = make(64, 256, 128, torch.bfloat16)
    recipe = Float8CurrentScaling()
    step(plain, x, grad, recipe)
    layer.weight.main_grad = torch.ones(128, 256, device="cuda")
    step(layer, x, grad, recipe)
    assert layer.weight.grad is None
    assert relative(layer.weight.main_grad - 1, plain.weight.grad) < 4e-3
    step(layer, x, grad, recipe, is_first_microbatch=True)
    assert relative(layer.weight.main_grad, plain.weight.grad) < 4e-3


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("first", [None, False], ids=["requantised", "cached"])
def test_graph_replays_equal_eager(name, first):
    layer, x, grad = make(64, 256, 128, torch.bfloat16)
    recipe = RECIPES[name]()
    inputs = [torch.randn_like(x) for _ in range(4)]
    with te.autocast(recipe=recipe):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():
            layer(x, is_first_microbatch=None if first is None else True)
        torch.cuda.current_stream().wait_stream(side)
        static = x.detach().clone()
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            out = layer(static, is_first_microbatch=first)
        with torch.no_grad():
            expected = [layer(source, is_first_microbatch=first) for source in inputs]
        for i in range(1000):
            static.copy_(inputs[i % 4])
            graph.replay()
            assert torch.equal(out, expected[i % 4]), i
    if first is None:  # a replay sees a weight that was changed after capture
        with torch.no_grad(), te.autocast(recipe=recipe):
            layer.weight.mul_(0.5)
            graph.replay()
            assert torch.equal(out, layer(static))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("loss", ["sum", "given"])
def test_delayed_gradients_outside_of_fp8_have_the_bits_of_autograd(loss, bias):
    options = {"bias": bias, "device": "cuda", "params_dtype": torch.float32}
    now, later = (
        te.Linear(128, 512, delay_wgrad_compute=delay, **options) for delay in (False, True)
    )
    later.load_state_dict(now.state_dict())
    x, grad = torch.randn(32, 2, 128, device="cuda"), torch.randn(32, 2, 512, device="cuda")
    for layer in (now, later):
        y = layer(x)
        y.sum().backward() if loss == "sum" else y.backward(grad)
    later.backward_dw()
    assert torch.equal(now.weight.grad, later.weight.grad)


@pytest.mark.parametrize("change", ["other layouts", "dropped"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_graph_reads_the_weight_that_it_captured(name, change):
    """The captured weight's memory must live on when the layer keeps another weight."""
    layer, x, grad = make(64, 256, 128, torch.bfloat16)
    recipe, static = RECIPES[name](), x.detach().clone()
    with torch.no_grad(), te.autocast(recipe=recipe):  # no_grad leaves the scales
        expected = layer(static, is_first_microbatch=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(static, is_first_microbatch=False)
    if change == "dropped":
        dispatch.drop_weight_cache(layer)
    else:
        # With gradients, the weight is kept in both layouts.
        with te.autocast(recipe=recipe, _graph=True):
            layer(x, is_first_microbatch=True)
    junk = [torch.full((64 << 10,), 77, dtype=torch.uint8, device="cuda") for _ in range(64)]
    graph.replay()
    assert torch.equal(out, expected)
    del junk


def test_whole_step_in_a_graph():
    layer, x, grad = make(64, 256, 128, torch.bfloat16)
    recipe = Float8CurrentScaling()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            layer.zero_grad(set_to_none=True)
            x.grad = None
            step(layer, x, grad, recipe)
    torch.cuda.current_stream().wait_stream(side)
    layer.zero_grad(set_to_none=True)
    x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(layer, x, grad, recipe)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        layer.weight.add_(0.01)
    graph.replay()
    torch.cuda.synchronize()
    dx, dw = x.grad.clone(), layer.weight.grad.clone()
    layer.zero_grad(set_to_none=True)
    x.grad = None
    step(layer, x, grad, recipe)
    assert torch.equal(x.grad, dx)
    assert torch.equal(layer.weight.grad, dw)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
def test_a_graph_skips_its_weight_where_the_flag_says(name, warm):
    layer, x, grad = make(64, 256, 128, torch.bfloat16, bias=False)
    recipe, manager = RECIPES[name](), te.FP8GlobalStateManager
    manager.set_skip_fp8_weight_update_tensor(False)
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2 if warm else 0):
                with te.autocast(recipe=recipe, _graph=True):
                    layer(x).backward(grad)
        torch.cuda.current_stream().wait_stream(side)
        layer.weight.grad = x.grad = None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), te.autocast(recipe=recipe, _graph=True):
            y = layer(x, is_first_microbatch=False)
            y.backward(grad)
        for _ in range(2):  # delayed scaling updates the gradient's scale, which settles
            graph.replay()
        seen = []
        for factor, skip in ((1, False), (-2, True), (1, False), (4, True), (1, True)):
            with torch.no_grad():
                layer.weight.mul_(factor)
            manager.set_skip_fp8_weight_update_tensor(skip)
            junk = [torch.full((256, 256), 77, device="cuda") for _ in range(4)]
            graph.replay()
            seen.append((y.clone(), x.grad.clone(), layer.weight.grad.clone()))
            del junk
    finally:
        manager.reset()
    for (y0, dx0, dw0), (y1, dx1, dw1) in (
        (seen[0], seen[1]),
        (seen[2], seen[3]),
        (seen[3], seen[4]),
    ):
        assert torch.equal(y0, y1)
        assert torch.equal(dx0, dx1)
        assert torch.equal(dw0, dw1)
    # Delayed scaling's scale does not change, so that the smallest numbers round differently.
    bound = 0.02 if name == "delayed" else 0
    assert relative(seen[2][0], -2 * seen[0][0]) <= bound
    assert relative(seen[2][1], -2 * seen[0][1]) <= bound
    with torch.no_grad():
        layer.weight.mul_(0.25)  # as in the last quantisation
    expected = reference(layer, x, grad)
    assert relative(seen[4][0], expected["y"]) < 0.1
    assert relative(seen[4][1], expected["dx"]) < 0.1


def test_two_threads_on_two_streams():
    layer, x, grad = make(256, 512, 512, torch.bfloat16)
    layers = [make(256, 512, 512, torch.bfloat16)[0] for _ in range(2)]
    recipe = Float8CurrentScaling()
    inputs = [torch.randn_like(x) for _ in range(2)]
    with torch.no_grad(), te.autocast(recipe=recipe):
        expected = [(layers[i](inputs[i]), layer(inputs[i])) for i in range(2)]
        torch.cuda.synchronize()
        failures = []

        def work(i):
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(300):
                    own, shared = layers[i](inputs[i]), layer(inputs[i])
                torch.cuda.current_stream().synchronize()
                if not (torch.equal(own, expected[i][0]) and torch.equal(shared, expected[i][1])):
                    failures.append(i)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    assert not failures


def test_memory_is_flat():
    layer, x, grad = make(256, 512, 512, torch.bfloat16)
    recipe = DelayedScaling()
    levels = []
    for i in range(1000):
        layer.zero_grad()
        x.grad = None
        step(layer, x, grad, recipe)
        if i in (99, 999):
            gc.collect()
            torch.cuda.synchronize()
            levels.append(
                (torch.cuda.memory_allocated(), dispatch.inventory()["cuda:0"]["private_bytes"])
            )
    assert levels[0] == levels[1]


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("name", RECIPES)
def test_bytes_kept_for_backward(name, frozen):
    layer, x, _ = make(4096, 4096, 1024, torch.bfloat16, bias=False)
    layer.weight.requires_grad_(not frozen)
    with te.autocast(recipe=RECIPES[name]()):
        layer(x, is_first_microbatch=True)  # the quantised weight is cached from now on
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y = layer(x, is_first_microbatch=False)
        kept = torch.cuda.memory_allocated() - before - y.numel() * y.element_size()
    assert kept <= (0 if frozen else 1.02 * x.numel())


@pytest.mark.parametrize("name", RECIPES)
def test_a_trained_weight_leaves_its_column_layout_to_backward_alone(name):
    gc.collect()  # what other tests have left must not go in the middle of this one
    layer, x, grad = make(256, 4096, 4096, torch.bfloat16, bias=False)
    elements = layer.weight.numel()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(3):
        x.grad = layer.weight.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with te.autocast(recipe=RECIPES[name]()):
            y = layer(x)
        behind_forward = torch.cuda.memory_allocated() - before - y.numel() * y.element_size()
        # torch rounds the size of a large allocation up to 2 MiB.
        assert elements <= behind_forward <= 1.05 * elements + x.numel() + (2 << 20)
        y.backward(grad)
        gradients = x.grad.nbytes + layer.weight.grad.nbytes + y.nbytes
        assert torch.cuda.memory_allocated() - before <= gradients + 0.02 * elements + (2 << 20)
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_scales_kept_as_bytes(dtype):
    """The scales are the host's, and the weight's gradient equals the gradient by FP32 scales."""
    rows, width = 384, 512  # whole blocks: no gap in the kept buffer
    first, x, grad = make(rows, width, 256, dtype, bias=False)
    with torch.no_grad():
        info = torch.finfo(dtype)
        edges = [0.0, -0.0, info.max, info.tiny, info.smallest_normal / 4]
        for column, value in enumerate(edges):
            x[:256, column] = value
        x[200, 7], x[201, 8] = float("inf"), float("nan")
    kept, gradients = [], []
    for device, again in (("cuda", False), ("cuda", True), ("cpu", False)):
        options = {"device": device, "params_dtype": dtype, "save_original_input": again}
        layer = te.Linear(width, 256, bias=False, **options)
        layer.load_state_dict(first.state_dict())
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
        ):
            step(layer, x.detach().to(device), grad.to(device), Float8BlockScaling())
        gradients.append(layer.weight.grad)
    kept = [tensor.cpu() for tensor in kept if tensor.dtype == torch.uint8]
    assert len(kept) == 2
    assert kept[0].numel() == rows * width + rows // 128 * width
    assert torch.equal(kept[0], kept[1])
    got, wanted = (gradient.nan_to_num(nan=-1.5) for gradient in gradients[:2])
    assert torch.equal(got, wanted)


def test_more_than_2_to_31_elements():
    rows, inputs = (1 << 31) // 4096 + 128, 4096
    layer = te.Linear(inputs, 64, device="cuda", params_dtype=torch.bfloat16, bias=False)
    x = torch.randn(rows, inputs, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    with te.autocast(recipe=Float8CurrentScaling()):
        y = layer(x)
    tail = slice(rows - 256, rows)
    assert relative(y[tail], x[tail].double() @ layer.weight.double().t()) < 0.06
    y.backward(torch.ones_like(y))
    expected = torch.ones(256, 64, device="cuda", dtype=torch.float64) @ layer.weight.double()
    assert relative(x.grad[tail], expected) < 0.06


@pytest.mark.parametrize("rows", [65536, 131072])
@pytest.mark.parametrize("name", RECIPES)
def test_long_contractions(name, rows):
    """The weight's gradient of a small layer: cuBLAS would split the contraction with a faulty algorithm."""
    layer, x, grad = make(rows, 128, 64, torch.bfloat16, bias=False)
    for _ in range(2):
        layer.zero_grad()
        x.grad = None
        step(layer, x, grad, RECIPES[name]())
    assert relative(layer.weight.grad, reference(layer, x, grad)["dw"]) < BOUND["dw"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_a_device_that_is_not_current():
    for current, device in ((0, "cuda:1"), (1, "cuda:0")):
        with torch.cuda.device(current):
            for recipe in RECIPES.values():
                layer, x, grad = make(64, 256, 128, torch.bfloat16, device=device)
                for _ in range(2):
                    layer.zero_grad()
                    x.grad = None
                    y = step(layer, x, grad, recipe())
                assert torch.cuda.current_device() == current
                assert y.device == x.grad.device == torch.device(device)
                expected = reference(layer, x, grad)
                for key, value in {"y": y, "dx": x.grad, "dw": layer.weight.grad}.items():
                    assert relative(value, expected[key]) < BOUND[key], key
    assert dispatch.counters()["guard_switches"] > 0


@pytest.mark.filterwarnings("ignore:.*Recipe type changed:UserWarning")
def test_nan_weight_gives_nan():
    layer, x, _ = make(16, 64, 32, torch.bfloat16)
    with torch.no_grad():
        layer.weight[3, 5] = float("nan")
    for recipe in RECIPES.values():
        with te.autocast(recipe=recipe()), torch.no_grad():
            y = layer(x)
        assert y[:, 3].isnan().all()
        assert torch.isfinite(y[:, :3]).all()


def test_host_tensor_to_a_cuda_layer_is_an_error():
    layer, x, _ = make(16, 64, 32, torch.bfloat16)
    with (
        te.autocast(recipe=DelayedScaling()),
        pytest.raises(RuntimeError, match="must be on cuda:0"),
    ):
        layer(x.detach().cpu())
    layer.bias = torch.nn.Parameter(layer.bias.detach().cpu())
    with (
        te.autocast(recipe=DelayedScaling()),
        pytest.raises(
            RuntimeError, match="parameter bias is on cpu, and parameter weight on cuda:0"
        ),
    ):
        layer(x.detach())
