"""te_fast's public signatures against those of Transformer Engine, and the migration page against both."""

import inspect
import json
import re
from pathlib import Path

import pytest

import te_fast.pytorch as te
from te_fast.errors import MissingError

HERE = Path(__file__).parent
RECORDED = json.loads((HERE / "te_signatures.json").read_text())["signatures"]
PAGE = (HERE.parents[1] / "docs" / "migrate-from-te.md").read_text()
STATES = dict(re.findall(r"^\| `(\w+)` \| (same|partly|not yet) \|", PAGE, re.MULTILINE))


def find(name):
    thing = te
    for part in name.split("."):
        thing = getattr(thing, part, None)
    return thing


def parameters(thing, recorded):
    """Names and defaults in Transformer Engine's order, without self, annotations, and additions of te_fast's."""
    shown = []
    signature = inspect.signature(thing)
    for parameter in signature.parameters.values():
        own = parameter.kind is parameter.KEYWORD_ONLY and f"{parameter.name}=" not in recorded
        if parameter.name == "self" or own:
            continue
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        has_default = parameter.default is not parameter.empty and f"{parameter.name}=" in recorded
        default = f"={parameter.default!r}" if has_default else ""
        shown.append(f"{stars.get(parameter.kind, '')}{parameter.name}{default}")
    return ", ".join(shown)


@pytest.mark.parametrize("name", RECORDED)
def test_signature_is_that_of_te(name):
    thing = find(name)
    if thing is None:
        assert STATES[name.split(".")[0]] == "not yet"
        return
    assert parameters(thing, RECORDED[name]) == RECORDED[name]


@pytest.mark.parametrize("name", STATES)
def test_migration_page_tells_what_exists(name):
    assert hasattr(te, name) == (STATES[name] != "not yet")


@pytest.mark.parametrize("name", [name for name, state in STATES.items() if state == "not yet"])
def test_what_is_not_there_yet_says_so(name):
    with pytest.raises(MissingError, match=f"te_fast.pytorch.{name} is not there yet"):
        getattr(te, name)


def test_migration_page_has_every_public_name_that_te_shares():
    only_here = PAGE.partition("## Only in te_fast")[2].partition("##")[0]
    assert set(te.__all__) - set(re.findall(r"`(\w+)`", only_here)) - set(STATES) == set()


@pytest.mark.te
def test_recorded_signatures_are_those_of_the_installed_te():
    installed = pytest.importorskip("transformer_engine.pytorch")
    for name, expected in RECORDED.items():
        thing = installed
        for part in name.split("."):
            thing = getattr(thing, part)
        assert parameters(thing, expected) == expected, name
