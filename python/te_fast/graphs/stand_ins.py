"""Stand-ins in Python for native entries, which ``torch.compile`` can trace."""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from te_fast.graphs.form import forward_traced
from te_fast.graphs.refusal import refusal
from te_fast.runtime import native
from te_fast.runtime.autocast import autocast
from te_fast.runtime.compiling import CAN_COMPILE
from te_fast.runtime.module_hooks import has_hooks

if TYPE_CHECKING:
    from collections.abc import Sequence


def _call_module(module: Any, *args: Any, **kwargs: Any) -> Any:
    return torch.nn.Module.__call__(module, *args, **kwargs)


def _call_layer(module: Any, *args: Any, **kwargs: Any) -> Any:
    # A trace sees no hooks that are added later, as with torch's own modules.
    if module._traced.is_owner_called_plainly():
        return _layer_forward(module, *args, **kwargs)
    return torch.nn.Module.__call__(module, *args, **kwargs)


def _layer_forward(
    module: Any,
    inp: Any,
    is_first_microbatch: bool | None = None,
    fp8_output: bool | None = None,
    fp8_grad: bool | None = None,
) -> Any:
    if fp8_output or fp8_grad:
        message = (
            f"{module.name}: fp8_output and fp8_grad are not traced by torch.compile; call the layer outside of it, or "
            "leave them at False"
        )
        raise refusal(message)
    return forward_traced(module, inp, is_first_microbatch)


_every_module = torch.nn.modules.module


def _are_called_plainly(*modules: Any) -> bool:
    if (
        _every_module._global_forward_hooks
        or _every_module._global_forward_pre_hooks
        or _every_module._global_backward_hooks
        or _every_module._global_backward_pre_hooks
    ):
        return False
    for module in modules:
        own = module.__dict__
        if has_hooks(module) or "forward" in own or own.get("_compiled_call_impl") is not None:
            return False
    return True


def _region(*args: Any, **kwargs: Any) -> Any:
    from te_fast.graphs.region import TracedRegion

    return TracedRegion(*args, **kwargs)


#: Methods that compiled code calls without tracing them: class, name of the method, and the reason.
_outside: list[tuple[type, str, str]] = []
#: Whether the compiler is loaded and the methods are registered with it.
_is_registered = False


def stays_outside(cls: type, name: str, reason: str) -> None:
    """Let compilers call a method without looking into it, from the moment that they are loaded.

    Parameters
    ----------
    cls : type
        The class.
    name : str
        The method.
    reason : str
        What ``torch.compile(fullgraph=True)`` says.
    """
    _outside.append((cls, name, reason))
    if _is_registered:  # the class was imported after the compiler
        _keep_outside(cls, name, reason)


def _keep_outside(cls: type, name: str, reason: str) -> None:
    from torch._dynamo import disable

    setattr(cls, name, disable(getattr(cls, name), reason=reason))


def _register() -> None:
    global _is_registered
    from torch._dynamo.decorators import substitute_in_graph

    for native_entry, stand_in in (
        (native.layer_call, _call_layer),
        (native.program_module_call, _call_module),
        (native.grouped_layer_call, _call_module),
        (native.layer_forward, _layer_forward),
        (native.are_called_plainly, _are_called_plainly),
    ):
        substitute_in_graph(native_entry, skip_signature_check=True)(stand_in)
    for entry in _outside:
        _keep_outside(*entry)
    substitute_in_graph(autocast, is_embedded_type=True, skip_signature_check=True)(_region)
    _is_registered = True


class _Loader(Loader):
    """Loads a module as its own loader does, and then registers."""

    def __init__(self, loader: Loader, finder: _Finder) -> None:
        self._loader, self._finder = loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Leave it to the module's own loader."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, and remove the finder that waited for it."""
        self._loader.exec_module(module)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
            _register()


class _Finder(MetaPathFinder):
    """Waits for ``torch._dynamo``, which takes a second to import and which most programs never need."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, _: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find only that module, with a loader that registers."""
        if name != "torch._dynamo":
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec


def register_when_dynamo_is_imported() -> None:
    """Let ``torch.compile`` trace layers and regions, from the moment that it is loaded."""
    if not CAN_COMPILE or _is_registered:
        return
    if "torch._dynamo" in sys.modules:
        _register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
