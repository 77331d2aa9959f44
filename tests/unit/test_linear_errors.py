"""Errors of Linear and their messages."""

import pytest
import torch

import te_fast
import te_fast.pytorch as te
from linear_layers import inputs, make
from te_fast.common.recipe import Float8BlockScaling, MXFP8BlockScaling


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: te.ops.BasicLinear(None, 16), "BasicLinear: in_features must be an integer"),
        (lambda: te.ops.BasicLinear(16, -1), "BasicLinear: out_features must not be negative"),
        (
            lambda: te.ops.BasicLinear(16, 16, rng_state_tracker_function=3),
            "rng_state_tracker_function must be a function, got int",
        ),
        (
            lambda: te.ops.GroupedLinear(2, 16, 16, rng_state_tracker_function=3),
            "rng_state_tracker_function must be a function, got int",
        ),
        (
            lambda: te.LayerNormLinear(16, 16, return_layernorm_output="x", device="cpu"),
            "return_layernorm_output must be True or False, got str",
        ),
        (
            lambda: te.Linear(16, 16, parameters_split={"a": "16"}, device="cpu"),
            r"parameters_split\['a'\] must be an integer, got str",
        ),
        (
            lambda: te.GroupedLinear(2, 16, 16, device="cpu", init_method=3),
            "init_method must be a function, got int",
        ),
        (
            lambda: te.GroupedLinear(2, 16, 16, device="cpu", get_rng_state_tracker=3),
            "get_rng_state_tracker must be a function, got int",
        ),
        (lambda: te.DotProductAttention(2, 8, cp_group=3), "cp_group must be a torch.distrib"),
        (lambda: Float8BlockScaling(fp8_gemm_fprop=None), "fp8_gemm_fprop must be an MMParams"),
    ],
)
def test_arguments_of_constructors_are_named(make_it, message):
    with pytest.raises((TypeError, ValueError), match=message) as raised:
        make_it()
    assert isinstance(raised.value, te_fast.TeFastError)


def test_flags_may_be_none():
    """None is false, as in Transformer Engine."""
    flags = ["fuse_wgrad_accumulation", "delay_wgrad_compute", "return_layernorm_output"]
    options = dict.fromkeys([*flags, "zero_centered_gamma"])
    layer = te.LayerNormLinear(16, 16, device="cpu", **options)
    layer(torch.ones(8, 16)).sum().backward()
    assert layer.weight.grad is not None
    op = te.ops.BasicLinear(16, 16, device="cpu", accumulate_into_main_grad=None)
    op(torch.ones(8, 16)).sum().backward()
    assert op.weight.grad is not None


def test_bad_input_is_named(recipe):
    layer = make(name="proj")
    x, _ = inputs(32, layer)
    cases = [
        (lambda: layer(x[:, :32]), ValueError, "proj: .*in_features = 64"),
        (lambda: layer(x[:3]), ValueError, "proj: .*append 5 rows"),
        (lambda: layer(x.float()), TypeError, "proj: .*bfloat16"),
        (lambda: layer(x.to("meta")), RuntimeError, "proj: .*cpu"),
        (lambda: layer("x"), TypeError, "proj: .*str"),
        (lambda: layer(torch.tensor(1.0, dtype=torch.bfloat16)), ValueError, "proj: .*in_features"),
    ]
    for call, kind, message in cases:
        with te.autocast(recipe=recipe), pytest.raises(kind, match=message) as raised:
            call()
        assert isinstance(raised.value, te_fast.TeFastError)


@pytest.mark.parametrize(
    "options",
    [
        {"ub_overlap_ag": True},
        {"ub_overlap_rs": True},
        {"ub_overlap_rs_dgrad": True},
        {"ub_bulk_dgrad": True},
        {"ub_bulk_wgrad": True},
        {"symmetric_ar_type": "multimem_all_reduce"},
    ],
    ids=str,
)
def test_unsupported_arguments_are_named(options):
    with pytest.raises(te_fast.UnsupportedError, match=next(iter(options))):
        make(**options)


def test_unaligned_features():
    for layer in (make(40, 48), make(64, 40)):
        x, grad = inputs(32, layer)
        with te.autocast(), pytest.raises(ValueError, match="multiple of"):
            layer(x).backward(grad)


def test_blackwell_recipes_raise():
    with pytest.raises(RuntimeError, match="MXFP8"), te.autocast(recipe=MXFP8BlockScaling()):
        pass


@pytest.mark.parametrize(
    ("cls", "wrong", "error"),
    [
        (te.Linear, {"device": "bogus"}, RuntimeError),
        (te.Linear, {"device": 3.5}, TypeError),
        (te.Linear, {"name": 3}, TypeError),
        (te.Linear, {"bias": "no"}, TypeError),
        (te.Linear, {"init_method": 3}, TypeError),
        (te.Linear, {"get_rng_state_tracker": 3}, TypeError),
        (te.LayerNormLinear, {"eps": "x"}, TypeError),
        (te.LayerNormLinear, {"return_bias": "no"}, TypeError),
        (te.LayerNormMLP, {"eps": "x"}, TypeError),
        (te.LayerNormMLP, {"output_layer_init_method": 3}, TypeError),
    ],
)
def test_wrong_arguments_of_constructors_are_named(cls, wrong, error):
    argument = next(iter(wrong))
    with pytest.raises(error, match=f"{argument} must be") as caught:
        cls(16, 16, **{"device": "cpu", **wrong})
    assert isinstance(caught.value, te_fast.TeFastError)


@pytest.mark.parametrize("names", [("a.b", "c"), ("", "c")])
def test_parts_whose_names_no_parameter_can_have(names):
    with pytest.raises(KeyError, match="proj: parameters_split must name parts") as caught:
        te.Linear(32, 32, parameters_split=names, device="cpu", name="proj")
    assert isinstance(caught.value, te_fast.TeFastError)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize(
    ("cls", "fp8"),
    [(te.Linear, True), (te.LayerNormLinear, False), (te.LayerNormMLP, True)],
)
def test_nested_tensors_are_refused(cls, fp8, layout):
    x = torch.nested.nested_tensor([torch.ones(8, 32), torch.ones(16, 32)], layout=layout)
    layer = cls(32, 32, device="cpu", name="proj")
    with (
        te.autocast(enabled=fp8),
        pytest.raises(te_fast.UnsupportedError, match="^proj: nested tensors"),
    ):
        layer(x)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (lambda: te.GroupedLinear(2, 32, 32, device="cpu"), ([8, 16],)),
        (lambda: te.MultiheadAttention(32, 2, device="cpu"), ()),
        (lambda: te.TransformerLayer(32, 64, 2, device="cpu"), ()),
    ],
    ids=["grouped", "attention", "layer"],
)
def test_nested_tensors_are_refused_where_the_host_reads_their_shape(make, arguments, layout):
    x = torch.nested.nested_tensor([torch.ones(8, 32), torch.ones(16, 32)], layout=layout)
    with pytest.raises(te_fast.UnsupportedError, match="nested tensors are not supported here"):
        make()(x, *arguments)
