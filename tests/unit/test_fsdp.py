"""FSDP2 gathers parameters into memory of their own before a forward, and torch's version counters do not change."""

import copy

import pytest
import torch
import torch.distributed as dist

import te_fast
import te_fast.pytorch as te
from every_layer import LAYERS
from selection import sampled
from te_fast.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
on_the_cpu = pytest.mark.skipif(
    _VERSION < (2, 11) or not dist.is_gloo_available(),
    reason="needs gloo, and an FSDP2 that runs without a GPU (2.6's does not)",
)

RECIPES = (DelayedScaling, Float8CurrentScaling, Float8BlockScaling)
X = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    path = tmp_path_factory.mktemp("fsdp") / "store"
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def run(module, recipe):
    with torch.no_grad(), te.autocast(recipe=recipe):
        return module(X)


def sharded(module, **options):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(torch.nn.Sequential(module), **options)


@on_the_cpu
@pytest.mark.parametrize(("make", "reshard", "recipe"), sampled(LAYERS, [True, False], RECIPES))
def test_weights_that_change_while_sharded_are_quantised_again(group, make, reshard, recipe):
    torch.default_generator.manual_seed(0)
    layer = LAYERS[make]()
    plain = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(-1.5)
    module = sharded(layer, reshard_after_forward=reshard)
    first = recipe()
    for _ in range(3):
        run(module, first)
    module.reshard()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.to_local().mul_(-1.5)
    got, expected = run(module, first), run(plain, recipe())
    if recipe is DelayedScaling:  # evaluation leaves the scales as they are
        assert [scale.item() for scale in _scales(module)] == [1.0] * len(_scales(module))
    assert torch.equal(got, expected)


def _scales(module):
    metas = [getattr(part, "fp8_meta", None) or {} for part in module.modules()]
    return [scale for meta in metas if "scaling_fwd" in meta for scale in meta["scaling_fwd"].scale]


@on_the_cpu
@pytest.mark.parametrize(
    ("make", "recipe", "options"),
    sampled(LAYERS, [None, *RECIPES], [{}, {"full_state_dict": True}]),
)
def test_states_of_distributed_checkpoints(group, make, recipe, options):
    from torch.distributed.checkpoint import state_dict as states

    torch.default_generator.manual_seed(0)
    saved, loaded = sharded(LAYERS[make]()), sharded(LAYERS[make]())

    def train(module):
        with te.autocast(enabled=recipe is not None, recipe=recipe and recipe()):
            module(X).sum().backward()

    train(saved)
    chosen = states.StateDictOptions(**options)
    state = states.get_model_state_dict(saved, options=chosen)
    states.set_model_state_dict(loaded, state, options=chosen)
    with torch.no_grad(), te.autocast(enabled=recipe is not None, recipe=recipe and recipe()):
        assert torch.equal(loaded(X), saved(X))


@pytest.mark.parametrize("layer", [te.Linear, te.LayerNormLinear, te.LayerNormMLP])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_weight_that_was_away_is_quantised_again(layer, recipe):
    """Do what FSDP does: replace a parameter, write the parameter's memory, and put the parameter back."""
    module, first = layer(32, 32, device="cpu"), recipe()
    for _ in range(2):
        run(module, first)
    names = [name for name, parameter in module.named_parameters() if parameter.dim() == 2]
    assert names
    for name in names:
        parameter = getattr(module, name)
        setattr(module, name, torch.nn.Parameter(torch.zeros_like(parameter)))
        parameter.data.mul_(-1.5)
        setattr(module, name, parameter)
    assert torch.equal(run(module, first), run(copy.deepcopy(module), recipe()))


@on_the_cpu
@pytest.mark.parametrize("part", ["self_attention", "layernorm_mlp"])
def test_a_bias_that_is_freed_before_the_residual_sum_is_refused(group, part):
    from torch.distributed.fsdp import fully_shard

    def made(**options):
        torch.default_generator.manual_seed(0)
        rates = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
        layer = te.TransformerLayer(32, 64, 4, device="cpu", **rates)
        fully_shard(getattr(layer, part), **options)
        return fully_shard(layer)

    x = torch.ones(4, 2, 32)
    with pytest.raises(RuntimeError, match=r"TransformerLayer: .* FSDP2 has freed .* whole layer"):
        made()(x)
    plain = te.TransformerLayer(32, 64, 4, hidden_dropout=0.0, attention_dropout=0.0, device="cpu")
    module = made(reshard_after_forward=False)
    with torch.no_grad():
        for parameter, sharded in zip(plain.parameters(), module.parameters(), strict=True):
            parameter.copy_(sharded.to_local())
    assert torch.allclose(module(x), plain(x), atol=1e-5)


@on_the_cpu
@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling])
def test_converted_models(group, recipe):
    from torch.distributed.fsdp import fully_shard

    from llama_like import Model, loss_of

    tokens = torch.randint(1, 96, (2, 16), generator=torch.Generator().manual_seed(3))
    model, plain = Model(), Model()
    for each in (model, plain):
        te_fast.convert(each)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    for each in (model, plain):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            with te.autocast(enabled=recipe is not None, recipe=recipe and recipe()):
                loss = loss_of(each, tokens)
            loss.backward()
            optimizer.step()
        each.loss = loss.item()
    assert model.layers[0].ways == plain.layers[0].ways == 2  # convert's trials
    assert model.loss == pytest.approx(plain.loss, rel=1e-4)
    report = te_fast.convert(te_fast.convert.undo(model) and model, dry_run=True)
    assert "is DTensor; convert before sharding" in report.left["layers.0.mlp.up_proj"]


@on_the_cpu
@pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning")
@pytest.mark.parametrize(("recipe", "preserves"), sampled(RECIPES, [True, False]))
def test_fp8_weights_that_are_sharded_before_they_are_made(group, recipe, preserves):
    """A model that is made on the meta device, sharded and initialised trains as a model that is not sharded."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.default_generator.manual_seed(0)

    def make(device):
        options = {
            "enabled": True,
            "recipe": recipe(),
            "preserve_high_precision_init_val": preserves,
        }
        with te.quantized_model_init(**options):
            return torch.nn.Sequential(
                te.LayerNormMLP(128, 256, device=device), te.Linear(128, 128, device=device)
            )

    plain, module = make("cpu"), make("meta")
    for layer in module:
        fully_shard(layer)
    fully_shard(module)
    torch.default_generator.manual_seed(0)
    for layer in module:
        layer.reset_parameters()
    for (name, sharded), parameter in zip(
        module.named_parameters(), plain.parameters(), strict=True
    ):
        assert isinstance(sharded, DTensor), name
        local = sharded.to_local()
        assert type(local.detach()) is type(parameter.detach()), name
        assert sharded.shape == parameter.shape
        if isinstance(local, te.QuantizedTensor):
            assert torch.equal(local.dequantize(), parameter.dequantize())
            assert hasattr(sharded._local_tensor, "get_high_precision_init_val") == preserves
            if preserves:
                values = sharded._local_tensor.get_high_precision_init_val()
                assert torch.equal(values, parameter.get_high_precision_init_val())
    x = torch.randn(16, 128, generator=torch.Generator().manual_seed(1))
    losses = []
    for model in (plain, module):
        optimizer = te.optimizers.FusedAdam(model.parameters(), lr=1e-3, master_weights=True)
        losses.append([])
        for _ in range(3):
            optimizer.zero_grad()
            with te.autocast(recipe=recipe()):
                loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


class Wrapped(torch.nn.Module):
    """A stand-in for FullyShardedDataParallel, which needs a GPU."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def test_models_under_the_first_fsdp_are_checked(monkeypatch):
    import torch.distributed.fsdp as fsdp

    monkeypatch.setattr(fsdp, "FullyShardedDataParallel", Wrapped)
    prepare, layer = te.distributed.prepare_te_modules_for_fsdp, te.Linear(16, 16, device="cpu")
    assert prepare(Wrapped(torch.nn.Sequential(layer, Wrapped(layer)))) is None
    with pytest.raises(TypeError, match="expected a FullyShardedDataParallel, got Linear"):
        prepare(layer)
    with te.quantized_model_init():
        quantized = te.Linear(16, 16, device="cpu")
    with pytest.raises(RuntimeError, match="Linear has FP8 weights, which FullyShardedData"):
        prepare(Wrapped(torch.nn.Sequential(layer, quantized)))
    assert te.distributed.has_te_modules(Wrapped(layer))
    assert te.distributed.has_te_modules(len)
    assert not te.distributed.has_te_modules(torch.nn.Linear(2, 2))
