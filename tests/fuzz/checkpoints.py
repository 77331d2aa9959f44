"""Fuzz the readers of checkpoint states, guided by the branches that inputs take: `make fuzz`.

    python tests/fuzz/checkpoints.py own|pickled CORPUS [libFuzzer's options]

For any bytes, a reader gives a consistent state, None, or a StateError, within libFuzzer's limits of memory and time.
Inputs of `own` are the bytes after the checksum. The fuzzer puts the right checksum before them, so that the reader
gets past it.
"""

import io
import pickle
import struct
import sys
import warnings
import zlib
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["te_fast.state", "pickletools", "zipfile"]):
    from te_fast.state.extra_state import ExtraState, pack, unpack

import torch

from te_fast.common.recipe import DelayedScaling, Format
from te_fast.errors import StateError
from te_fast.state.pickle_writer import layer_state, op_state

KEYS = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")

HEAD = struct.Struct("<8sII")


def states():
    """States of layers and ops to begin from."""
    for length, gemms in ((1, 1), (4, 1), (2, 2)):
        for number_format in (Format.HYBRID, Format.E4M3):
            recipe = DelayedScaling(amax_history_len=length, fp8_format=number_format)
            yield ExtraState(
                recipe,
                torch.full((3 * gemms,), 2.0),
                torch.rand(length, 3 * gemms),
                torch.full((2 * gemms,), 4.0),
                torch.rand(length, 2 * gemms),
            )


def saved(content, **options):
    """Return the bytes that torch.save writes."""
    stream = io.BytesIO()
    torch.save(content, stream, **options)
    return stream.getvalue()


def corpus(kind):
    """Yield the first inputs of a kind."""
    for state in states():
        if kind == "own":
            yield bytes(pack(state).tolist())[HEAD.size :]
            continue
        yield layer_state(state)
        yield op_state(state)
        content = {key: getattr(state, key) for key in KEYS}
        yield saved(content)
        yield saved(content, _use_new_zipfile_serialization=False)
        for protocol in (2, 4, 5):
            yield pickle.dumps(content, protocol=protocol)


def check(state):
    """Raise unless a state that was read is consistent, and survives te_fast's own format."""
    for scale, history in (
        (state.scale_fwd, state.amax_history_fwd),
        (state.scale_bwd, state.amax_history_bwd),
    ):
        assert scale.dtype is history.dtype is torch.float32
        assert history.shape[1:] == scale.shape
        assert bool((scale > 0).all() and scale.isfinite().all())
    state.recipe._validate()
    assert isinstance(state.recipe.margin, int)
    again = unpack(pack(state), layer="fuzz")
    for key in KEYS:
        assert torch.equal(
            getattr(again, key).view(torch.int32),
            getattr(state, key).contiguous().view(torch.int32),
        )
    assert repr(again.recipe) == repr(state.recipe)


def read_pickled(data):
    """Read bytes without changes."""
    if not data:
        return
    try:
        state = unpack(torch.frombuffer(bytearray(data), dtype=torch.uint8), layer="fuzz")
    except StateError as error:
        str(error)
    else:
        if state is not None:
            check(state)


def read_own(data):
    """Read bytes after a head with the right checksum."""
    read_pickled(HEAD.pack(b"te_fast\0", 1, zlib.crc32(data)) + data)


def main():
    """Make the corpus if there is none, and fuzz."""
    kind, folder, *options = sys.argv[1:]
    warnings.simplefilter("error")
    torch.manual_seed(0)
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    for index, data in enumerate(corpus(kind)):
        (path / f"first-{index}").write_bytes(data)
    read = {"own": read_own, "pickled": read_pickled}[kind]
    atheris.Setup([sys.argv[0], *options, folder], read)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
