"""Modules whose calls replay graphs beside the same modules called eagerly, bit for bit."""

from __future__ import annotations

import torch

from graphs import region, states_of


def quantising(recipe, **more):
    """Arguments of a capture under a recipe, or none."""
    return {"enabled": recipe is not None, "recipe": recipe, **more}


def leaves_of(value):
    return [
        leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)
    ]


def assert_same(one, two):
    for left, right in zip(leaves_of(one), leaves_of(two), strict=True):
        assert torch.equal(left, right)
        assert left.requires_grad == right.requires_grad


def assert_stepped_alike(eager, graphed):
    """Compare gradients and scales, then step both."""
    for (name, one), two in zip(eager.named_parameters(), graphed.parameters(), strict=True):
        grads = [getattr(p, "main_grad", p.grad) for p in (one, two)]
        assert (grads[0] is None) == (grads[1] is None), name
        if grads[0] is None:
            continue
        assert torch.equal(*grads), name
        with torch.no_grad():
            for p, grad in zip((one, two), grads, strict=True):
                p -= 0.01 * grad.sign()  # bounded steps avoid NaNs, which never compare equal
                p.grad = None
    for one, two in zip(states_of(eager), states_of(graphed), strict=True):
        assert torch.equal(one, two)


def both(models, recipe, x, dy=None, *args, **kwargs):
    """Call an eager model and a graphed one on the same input, and differentiate."""
    results = []
    for model in models:
        torch.manual_seed(7)
        given = x.detach().clone().requires_grad_(x.requires_grad)
        with region(recipe):
            y = model(given, *args, **kwargs)
        if dy is not None:
            leaf = y if isinstance(y, torch.Tensor) else y[0]
            leaf.backward(dy)
        results.append([y, given.grad])
    assert_same(*results)
    return results[0][0]


ORDERS = {
    "one by one": ([1, -1, 1, -1], 1),
    "both in flight": ([1, 1, -1, -1], 1),
    "two chunks": ([1, 1, 2, 2, -2, 1, -2, 2, -1, -2, -1, -1], 2),
    "interleaved": ([1, 2, 1, 2, -2, -1, -2, -1], 2),
}


def run_order(order, forward, losses):
    """Run chunks in an order: `forward(chunk, microbatch)`, and the backward of its result."""
    counts, results = {}, {}
    for number in order:
        chunk = abs(number) - 1
        microbatch = counts.get(number, 0)
        counts[number] = microbatch + 1
        if number > 0:
            x, y = forward(chunk, microbatch)
            # Shared buffers hold a result until the backward alone.
            results[chunk, microbatch] = x, y, y.clone()
        else:
            x, y, kept = results[chunk, microbatch]
            y.backward(losses[chunk][microbatch])
            yield kept, x.grad


def assert_pipelines_alike(order, layers, models, recipe, inputs, losses):
    """Run eager modules and graphed callables in an order.

    `models` are the eager modules, the captured ones, and the callables.
    """
    eager, model, graphed = models
    microbatches = inputs.shape[1]

    def eager_layers(chunk, _):
        return eager[chunk * layers : (chunk + 1) * layers]

    def graphed_layers(chunk, microbatch):
        first = (chunk * microbatches + microbatch) * layers
        return graphed[first : first + layers]

    results = []
    for layers_of in (eager_layers, graphed_layers):

        def forward(chunk, microbatch, layers_of=layers_of):
            x = inputs[chunk, microbatch].clone().requires_grad_()
            with region(recipe):
                y = x
                for layer in layers_of(chunk, microbatch):
                    y = layer(y)
            return x, y

        steps = run_order(order, forward, losses)
        results.append([[t.clone() for t in step] for step in steps])
    for one, two in zip(*results, strict=True):
        assert_same(one, two)
    assert_stepped_alike(eager, model)
