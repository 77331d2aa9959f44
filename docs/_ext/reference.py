"""Write the pages of the reference's modules: summary tables of public names, and a page for each name.

The names come from ``__all__``, so that every new public name appears in the reference.
"""

from __future__ import annotations

import importlib
import inspect
import shutil
import types
from pathlib import Path
from typing import Any

MODULES = {
    "te_fast": "The package",
    "te_fast.pytorch": "Layers, autocast, MoE",
    "te_fast.pytorch.ops": "Fusible operations",
    "te_fast.pytorch.distributed": "Recomputation and ranks",
    "te_fast.pytorch.attention.rope": "Rotary embeddings",
    "te_fast.pytorch.attention.inference": "Caches of keys and values",
    "te_fast.pytorch.permutation": "Permutations",
    "te_fast.pytorch.router": "Routers of experts",
    "te_fast.pytorch.optimizers": "Optimizers",
    "te_fast.pytorch.tensor.utils": "Distributed optimizers",
    "te_fast.pytorch.graph": "CUDA graphs",
    "te_fast.pytorch.utils": "Utilities",
    "te_fast.common.recipe": "Recipes",
    "te_fast.pytorch.custom_recipes.quantizer_factories": "Factories of quantizers",
    "te_fast.convert": "Models of other libraries",
    "te_fast.convert_checkpoint": "Checkpoints",
    "te_fast.dispatch": "The dispatcher",
    "te_fast.profiling": "Profiling",
    "te_fast.doctor": "The doctor",
}
# torch documents names that te_fast does not define.
OWN = "te_fast"


def is_own(fullname: str, member: str) -> bool:
    """Whether te_fast itself defines a member of a class, or of a base of it."""
    module, _, name = fullname.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    owner = next((base for base in cls.__mro__ if member in vars(base)), None)
    if owner is None or member.startswith("_") or owner.__module__.partition(".")[0] != OWN:
        return False
    value = vars(owner)[member]
    # torch's class, under its own name.
    if isinstance(value, types.MethodDescriptorType):
        return False
    is_documented = callable(value) or isinstance(value, (property, classmethod, staticmethod))
    texts = (
        vars(base)[member].__doc__
        for base in cls.__mro__
        if base.__module__.partition(".")[0] == OWN and member in vars(base)
    )
    return is_documented and any(texts)


def is_listed(value: Any) -> bool:
    """Whether a public value gets a page of its own; commands do not."""
    own = (getattr(value, "__module__", None) or "").partition(".")[0] == OWN
    return own and not inspect.ismodule(value) and getattr(value, "__name__", "") != "main"


def page(module: str, title: str, seen: set[int]) -> str:
    """Return the page of a module, without what another page has."""
    loaded = importlib.import_module(module)
    kinds: dict[str, list[str]] = {"Classes": [], "Functions": []}
    for name in loaded.__all__:
        value = getattr(loaded, name)
        if not is_listed(value) or id(value) in seen:
            continue
        seen.add(id(value))
        if inspect.isclass(value) and not issubclass(value, BaseException):
            kinds["Classes"].append(name)
        elif callable(value) and not inspect.isclass(value):
            kinds["Functions"].append(name)
    lines = [title, "=" * len(title), "", f".. currentmodule:: {module}", ""]
    for kind, names in kinds.items():
        if names:
            lines += [kind, "-" * len(kind), "", ".. autosummary::", "   :toctree: .", ""]
            lines += [f"   {name}" for name in sorted(names)]
            lines.append("")
    return "\n".join(lines)


def write(folder: Path) -> None:
    """Write all pages anew."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    seen: set[int] = set()
    for module, title in MODULES.items():
        (folder / f"module-{module}.rst").write_text(page(module, title, seen), encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    """Nothing to register: configuration calls write() before Sphinx looks for pages."""
    return {"parallel_read_safe": True}
