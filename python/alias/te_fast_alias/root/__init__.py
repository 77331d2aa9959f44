"""te_fast under the name of Transformer Engine: this is not NVIDIA's package.

Its submodules are te_fast's own module objects, so that classes, recipes and the state of the
process are the same under either name.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
import sys
from types import ModuleType

import torch

from te_fast import common, pytorch
from te_fast._names import rename
from te_fast.errors import MissingError
from te_fast.state.extra_state import write_as
from te_fast_alias.metadata import alias_version

__all__ = ["__version__", "common", "pytorch"]

__version__ = alias_version()
#: Whether this is te_fast, for reports of bugs.
__te_fast__ = True


def _register(package: ModuleType) -> None:
    """Register a package of te_fast and all below it under this module's name."""
    name = package.__name__
    sys.modules[__name__ + name.removeprefix("te_fast")] = package
    for _, submodule, _ in pkgutil.walk_packages(package.__path__, f"{name}."):
        sys.modules[__name__ + submodule.removeprefix("te_fast")] = importlib.import_module(
            submodule
        )


def __getattr__(name: str) -> object:
    """Raise an error that names te_fast."""
    message = f"module 'transformer_engine' (te_fast {__version__}) has no attribute {name!r}"
    raise MissingError(message)


def _name_recipes() -> None:
    """Let pickles name recipes as Transformer Engine does: Megatron-LM's checkpoint reader accepts no other names."""
    for name in (*common.recipe.__all__, "_FormatHelper"):
        getattr(common.recipe, name).__module__ = f"{__name__}.common.recipe"


for _package in (common, pytorch):
    _register(_package)
_name_recipes()
# Lightning looks for this name in the layers of a model, and replaces linear layers if it finds no such layer.
rename(pytorch.__name__, f"{__name__}.pytorch", torch.nn.Module)
write_as("transformer_engine")
logging.getLogger(__name__).info("transformer_engine %s is te_fast", __version__)
