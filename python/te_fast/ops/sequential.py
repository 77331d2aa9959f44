"""The container that fuses operations."""

from __future__ import annotations

import contextlib
import numbers
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakSet

import torch

from te_fast.errors import ArgumentError, ArgumentIndexError, StateError, TeFastError
from te_fast.ops.fuser import OperationFuser
from te_fast.ops.op import FusedOperation, FusibleOperation
from te_fast.ops.undo import Undo
from te_fast.runtime.calls import call_through_forward, program_call_method
from te_fast.runtime.compiling import is_in_graph
from te_fast.runtime.global_state import FP8GlobalStateManager

#: All containers, of which those that are alike may share graphs.
_containers: WeakSet[Sequential] = WeakSet()


class Sequential(torch.nn.Module):
    """A ``torch.nn.Sequential`` that runs adjacent fusible operations as one.

    Plain modules in between run as they are, and separate groups.

    Parameters
    ----------
    *args : FusibleOperation or torch.nn.Module
        Modules, or one dictionary of them.

    See Also
    --------
    torch.nn.Sequential : torch's.
    OperationFuser : A group of operations.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> chain = te.ops.Sequential(
    ...     te.ops.LayerNorm(64, device="cpu"),
    ...     te.ops.Linear(64, 128, device="cpu"),
    ...     te.ops.GELU(),
    ...     te.ops.Linear(128, 64, device="cpu"),
    ... )
    >>> with te.autocast():
    ...     y = chain(torch.ones(16, 64))
    >>> tuple(y.shape)
    (16, 64)
    """

    def __init__(self, *args: Any) -> None:
        super().__init__()
        self._module_groups: list[Any] | None = None
        if len(args) == 1 and isinstance(args[0], dict):
            for name, module in args[0].items():
                self.add_module(name, module)
        else:
            self.extend(args)
        _containers.add(self)

    # The list -------------------------------------------------------------------------------------

    def _changed(self) -> None:
        """Drop the groups.

        Raises
        ------
        StateError
            If a forward is running.
        """
        groups = self.__dict__.get("_module_groups") or ()
        if any(isinstance(group, OperationFuser) and group.is_running for group in groups):
            message = "Sequential: edited from one of its own operations while it runs"
            raise StateError(message)
        self.__dict__.update(_module_groups=None, _direct_program=None, _direct_call=None)

    def _check_module(self, module: Any) -> None:
        """Raise unless the container can hold something."""
        if not isinstance(module, torch.nn.Module):
            message = f"Sequential: expected a torch.nn.Module, got {type(module).__name__}"
            raise ArgumentError(message)
        if any(part is self for part in module.modules()):
            message = "Sequential: a container cannot hold itself"
            raise ArgumentError(message)

    def add_module(self, name: str, module: torch.nn.Module | None) -> None:
        """Add or replace a module."""
        self._check_module(module)
        self._changed()
        super().add_module(name, module)

    def __setattr__(self, name: str, value: Any) -> None:
        """Drop the groups when a module is replaced by name."""
        if isinstance(value, torch.nn.Module):
            self._changed()
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Drop the groups when a module is removed by name."""
        if name in self._modules:
            self._changed()
        super().__delattr__(name)

    def _keys(self, index: int | slice) -> list[str]:
        keys = list(self._modules)
        if isinstance(index, slice):
            return keys[index]
        number = _whole(index)
        if not -len(keys) <= number < len(keys):
            message = f"Sequential: index {index} is out of range, there are {len(keys)} modules"
            raise ArgumentIndexError(message)
        return [keys[number]]

    def _next_key(self) -> str:
        numbers = (int(key) for key in self._modules if key.isdecimal())
        return str(max(numbers, default=-1) + 1)

    def __getitem__(self, idx: slice | int) -> Any:
        """Return a module, or for a slice a container that shares the modules."""
        keys = self._keys(idx)
        if isinstance(idx, slice):
            return Sequential(*(self._modules[key] for key in keys))
        return self._modules[keys[0]]

    def __setitem__(self, idx: int, module: torch.nn.Module) -> None:
        """Replace a module; for a slice, the first one of it."""
        keys = self._keys(idx)
        if not keys:
            message = f"Sequential: the slice {idx} has no module to replace, there are {len(self)}"
            raise ArgumentIndexError(message)
        self.add_module(keys[0], module)

    def __delitem__(self, idx: slice | int) -> None:
        """Remove modules."""
        keys = self._keys(idx)
        self._changed()
        for key in keys:
            del self._modules[key]

    def __len__(self) -> int:
        """Return the number of modules."""
        return len(self._modules)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the modules."""
        return iter(self._modules.values())

    def append(self, module: torch.nn.Module) -> Sequential:
        """Add a module at the end."""
        self.add_module(self._next_key(), module)
        return self

    def extend(self, modules: Iterable[torch.nn.Module]) -> Sequential:
        """Add modules at the end."""
        if not isinstance(modules, Iterable):
            message = f"Sequential: expected an iterable of modules, got {type(modules).__name__}"
            raise ArgumentError(message)
        for module in list(modules):
            self.append(module)
        return self

    def insert(self, idx: int, module: torch.nn.Module) -> Sequential:
        """Add a module before another."""
        self._check_module(module)
        self._changed()
        keys = [*self._modules, self._next_key()]
        modules = list(self._modules.values())
        modules.insert(_whole(idx), module)
        self._modules.clear()
        self._modules.update(zip(keys, modules, strict=True))
        return self

    def pop(self, idx: slice | int) -> Any:
        """Remove modules and return them."""
        out = self[idx]
        del self[idx]
        return out

    def __iadd__(self, modules: Iterable[torch.nn.Module]) -> Sequential:
        """Add modules at the end."""
        return self.extend(modules)

    def __add__(self, modules: Iterable[torch.nn.Module]) -> Sequential:
        """Return a container of these and other modules."""
        return Sequential(*self, *modules)

    # Groups ---------------------------------------------------------------------------------------

    def _groups(self) -> list[Any]:
        """Return the plain modules, and a fuser per run of operations."""
        groups = self._module_groups
        if groups is not None:
            return groups
        groups = []
        run: list[tuple[str, FusibleOperation]] = []
        for name, module in [*self._modules.items(), ("", None)]:
            if isinstance(module, FusibleOperation):
                run.append((name, module))
                continue
            if run:
                groups.append(OperationFuser([op for _, op in run], names=[key for key, _ in run]))
                run = []
            if module is not None:
                groups.append(module)
        if len(groups) == 1 and isinstance(groups[0], OperationFuser):
            groups[0].runs_for(self)
        self._module_groups = groups
        return groups

    def _prepare_groups(self) -> None:
        """Make the groups of each container that is like this one: one without would not fit the graph."""
        self._groups()
        kinds = [(name, type(module)) for name, module in self._modules.items()]
        for other in list(_containers):
            if [(name, type(module)) for name, module in other._modules.items()] == kinds:
                with contextlib.suppress(TeFastError):  # its own call raises it
                    other._groups()

    _prepare_groups._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _init_delayed_scaling(self) -> None:
        """Register scales; called when the program of the only group runs and the region is new."""
        self._groups()[0]._init_delayed_scaling()

    def explain(self) -> str:
        """Describe the programs with their launches per direction, and why a fusion did not apply.

        Returns
        -------
        str
            Lines of text. Launches are known only for calls that have run.
        """
        lines = []
        for group in self._groups():
            is_fuser = isinstance(group, OperationFuser)
            lines.append(group.explain() if is_fuser else f"{type(group).__name__}: a plain module")
        return "\n".join(lines)

    def __repr__(self) -> str:
        """Show the modules, and their compiled programs."""
        shown = super().__repr__()
        groups = self.__dict__.get("_module_groups")
        return shown if groups is None else f"{shown}\n{self.explain()}"

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Drop the compiled programs, since ``.to()`` and its kin replace the parameters."""
        self._changed()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the groups out; the copy makes its own."""
        left_out = {"_module_groups": None, "_direct_program": None, "_direct_call": None}
        return super().__getstate__() | left_out

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a copied or pickled state."""
        super().__setstate__(state)
        _containers.add(self)

    # Running --------------------------------------------------------------------------------------

    # `chain(x)` enters here: one native program runs at once if there is no hook and no option.
    __call__ = program_call_method

    def __init_subclass__(cls, **options: Any) -> None:
        """Let subclasses that override ``forward`` be called as any module."""
        super().__init_subclass__(**options)
        call_through_forward(cls)

    def forward(
        self,
        input: torch.Tensor,
        *extra_inputs: torch.Tensor,
        op_kwargs: dict[Any, dict[str, Any]] | None = None,
        is_first_microbatch: bool | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run all modules.

        Parameters
        ----------
        input : torch.Tensor
            Input.
        *extra_inputs : torch.Tensor
            Extra inputs of the operations, in their order.
        op_kwargs : dict, optional
            Keyword arguments of operations, by the operation or its index.
        is_first_microbatch : bool, optional
            As of :class:`te_fast.pytorch.Linear`, for all linear operations; a keyword of te_fast.

        Returns
        -------
        torch.Tensor or tuple
            Output; with extra outputs, and those.

        Raises
        ------
        ArgumentError, ShapeError, DtypeError, DeviceError
            If arguments do not fit; they name the operation.
        StateError
            If a module edits the container meanwhile.
        """
        if is_in_graph():
            self._prepare_groups()
        groups = self._groups()
        fusers = [group for group in groups if isinstance(group, OperationFuser)]
        for fuser in fusers:
            fuser._refuse_stale()
        wanted = sum(fuser.num_extra_inputs for fuser in fusers)
        if len(extra_inputs) != wanted:
            takers = [
                fuser._labels[index] for fuser in fusers for index, _ in fuser._routing.inputs
            ]
            message = (
                f"Sequential: expected {wanted} extra inputs ({', '.join(takers) or 'none'}), "
                f"got {len(extra_inputs)}"
            )
            raise ArgumentError(message)
        kwargs = self._kwargs_by_op(op_kwargs)

        def run() -> Any:
            return self._run(groups, input, extra_inputs, kwargs, is_first_microbatch)

        # A failed trace has not run anything, so there is nothing to undo.
        if len(groups) < 2 or is_in_graph() or not FP8GlobalStateManager.is_fp8_enabled():
            return run()
        recipe = FP8GlobalStateManager.get_fp8_recipe()
        undo = Undo([op for fuser in fusers for op in fuser._basic_ops], recipe)
        try:
            return run()
        except BaseException:  # a plain module may raise at any time
            undo.restore()
            raise

    _called_forward = forward

    def _run(
        self,
        groups: list[Any],
        x: torch.Tensor,
        extra_inputs: Sequence[torch.Tensor],
        kwargs: dict[int, Any],
        is_first_microbatch: bool | None,
    ) -> Any:
        extras = list(extra_inputs)
        outputs: list[torch.Tensor] = []
        for group in groups:
            if self._module_groups is not groups:
                message = "Sequential: edited by one of its modules while it runs"
                raise StateError(message)
            if not isinstance(group, OperationFuser):
                x = group(x)
                continue
            count = group.num_extra_inputs
            own, extras = extras[:count], extras[count:]
            result = group(
                x,
                *own,
                basic_op_kwargs=[kwargs.get(id(op), {}) for op in group._basic_ops]
                if kwargs
                else None,
                is_first_microbatch=is_first_microbatch,
            )
            if isinstance(result, tuple):
                x = result[0]
                outputs += result[1:]
            else:
                x = result
        return (x, *outputs) if outputs else x

    def _kwargs_by_op(self, op_kwargs: dict[Any, dict[str, Any]] | None) -> dict[int, Any]:
        """Return keyword arguments by the identity of the basic operation that takes them."""
        if op_kwargs is not None and not isinstance(op_kwargs, dict):
            message = f"Sequential: op_kwargs must be a dict, got {type(op_kwargs).__name__}"
            raise ArgumentError(message)
        found: dict[int, Any] = {}
        modules = list(self._modules.values())
        for key, kwargs in (op_kwargs or {}).items():
            op = self._modules[self._keys(key)[0]] if isinstance(key, int) else key
            if not isinstance(op, FusibleOperation) or not _holds(modules, op):
                message = (
                    f"Sequential: op_kwargs has the key {_shown(key)}, which is no fusible operation "
                    "of the container, nor the index of one"
                )
                raise ArgumentError(message)
            if not isinstance(kwargs, dict):
                message = (
                    f"Sequential: op_kwargs must have a dict of keyword arguments for {_shown(key)}, got "
                    f"{type(kwargs).__name__}"
                )
                raise ArgumentError(message)
            while isinstance(op, FusedOperation):
                op = op._parts()[0]
            found[id(op)] = kwargs
        return found


def _whole(index: Any) -> int:
    """Return an index as an integer.

    Raises
    ------
    ArgumentError
        If it is not an integer. Transformer Engine takes numbers of any class that equal an integer, and raises
        ``RuntimeError`` for others.
    """
    try:
        return operator.index(index)
    except TypeError:
        pass
    if not isinstance(index, numbers.Real):
        message = f"Sequential: an index must be an integer or a slice, got {type(index).__name__} {index!r}"
        raise ArgumentError(message)
    if not float(index).is_integer():
        message = f"Sequential: an index must be an integer or a slice, got {index!r}"
        raise ArgumentIndexError(message)
    return int(float(index))


def _shown(key: Any) -> str:
    return type(key).__name__ if isinstance(key, torch.nn.Module) else repr(key)


def _holds(modules: Iterable[Any], op: FusibleOperation) -> bool:
    for module in modules:
        if module is op:
            return True
        if isinstance(module, FusedOperation) and _holds(module.basic_ops, op):
            return True
    return False
