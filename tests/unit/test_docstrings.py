"""The examples of public docstrings say what happens."""

import doctest
import importlib
import inspect

import pytest

MODULES = (
    "te_fast",
    "te_fast.pytorch",
    "te_fast.pytorch.ops",
    "te_fast.common.recipe",
    "te_fast.dispatch",
)


def examples():
    finder = doctest.DocTestFinder(recurse=False)
    seen = set()
    for module in MODULES:
        loaded = importlib.import_module(module)
        for name in loaded.__all__:
            value = getattr(loaded, name, None) if name != "__version__" else None
            if not (inspect.isclass(value) or inspect.isfunction(value)) or value in seen:
                continue
            seen.add(value)
            for test in finder.find(value, f"{module}.{name}"):
                if test.examples:
                    yield pytest.param(test, id=test.name)


@pytest.mark.parametrize("test", list(examples()))
def test_an_example_says_what_happens(test):
    told = []
    result = doctest.DocTestRunner().run(test, out=told.append)
    assert result.attempted > 0
    assert result.failed == 0, "".join(told)


def test_layers_regions_and_recipes_have_examples():
    named = {parameter.id for parameter in examples()}
    expected = ["Linear", "LayerNormLinear", "LayerNormMLP", "autocast", "checkpoint"]
    assert {f"te_fast.pytorch.{name}" for name in expected} <= named
