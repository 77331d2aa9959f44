"""The examples of public docstrings give the results that they show."""

import doctest
import importlib
import importlib.util
import inspect
from pathlib import Path

import pytest

# The documentation's list of modules; tests/ has another file of that name.
PATH = Path(__file__).parents[2] / "docs" / "_ext" / "reference.py"
SPEC = importlib.util.spec_from_file_location("documented_reference", PATH)
documented = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(documented)


def public():
    """Yield every public class and function that is te_fast's own, with a name."""
    seen = set()
    for module in documented.MODULES:
        loaded = importlib.import_module(module)
        for name in loaded.__all__:
            value = getattr(loaded, name, None) if name != "__version__" else None
            is_error = inspect.isclass(value) and issubclass(value, BaseException)
            if not (inspect.isclass(value) or inspect.isfunction(value)) or is_error:
                continue
            if not documented.is_listed(value):
                continue
            if value not in seen:
                seen.add(value)
                yield f"{module}.{name}", value


def examples():
    finder = doctest.DocTestFinder(recurse=False)
    for name, value in public():
        # An example gets no names of its module: it imports what it uses, so that a reader can copy it.
        for test in finder.find(value, name, globs={}):
            if test.examples:
                yield pytest.param(test, id=test.name)


@pytest.mark.parametrize("test", list(examples()))
def test_an_example_says_what_happens(test):
    told = []
    result = doctest.DocTestRunner().run(test, out=told.append)
    assert result.attempted > 0
    assert result.failed == 0, "".join(told)


def test_every_public_name_has_an_example_and_says_what_to_see_also():
    lacking = {
        name: [
            part for part in ("Examples", "See Also") if f"{part}\n" not in (value.__doc__ or "")
        ]
        for name, value in public()
    }
    assert {name: parts for name, parts in lacking.items() if parts} == {}
