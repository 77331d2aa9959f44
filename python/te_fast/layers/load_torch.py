"""Copies the parameters of ``torch.nn`` modules into layers that have them under other names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from te_fast.errors import DeviceError, DtypeError, ShapeError

#: A module of ``torch.nn``, or its state dict.
Source = torch.nn.Module | Mapping[str, torch.Tensor]


def _state_of(source: Source, what: str) -> Mapping[str, torch.Tensor]:
    if isinstance(source, torch.nn.Module):
        return source.state_dict()
    if isinstance(source, Mapping):
        return source
    message = f"{what} must come from a module or its state dict, got {type(source).__name__}"
    raise DtypeError(message)


#: A parameter, and the values that it gets.
Copy = tuple[torch.Tensor, torch.Tensor]


def copies_of(
    targets: Mapping[str, Sequence[torch.Tensor]],
    sources: Source | Sequence[Source],
    what: str,
    *,
    less: Mapping[str, float] | None = None,
) -> list[Copy]:
    """Return the copies that load parameters strictly: every parameter of both sides is used, completely.

    Parameters
    ----------
    targets : mapping of str to sequence of torch.Tensor
        By name in the source, the parts that its rows go into, one after the other.
    sources : module or state dict, or a sequence of them
        The rows of several sources follow one another.
    what : str
        Layer and part, for messages.
    less : mapping of str to float, optional
        By name, what a parameter is stored less. It is subtracted before the values are rounded to its type.

    Raises
    ------
    ShapeError
        If a name is missing or unknown, or a shape differs.
    DtypeError
        If a source is neither a module nor a mapping.
    DeviceError
        If a parameter of either side is on the meta device.
    """
    listed = list(sources) if isinstance(sources, Sequence) else [sources]
    states = [_state_of(source, what) for source in listed]
    for state in states:
        names = {name for name in state if not name.endswith("_extra_state")}
        if names != set(targets):
            message = f"{what} needs exactly {sorted(targets)}, got {sorted(names)}"
            raise ShapeError(message)
    copies: list[Copy] = []
    for name, parts in targets.items():
        whole = torch.cat([state[name].detach() for state in states])
        rows = [part.shape[0] for part in parts]
        expected = (sum(rows), *parts[0].shape[1:])
        if whole.shape != expected:
            message = f"{what}.{name} must have shape {list(expected)}, got {list(whole.shape)}"
            raise ShapeError(message)
        if whole.is_meta or any(part.is_meta for part in parts):
            message = (
                f"{what}.{name}: the {'source' if whole.is_meta else 'layer'} is on the meta device; load its "
                "checkpoint, or call to_empty() or reset_parameters(), first"
            )
            raise DeviceError(message)
        if less is not None and name in less:
            whole = whole.double() - less[name]
        copies.extend(zip(parts, whole.split(rows), strict=True))
    return copies


@torch.no_grad()
def copy_all(copies: Iterable[Copy]) -> None:
    """Make copies, after all of them have been checked."""
    for part, values in copies:
        part.copy_(values)
