"""Processes that are ranks of one group, over gloo: their scenes, and the scenes' results."""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

TESTS = Path(__file__).parent
_device = torch.device("cpu")


def device():
    """Where this rank's tensors are."""
    return _device


class Stop(Exception):
    """Raised by a scene: its rank stops without telling the others, like a killed process."""


class Scenes:
    """Functions that every rank of a group runs, and that raise where a result is wrong."""

    def __init__(self):
        self.functions = {}

    def scene(self, function):
        """Register a function under its name."""
        self.functions[function.__name__] = function
        return function

    def main(self):
        """Run as ``python script.py RANK WORLD FOLDER KIND SCENE ...``; write what each scene raised.

        KIND is ``cpu`` or ``cuda``, for gloo or NCCL with a GPU for each rank.
        """
        global _device
        rank, size, folder, kind = (
            int(sys.argv[1]),
            int(sys.argv[2]),
            Path(sys.argv[3]),
            sys.argv[4],
        )
        torch.set_num_threads(1)
        if kind == "cuda":
            _device = torch.device("cuda", rank)
            torch.cuda.set_device(_device)
            torch.set_default_device(_device)
        dist.init_process_group(
            "nccl" if kind == "cuda" else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size,
            timeout=datetime.timedelta(seconds=60),
        )  # fmt: skip
        found, stops = {}, False
        try:
            for name in sys.argv[5:]:
                self.functions[name]()
                found[name] = ""
        except Stop:
            found[name], stops = "", True
        except Exception:  # the other ranks wait in vain
            found[name] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(found))
        (folder / f"{rank}.done").touch()
        if stops:
            os._exit(0)
        # No rank may end before all are done: its connections would close while others read them.
        deadline = time.monotonic() + 60
        while len(list(folder.glob("*.done"))) < size and time.monotonic() < deadline:
            time.sleep(0.01)


def asked(request, scenes):
    """Scenes of a fixture whose tests were selected: the ranks run no other scenes."""
    wanted = {
        item.callspec.params["scene"]
        for item in request.session.items
        if item.path == request.path and request.fixturename in item.fixturenames
    }
    return [name for name in scenes if name in wanted]


def run(fresh, folder, script, size, scenes, kind="cpu"):
    """Run scenes of a script on a number of ranks; return the errors of each scene, by rank."""
    program = (
        "import runpy, sys; sys.argv[1:] = {}; sys.path.insert(0, {!r}); "
        "runpy.run_module({!r}, run_name='__main__')"
    )
    arguments = ([str(rank), str(size), str(folder), kind, *scenes] for rank in range(size))
    fresh.together(*(program.format(given, str(TESTS), script) for given in arguments))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
