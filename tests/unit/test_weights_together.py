"""All weights that an optimizer has changed are quantised by one launch, with the same numbers as one by one."""

import copy
import gc
import itertools
import struct
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import reference as ref
import te_fast.pytorch as te
from linear_layers import casts
from recipes import RECIPES, name_of
from selection import quickly, sampled
from te_fast import dispatch
from te_fast.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

HIDDEN = 64
TOGETHER = {
    "delayed": ["cast_many_bf16_e4m3"],
    "current": ["cast_current_many_bf16_e4m3"],
    "block": ["cast_block_many_bf16_e4m3"],
}


def model(dtype=torch.bfloat16, **options):
    """Layers of all kinds, with five weights."""
    options = {"params_dtype": dtype, "device": "cpu", **options}
    return torch.nn.Sequential(
        te.Linear(HIDDEN, 48, **options),
        te.Linear(48, HIDDEN, **options),
        te.LayerNormLinear(HIDDEN, HIDDEN, **options),
        te.LayerNormMLP(HIDDEN, 160, **options),
    )


def forward(layers, x, recipe, **options):
    with te.autocast(recipe=recipe):
        for layer in layers:
            x = layer(x, **options)
    return x


def trained(layers, recipe, steps=2, optimizer=torch.optim.SGD, **options):
    """Run training steps and return the optimizer; the next forward then follows an optimizer step."""
    optimizer = optimizer(layers.parameters(), lr=1e-3)
    for _ in range(steps):
        x = torch.randn(32, HIDDEN, dtype=torch.bfloat16)
        optimizer.zero_grad()
        forward(layers, x, recipe, **options).float().square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    return optimizer


def trained_again(layers, recipe):
    trained(layers, recipe, steps=1)
    return layers


def launches_of(function):
    with dispatch.record() as launches:
        result = function()
    return [launch.name for launch in launches], result


def entries_of(launch):
    """Addresses of rows and columns, rows and columns of each tensor of a launch."""
    tensors = (len(launch.params) - 32) // 60
    count = struct.unpack_from("<I", launch.params, 8)[0]
    entries = struct.iter_unpack("<6Q2I", launch.params[32 + 4 * tensors :])
    return [(row, col, sizes) for _, row, col, _, _, _, *sizes in [*entries][:count]]


def together_in(names):
    return [name for name in names if "_many_" in name]


def alone(layers):
    """A copy of the layers and scales, whose weights have never been quantised together with others."""
    return copy.deepcopy(layers)


def gradients(layers):
    return [parameter.grad for parameter in layers.parameters()]


#: torch's fused optimizers write parameters without counting versions.
OPTIMIZERS = {
    "SGD": torch.optim.SGD,
    "AdamW": torch.optim.AdamW,
    "fused AdamW": partial(torch.optim.AdamW, fused=True),
}


@pytest.mark.parametrize(("recipe", "optimizer"), sampled(RECIPES, OPTIMIZERS), indirect=["recipe"])
def test_one_launch_quantises_all_weights_of_a_model(recipe, optimizer):
    layers = model()
    optimizer = trained(layers, recipe, optimizer=OPTIMIZERS[optimizer])
    x = torch.randn(32, HIDDEN, dtype=torch.bfloat16)
    expected = TOGETHER[name_of(recipe)]
    for _ in range(2):
        other = alone(layers)
        before = dispatch.counters()["weight_casts"]
        names, y = launches_of(lambda: forward(layers, x, recipe))
        assert dispatch.counters()["weight_casts"] - before == 5
        assert together_in(names) == expected
        names, wanted = launches_of(lambda: forward(other, x, recipe))  # noqa: B023
        assert not together_in(names)
        assert torch.equal(y, wanted)
        gradient = torch.randn_like(y)
        y.backward(gradient)
        wanted.backward(gradient)
        assert all(map(torch.equal, gradients(layers), gradients(other)))
        optimizer.step()
        optimizer.zero_grad()


def test_parameters_that_take_the_place_of_others_in_an_optimizer(recipe):
    """The optimizer has as many parameters as before, and its writes to the new parameters must be noticed."""
    layers = model()
    optimizer = trained(layers, recipe, optimizer=OPTIMIZERS["fused AdamW"])
    for module in layers.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(parameter.detach().clone()))
    optimizer.state.clear()
    optimizer.param_groups[0]["params"] = list(layers.parameters())
    x = torch.randn(32, HIDDEN, dtype=torch.bfloat16)
    for _ in range(2):
        forward(layers, x, recipe).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    names, _ = launches_of(lambda: forward(layers, x, recipe))
    assert together_in(names) == TOGETHER[name_of(recipe)]


def test_a_forward_that_finds_its_weights_fresh_launches_nothing_for_them(recipe):
    layers = model()
    trained(layers, recipe)
    x = torch.randn(32, HIDDEN, dtype=torch.bfloat16)
    with torch.no_grad():
        forward(layers, x, recipe)
        assert casts(lambda: forward(layers, x, recipe)) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bytes_and_scales_are_those_of_the_recipe(recipe, dtype):
    """The reference is independent torch code, and the weights have edge cases of rounding."""
    layers = torch.nn.ModuleList(
        te.Linear(inputs, outputs, bias=False, params_dtype=dtype, device="cpu")
        for inputs, outputs in [(144, 272), (16, 32), (128, 128), (304, 16)]
    )
    optimizer = torch.optim.SGD(layers.parameters(), lr=1.0)
    special = torch.tensor([0.0, -0.0, 1e-7, -1e-7, 448.0, -500.0, 3e4, 2**-9])

    def run():
        with te.autocast(recipe=recipe):
            for layer in layers:
                layer(torch.ones(16, layer.in_features, dtype=dtype), is_first_microbatch=True)

    run()
    for layer in layers:
        layer.weight.grad = torch.randn_like(layer.weight)
        layer.weight.grad.view(-1)[: len(special)] = special.to(dtype)
    layers[1].weight.grad.zero_()
    optimizer.step()
    with torch.no_grad():
        layers[1].weight.mul_(0.0)
        layers[2].weight[0, :3] = torch.tensor([float("inf"), float("nan"), -1.0])
    scales = [_weight_scale(layer) for layer in layers]
    names, _ = launches_of(run)
    assert len(together_in(names)) == len(TOGETHER[name_of(recipe)])
    for layer, scale in zip(layers, scales, strict=True):
        weight = layer.weight.detach()
        (buffer,) = layer._fp8_workspaces.values()
        got = buffer[: weight.numel()].view(weight.shape)
        if name_of(recipe) == "block":
            wanted, _ = ref.quantize_2d(weight, "e4m3")
        else:
            if name_of(recipe) == "current":
                scale = ref.amax_to_scale(ref.amax_of(weight), 448.0)
            else:
                amax = layer.fp8_meta["scaling_fwd"].amax_history[-1][1]
                # A maximum of zero does not roll the history.
                assert ref.amax_of(weight) in (amax, 0)
            wanted = ref.quantize_per_tensor(weight, scale, "e4m3")
        assert torch.equal(got, wanted)


def _weight_scale(layer):
    state = layer.fp8_meta.get("scaling_fwd")
    return None if state is None else state.scale[1].clone()


def test_a_weight_that_changes_between_the_layers_is_quantised_again(recipe):
    layers = model()
    trained(layers, recipe)

    def halve(module, _):
        with torch.no_grad():
            module.weight.mul_(0.5)

    x = torch.randn(32, HIDDEN, dtype=torch.bfloat16)
    other = alone(layers)
    halve(other[2], None)
    layers[2].register_forward_pre_hook(halve)
    names, y = launches_of(lambda: forward(layers, x, recipe))
    assert together_in(names)
    assert torch.equal(y, forward(other, x, recipe))


def test_a_parameter_that_is_exchanged_between_the_layers_is_read(recipe):
    layers = model()
    trained(layers, recipe)
    x = torch.randn(32, HIDDEN, dtype=torch.bfloat16)
    other = alone(layers)
    with torch.no_grad():
        other[1].weight.neg_()
    exchanged = torch.nn.Parameter(other[1].weight.detach().clone())
    layers[1].register_forward_pre_hook(lambda module, _: setattr(module, "weight", exchanged))
    assert torch.equal(forward(layers, x, recipe), forward(other, x, recipe))


class _RawOptimizer(torch.optim.Optimizer):
    """Writes past torch's version counters, as sharded optimizers do, whose gathers may still be under way."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(group["lr"] * parameter.grad.sign())


def test_what_is_written_behind_torchs_back_is_read_by_its_own_layer_alone(recipe):
    layers = model()
    trained(layers, recipe, optimizer=_RawOptimizer)
    x = torch.randn(32, HIDDEN, dtype=torch.bfloat16)
    arriving = layers[2].weight.data * 2
    layers[2].register_forward_pre_hook(lambda module, _: module.weight.data.copy_(arriving))
    other = alone(layers)
    names, y = launches_of(lambda: forward(layers, x, recipe))
    assert not together_in(names)
    assert torch.equal(y, forward(other, x, recipe))


def test_a_hook_in_front_of_a_layer_may_write_its_weight(recipe):
    layers = model()
    optimizer = trained(layers, recipe)

    def halve(module, _):
        module.weight.data.mul_(0.5)

    layers[1].register_forward_pre_hook(halve)
    x = torch.randn(32, HIDDEN, dtype=torch.bfloat16)
    for _ in range(3):
        other = alone(layers)
        y = forward(layers, x, recipe)
        assert torch.equal(y, forward(other, x, recipe))
        y.float().square().mean().backward()
        optimizer.step()


def test_frozen_weights_take_no_part(recipe):
    layers = model()
    layers[0].requires_grad_(requires_grad=False)
    trained(layers, recipe, steps=3)
    x = torch.randn(32, HIDDEN, dtype=torch.bfloat16)
    names, _ = launches_of(lambda: forward(layers, x, recipe))
    assert together_in(names) == TOGETHER[name_of(recipe)]
    # Under delayed scaling the frozen weight is quantised again, with another scale.
    expected = 5 if name_of(recipe) == "delayed" else 4
    layers = trained_again(layers, recipe)
    assert casts(lambda: forward(layers, x, recipe)) == expected


@pytest.mark.parametrize("recipe", quickly(RECIPES, "delayed", slow=RECIPES), indirect=True)
def test_a_layer_that_is_left_out_keeps_no_memory_and_is_right_when_it_comes_back(recipe):
    layers = model()
    optimizer = trained(layers, recipe)
    x = torch.randn(32, HIDDEN, dtype=torch.bfloat16)
    rest = torch.nn.Sequential(layers[2], layers[3])
    gc.collect()
    before = _buffers()
    y = forward(rest, x, recipe)
    del y
    assert _buffers() == before
    for _ in range(3):
        forward(layers, x, recipe).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        other = alone(layers)
        assert torch.equal(forward(layers, x, recipe), forward(other, x, recipe))


def test_a_layer_that_is_left_out_notes_no_maximum():
    recipe = DelayedScaling(amax_history_len=4)
    layers = model()
    trained(layers, recipe)
    x = torch.randn(32, HIDDEN, dtype=torch.bfloat16)
    names, _ = launches_of(lambda: forward(torch.nn.Sequential(layers[2], layers[3]), x, recipe))
    assert together_in(names)
    for layer in layers:
        assert not layer.fp8_meta["scaling_fwd"].amax_history[0].any()


def _buffers():
    """The number of byte tensors that are alive."""
    return sum(
        type(object_) is torch.Tensor and object_.dtype == torch.uint8
        for object_ in gc.get_objects()
    )


@pytest.mark.parametrize(("recipe", "first"), sampled(RECIPES, [True, None]), indirect=["recipe"])
def test_microbatches(recipe, first):
    layers = model()
    x = torch.randn(32, HIDDEN, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(layers.parameters(), lr=1e-3)

    def accumulate(layers):
        total = []
        for index in range(3):
            kwargs = {} if first is None else {"is_first_microbatch": index == 0}
            y = forward(layers, x, recipe, **kwargs)
            y.float().sum().backward()
            total.append(y.detach())
        return total

    for step in range(3):
        other = alone(layers)
        expected = 5
        if first is None and name_of(recipe) == "delayed":
            expected = 15  # every region has scales of its own
        elif first is None and step == 0:
            expected = 10  # the second microbatch is the first to find that weights are used again
        got = []
        assert casts(lambda: got.extend(accumulate(layers))) == expected  # noqa: B023
        assert all(map(torch.equal, got, accumulate(other)))
        assert all(map(torch.equal, gradients(layers), gradients(other)))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("recipe", "reentrant"), sampled(RECIPES, [False, True]), indirect=["recipe"]
)
def test_what_checkpoints_repeat_in_backward_is_quantised_one_by_one(recipe, reentrant):
    layers = model()
    optimizer = torch.optim.SGD(layers.parameters(), lr=1e-3)
    x = torch.randn(32, HIDDEN, dtype=torch.bfloat16, requires_grad=True)

    def run(layers):
        y = x
        with te.autocast(recipe=recipe):
            for layer in layers:
                if isinstance(recipe, DelayedScaling):
                    y = te.checkpoint(layer, y, use_reentrant=reentrant)
                else:
                    y = checkpoint(layer, y, use_reentrant=reentrant)
        return y

    for step in range(3):
        other = alone(layers)
        y, wanted = run(layers), run(other)
        assert torch.equal(y, wanted)
        gradient = torch.randn_like(y)
        names, _ = launches_of(lambda: y.backward(gradient))  # noqa: B023
        assert not together_in(names), step
        wanted.backward(gradient)
        assert all(map(torch.equal, gradients(layers), gradients(other)))
        optimizer.step()
        optimizer.zero_grad()


def test_weights_in_parts_take_part(recipe):
    split = te.Linear(
        HIDDEN,
        96,
        bias=False,
        parameters_split=("query", "key", "value"),
        params_dtype=torch.bfloat16,
        device="cpu",
    )
    layers = torch.nn.Sequential(
        split, te.Linear(96, HIDDEN, params_dtype=torch.bfloat16, device="cpu")
    )
    trained(layers, recipe)
    x = torch.randn(32, HIDDEN, dtype=torch.bfloat16)
    other = alone(layers)
    names, y = launches_of(lambda: forward(layers, x, recipe))
    assert together_in(names) == TOGETHER[name_of(recipe)]
    assert torch.equal(y, forward(other, x, recipe))


def test_each_type_and_recipe_has_a_launch_of_its_own():
    """The layers alternate between two recipes."""
    layers = model()
    recipes = [Float8CurrentScaling(), Float8BlockScaling()]
    optimizer = torch.optim.SGD(layers.parameters(), lr=1e-3)
    x = torch.randn(32, HIDDEN, dtype=torch.bfloat16)

    def run(layers):
        y = x
        with te.autocast(recipe=recipes[0]):
            for index, layer in enumerate(layers):
                with te.autocast(recipe=recipes[index % 2]):
                    y = layer(y)
        return y

    for step in range(3):
        other = alone(layers)
        names, y = launches_of(lambda: run(layers))
        assert torch.equal(y, run(other))
        found = together_in(names)
        assert (found.count(TOGETHER["current"][0]), found.count(TOGETHER["block"][0])) == (
            (0, 0) if step == 0 else (1, 1)
        )
        y.float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_regions_of_single_layers_waste_no_work_for_long(recipe):
    layers = model()
    optimizer = torch.optim.SGD(layers.parameters(), lr=1e-3)
    x = torch.randn(32, HIDDEN, dtype=torch.bfloat16)

    def run(layers):
        y = x
        for layer in layers:
            with te.autocast(recipe=recipe):
                y = layer(y)
        return y

    count = []
    for _ in range(8):
        other = alone(layers)
        got = []
        count.append(casts(lambda: got.append(run(layers))))  # noqa: B023
        assert torch.equal(got[0], run(other))
        got[0].float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    # No layer used the weights of the first joint launch, so weights are quantised one by one again.
    assert count[0] == count[2] == 5


@pytest.mark.parametrize("recipe", quickly(RECIPES, "delayed", slow=RECIPES), indirect=True)
def test_layers_that_are_gone_are_not_waited_for(recipe):
    layers = model()
    trained(layers, recipe)
    rest = torch.nn.Sequential(layers[2], layers[3])
    del layers
    gc.collect()
    x = torch.randn(32, HIDDEN, dtype=torch.bfloat16)
    assert casts(lambda: forward(rest, x, recipe)) == 3


@pytest.mark.slow
def test_it_can_be_turned_off(fresh):
    script = """
import os
os.environ["TE_FAST_WEIGHTS_TOGETHER"] = "{}"
import torch, te_fast.pytorch as te
from te_fast import dispatch
layers = [te.Linear(32, 32, device="cpu") for _ in range(2)]
optimizer = torch.optim.SGD([layer.weight for layer in layers], lr=0.1)
x = torch.ones(16, 32)
for _ in range(3):
    with dispatch.record() as launches, te.autocast():
        y = layers[1](layers[0](x))
    y.sum().backward()
    optimizer.step()
print(any("_many_" in launch.name for launch in launches))
"""
    on, off = fresh.together(script.format(1), script.format(0))
    assert (on.strip(), off.strip()) == ("True", "False")


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_adjacent_weights_share_allocations(recipe):
    # Sixteen equal weights: one allocation may have an eighth of all bytes, the rows or the columns of three or four.
    layers = torch.nn.Sequential(
        *(
            te.Linear(HIDDEN, HIDDEN, bias=False, params_dtype=torch.bfloat16, device="cpu")
            for _ in range(16)
        )
    )
    trained(layers, recipe())
    x = torch.randn(32, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    with dispatch.record() as launches:
        forward(layers, x, recipe()).float().sum().backward()
    (launch,) = [launch for launch in launches if "_many_" in launch.name]
    entries = entries_of(launch)
    assert [shape for *_, shape in entries] == [[HIDDEN, HIDDEN]] * 16
    ordered = sorted(address for entry in entries for address in entry[:2])
    assert all(after - before >= HIDDEN * HIDDEN for before, after in itertools.pairwise(ordered))
    for layout in (0, 1):
        addresses = [entry[layout] for entry in entries]
        gaps = [after - before for before, after in itertools.pairwise(addresses)]
        size = min(gap for gap in gaps if gap > 0)
        assert size >= HIDDEN * HIDDEN
        assert size % 512 == 0
        assert sum(gap == size for gap in gaps) >= 10, gaps


@pytest.fixture
def exchanged():
    """Conversions and loads put other tensors into the place of parameters, as torch offers."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.usefixtures("exchanged")
@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("ops", [False, True])
def test_parameters_can_be_exchanged_behind_a_quantised_forward(ops, kind):
    """A weight that was quantised together with others does not refer to its parameters weakly any more."""
    torch.manual_seed(0)
    recipe = RECIPES[kind]()
    options = {"device": "cpu", "dtype": torch.bfloat16}
    layers = te.ops.Sequential(te.ops.Linear(HIDDEN, 32, **options)) if ops else model()
    trained(layers, recipe)
    other = copy.deepcopy(layers)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2.0)
    kept = list(layers.parameters())
    layers.load_state_dict(other.state_dict())
    assert all(a is b for a, b in zip(kept, layers.parameters(), strict=True))
    x = torch.randn(32, HIDDEN, dtype=torch.bfloat16)
    assert torch.equal(forward(layers, x, recipe), forward(other, x, recipe))
    layers.float()
    other.float()
    assert torch.equal(forward(layers, x.float(), recipe), forward(other, x.float(), recipe))
