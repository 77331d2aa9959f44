"""te_fast.dispatch.quantize_groups on the host backend, against each group by itself in plain torch."""

import pytest
import torch

import reference as ref
import te_fast
from recipes import RECIPES
from te_fast import dispatch

SPLITS = [0, 5, 128, 0, 129, 1, 300, 0]
COLS = 200


def counts(splits):
    return torch.tensor(splits, dtype=torch.int64)


def tensor(rows, cols=COLS, dtype=torch.bfloat16):
    torch.default_generator.manual_seed(rows)
    return (torch.randn(rows, cols) * torch.exp2(torch.randint(-9, 9, (rows, 1)))).to(dtype)


def spans(splits):
    """Yield each group's first row, its rows, and its first row where groups begin at multiples of 128."""
    first = padded = 0
    for rows in splits:
        yield first, rows, padded
        first, padded = first + rows, padded + -(-rows // 128) * 128


def bits(tensor):
    return tensor.view(torch.int32) if tensor.dtype == torch.float32 else tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("role", ["input", "grad"])
@pytest.mark.parametrize("name", RECIPES)
def test_counted_groups_are_each_quantised_by_itself(name, role, dtype):
    x, recipe = tensor(sum(SPLITS), dtype=dtype), RECIPES[name]()
    fmt = "e5m2" if role == "grad" and name != "block" else "e4m3"
    slots = {}
    if name == "delayed":
        scale = torch.exp2(torch.arange(len(SPLITS)) - 4.0)
        slots = {"scale": scale, "amax": torch.full((len(SPLITS),), 0.25)}
    found = dispatch.quantize_groups(x, counts(SPLITS), recipe, role=role, columnwise=True, **slots)
    for group, (first, rows, padded) in enumerate(spans(SPLITS)):
        own = x[first : first + rows]
        data = found.rowwise_data[first : first + rows]
        transposed = found.columnwise_data[:, padded : padded + -(-rows // 128) * 128]
        assert not transposed[:, rows:].any()
        if name == "block":
            if not rows:
                continue
            kept, inverse = ref.quantize_1d(own, fmt)[:2]
            assert torch.equal(data, kept)
            mine = found.rowwise_scale_inv[:, first : first + rows]
            assert torch.equal(bits(mine.contiguous()), bits(inverse[:, :rows].contiguous()))
            kept, inverse = ref.quantize_1d(own.t().contiguous(), fmt)[:2]
            lines = found.columnwise_scale_inv[padded // 128 :][: -(-rows // 128)]
            assert torch.equal(bits(lines.contiguous()), bits(inverse))
            assert torch.equal(transposed[:, :rows], kept[:, :rows])
            continue
        amax = ref.amax_of(own) if rows else torch.tensor(0.0)
        if name == "delayed":
            scale = slots["scale"][group]
            assert slots["amax"][group] == max(amax.item(), 0.25)
        else:
            scale = ref.amax_to_scale(amax, {"e4m3": 448.0, "e5m2": 57344.0}[fmt])
        assert found.rowwise_scale_inv[group] == ref.reciprocal(scale)
        assert torch.equal(data, ref.quantize_per_tensor(own, scale, fmt))
        assert torch.equal(transposed[:, :rows], data.t())


@pytest.mark.parametrize("shape", [(3, 64, 48), (2, 130, 300), (1, 256, 128)], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_stacks_of_weights_are_each_quantised_by_itself(name, shape):
    groups, rows, cols = shape
    x, recipe = tensor(groups * rows, cols).view(shape), RECIPES[name]()
    slots = {"scale": torch.exp2(torch.arange(groups) - 1.0)} if name == "delayed" else {}
    found = dispatch.quantize_groups(x, None, recipe, role="weight", columnwise=True, **slots)
    for group in range(groups):
        scale = {"scale": slots["scale"][group : group + 1]} if slots else {}
        own = dispatch.quantize(x[group], recipe, role="weight", columnwise=True, **scale)
        assert torch.equal(found.rowwise_data[group], own.rowwise_data)
        assert torch.equal(found.columnwise_data[group], own.columnwise_data)
        if name != "block":
            assert found.rowwise_scale_inv[group] == own.rowwise_scale_inv
            continue
        assert torch.equal(found.rowwise_scale_inv[group], own.rowwise_scale_inv)
        assert torch.equal(found.columnwise_scale_inv[group], own.columnwise_scale_inv)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 0.0, 1e-40, 3e38])
@pytest.mark.parametrize("name", ["current", "block"])
def test_edge_values_stay_in_their_group(name, value):
    x, recipe = tensor(sum(SPLITS)), RECIPES[name]()
    clean = dispatch.quantize_groups(x, counts(SPLITS), recipe, columnwise=True)
    x[140] = value  # this row is in the group of 129 rows
    found = dispatch.quantize_groups(x, counts(SPLITS), recipe, columnwise=True)
    for group, (first, rows, padded) in enumerate(spans(SPLITS)):
        if group == 4 or not rows:
            continue
        assert torch.equal(
            found.rowwise_data[first : first + rows], clean.rowwise_data[first : first + rows]
        )
        columns = slice(padded, padded + -(-rows // 128) * 128)
        assert torch.equal(found.columnwise_data[:, columns], clean.columnwise_data[:, columns])


@pytest.mark.parametrize("name", ["current", "block"])
@pytest.mark.parametrize(
    "splits", [[3, -5, 4], [200, 200], [0, 0], [1 << 40, 1], [-1, -(1 << 62)]], ids=str
)
def test_counts_that_do_not_fit_are_cut_off(name, splits):
    x, recipe = tensor(130), RECIPES[name]()
    taken, left = [], 130
    for split in splits:
        taken.append(max(0, min(split, left)))
        left -= taken[-1]
    found = dispatch.quantize_groups(x, counts(splits), recipe, columnwise=True)
    wanted = dispatch.quantize_groups(x, counts(taken), recipe, columnwise=True)
    rows, padded = sum(taken), sum(-(-rows // 128) * 128 for rows in taken)
    assert torch.equal(found.rowwise_data[:rows], wanted.rowwise_data[:rows])
    assert torch.equal(found.columnwise_data[:, :padded], wanted.columnwise_data[:, :padded])


def test_bad_arguments():
    x, recipe = torch.ones(4, 8), RECIPES["current"]()
    with pytest.raises(ValueError, match="splits"):
        dispatch.quantize_groups(x, torch.tensor([4], dtype=torch.int32), recipe)
    with pytest.raises(ValueError, match="without splits"):
        dispatch.quantize_groups(x, None, recipe)
    with pytest.raises(ValueError, match="1 to 1024"):
        dispatch.quantize_groups(x, torch.zeros(1025, dtype=torch.int64), recipe)
    with pytest.raises(TypeError, match="float32"):
        dispatch.quantize_groups(x.double(), counts([4]), recipe)
    with pytest.raises(te_fast.ShapeError, match="leave scale"):
        dispatch.quantize_groups(x, counts([4]), recipe, scale=torch.ones(1))
    with pytest.raises(ValueError, match="scale"):
        dispatch.quantize_groups(x, counts([4]), RECIPES["delayed"](), scale=torch.ones(2))
    two = RECIPES["block"](x_block_scaling_dim=2, w_block_scaling_dim=1)
    with pytest.raises(NotImplementedError, match="1x128"):
        dispatch.quantize_groups(x, counts([4]), two)
