"""Write the pages of the reference's modules: summary tables of what is public, and a page for each name.

The names are those of ``__all__``, so that a new one is in the reference by being public.
"""

from __future__ import annotations

import importlib
import inspect
import shutil
from pathlib import Path
from typing import Any

MODULES = {
    "te_fast": "The package",
    "te_fast.pytorch": "Layers, autocast, MoE",
    "te_fast.pytorch.ops": "Fusible operations",
    "te_fast.pytorch.distributed": "Recomputation and ranks",
    "te_fast.common.recipe": "Recipes",
    "te_fast.dispatch": "The dispatcher",
    "te_fast.profiling": "Profiling",
    "te_fast.doctor": "The doctor",
}
# What te_fast does not define is torch's to document.
OWN = "te_fast"


def is_own(fullname: str, member: str) -> bool:
    """Whether te_fast itself defines a member of a class, or of a base of it."""
    module, _, name = fullname.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    owner = next((base for base in cls.__mro__ if member in vars(base)), None)
    if owner is None or member.startswith("_"):
        return False
    value = vars(owner)[member]
    is_documented = callable(value) or isinstance(value, (property, classmethod, staticmethod))
    return (
        owner.__module__.partition(".")[0] == OWN and is_documented and bool(inspect.getdoc(value))
    )


def page(module: str, title: str) -> str:
    """Return the page of a module."""
    loaded = importlib.import_module(module)
    public = [name for name in loaded.__all__ if not inspect.ismodule(getattr(loaded, name))]
    kinds: dict[str, list[str]] = {"Classes": [], "Functions": []}
    for name in public:
        value = getattr(loaded, name)
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
    for module, title in MODULES.items():
        (folder / f"module-{module}.rst").write_text(page(module, title), encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    """Nothing to register: configuration calls write() before Sphinx looks for pages."""
    return {"parallel_read_safe": True}
