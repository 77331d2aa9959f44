"""Gated activations of experts' rows into FP8: cases, the same by two calls, and by plain torch."""

import torch

import reference as ref
from activation_reference import split
from recipes import name_of
from te_fast import dispatch
from te_fast.dispatch import ActivationFunction

#: Recipes whose scales are known before the values, or follow from a block's own.
NAMES = ("delayed", "block")
FUNCTIONS = [
    *(ActivationFunction(name) for name in ("swiglu", "geglu", "glu", "qgeglu", "reglu", "sreglu")),
    ActivationFunction("swiglu", 32),
    ActivationFunction("swiglu", 8),
    ActivationFunction("clamped_swiglu", 64, 1.5, 1.3, -0.25),
    ActivationFunction("situ_glu", beta1=0.7, beta2=2.0),
]
SPLITS = [
    [0, 1, 127, 0, 128, 129, 0],
    [0, 300, 0],
    [1] * 20,
    [0, 0],
    [5, -3, 260],
]


def rows_of(splits):
    """The rows of each group."""
    return [max(0, count) for count in splits]


def spans(splits):
    """Yield each group's first row, its rows, and its first row where groups begin at multiples of 128."""
    first = padded = 0
    for rows in rows_of(splits):
        yield first, rows, padded
        first, padded = first + rows, padded + -(-rows // 128) * 128


class Case:
    """Random tensors for some groups, with rows behind them; factors with zeros, NaN and infinity."""

    def __init__(self, splits, cols, function, *, behind=0, factor=torch.float32, device="cpu"):
        make = torch.Generator().manual_seed(sum(rows_of(splits)) * 31 + cols)
        self.rows = sum(rows_of(splits)) + behind
        self.splits, self.cols, self.function = splits, cols, function

        def values(*shape):
            spread = torch.exp2(torch.randint(-6, 6, shape, generator=make).float())
            return (torch.randn(*shape, generator=make) * spread).bfloat16()

        x, dy = values(self.rows, 2 * cols), values(self.rows, cols)
        self.row_scale = None
        if factor is not None:
            row_scale = torch.rand(self.rows, generator=make)
            row_scale[3::7] = 0.0
            row_scale[5::50] = torch.nan
            row_scale[6::90] = torch.inf
            self.row_scale = row_scale.to(factor).to(device)
        self.x, self.dy = x.to(device), dy.to(device)
        self.counts = torch.tensor(splits, device=device)

    def options(self, recipe):
        """Factors and slots."""
        options = {"row_scale": self.row_scale, "columnwise": True}
        if recipe.delayed():
            groups = torch.arange(len(self.splits), device=self.x.device)
            options["scale"] = torch.exp2(groups.remainder(7) - 3.0)
            options["amax"] = torch.full_like(options["scale"], 0.5)
        return options

    def forward(self, recipe):
        """The launch, and the maxima that it raised."""
        options = self.options(recipe)
        found = dispatch.activation_groups(self.x, self.function, self.counts, recipe, **options)
        return found, options.get("amax")

    def backward(self, recipe):
        """The same of the gradient, and the gradient of the factors."""
        options = self.options(recipe)
        found, factors = dispatch.activation_groups_backward(
            self.dy, self.x, self.function, self.counts, recipe, **options
        )
        return found, options.get("amax"), factors

    def forward_by_two(self, recipe):
        """The same by the activation and the cast."""
        options = self.options(recipe)
        out = dispatch.activation_outputs(self.x, self.function)
        y = dispatch.activation(self.x, self.function, out, row_scale=options.pop("row_scale"))
        found = dispatch.quantize_groups(y.high_precision, self.counts, recipe, **options)
        return found, options.get("amax")

    def backward_by_two(self, recipe):
        """The same of the gradient."""
        options = self.options(recipe)
        row_scale = options.pop("row_scale")
        out = dispatch.activation_outputs(self.x, self.function, gradient=True)
        if row_scale is not None:
            out = out._replace(row_scale_grad=torch.empty_like(row_scale))
        dx = dispatch.activation_backward(self.dy, self.x, self.function, out, row_scale=row_scale)
        found = dispatch.quantize_groups(
            dx.high_precision, self.counts, recipe, role="grad", **options
        )
        return found, options.get("amax"), dx.row_scale_grad

    def by_torch(self, *, gradient):
        """The result, or the gradient of x, of a ReLU with a linear half: exact in FP32, then rounded."""
        assert self.function.name == "reglu"
        g, linear = (half.float() for half in split(self.x, self.function.interleave))
        s = 1.0 if self.row_scale is None else self.row_scale.float()[:, None]
        if not gradient:
            return (g.relu() * linear * s).bfloat16()
        up = self.dy.float() * s
        size = self.function.interleave or self.cols
        halves = [up * linear * (g > 0), up * g.relu()]
        return (
            torch.stack([half.unflatten(1, (-1, size)) for half in halves], 2).flatten(1).bfloat16()
        )


def on_host(groups):
    return type(groups)(*[None if part is None else part.cpu() for part in groups])


def same_bits(mine, theirs):
    mine, theirs = mine.cpu().contiguous(), theirs.cpu().contiguous()
    return torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


def check_groups(found, wanted, splits, *, block):
    """Compare the bytes and scales of all rows that groups have, and the zeros behind them."""
    found, wanted = on_host(found), on_host(wanted)
    for first, rows, padded in spans(splits):
        own, end = slice(first, first + rows), padded + -(-rows // 128) * 128
        assert same_bits(found.rowwise_data[own], wanted.rowwise_data[own])
        columns = found.columnwise_data[:, padded:end]
        assert same_bits(columns, wanted.columnwise_data[:, padded:end])
        assert not columns[:, rows:].any()
        if block:
            lines = slice(padded // 128, end // 128)
            assert same_bits(found.rowwise_scale_inv[:, own], wanted.rowwise_scale_inv[:, own])
            assert same_bits(found.columnwise_scale_inv[lines], wanted.columnwise_scale_inv[lines])
    if not block:
        assert same_bits(found.rowwise_scale_inv, wanted.rowwise_scale_inv)


def check_by_torch(found, values, splits, recipe, slots, *, gradient):
    """The same against `values`, quantised by plain torch, group by group."""
    values, found = values.cpu(), on_host(found)
    slots = {name: slot.cpu() for name, slot in slots.items() if name in ("scale", "amax")}
    block = name_of(recipe) == "block"
    fmt = "e5m2" if gradient and not block else "e4m3"
    for group, (first, rows, padded) in enumerate(spans(splits)):
        if not rows:
            continue
        own = values[first : first + rows]
        data = found.rowwise_data[first : first + rows]
        columns = found.columnwise_data[:, padded : padded + rows]
        if not block:
            amax = ref.amax_of(own)
            scale = slots["scale"][group]
            assert slots["amax"][group] == max(amax.item(), 0.5)
            kept = ref.quantize_per_tensor(own, scale, fmt)
            assert found.rowwise_scale_inv[group] == ref.reciprocal(scale)
            assert same_bits(data, kept)
            assert same_bits(columns, kept.t())
            continue
        kept, inverse = ref.quantize_1d(own, fmt)
        assert same_bits(data, kept)
        assert same_bits(found.rowwise_scale_inv[:, first : first + rows], inverse[:, :rows])
        kept, inverse = ref.quantize_1d(own.t().contiguous(), fmt)
        lines = slice(padded // 128, padded // 128 + -(-rows // 128))
        assert same_bits(columns, kept[:, :rows])
        assert same_bits(found.columnwise_scale_inv[lines], inverse)
