"""Instructions of the host per call, on emulated Arm and x86-64 with one instrument: the stand-in for Grace.

    make bench-instructions

qemu-user runs the wheels of both machines, with the same torch, and a plugin (tools/arm/count.c) counts the guest's
instructions. Launches are recorded instead of made, so that only the bookkeeping of a call is counted. Instructions
are not cycles: the counts say nothing about caches, branches, or the driver's launches.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CHILD = ROOT / "benches" / "_instructions_child.py"


def build_plugin(folder: Path) -> Path:
    """Compile the plugin."""
    plugin = folder / "count.so"
    command = [
        "cc",
        "-O2",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-shared",
        "-fPIC",
        "-fvisibility=hidden",
    ]
    subprocess.run([*command, str(ROOT / "tools/arm/count.c"), "-o", str(plugin)], check=True)
    return plugin


class Counts(NamedTuple):
    """Instructions per call by name: all of them, and those of te_fast's native module."""

    versions: dict[str, str]
    counts: dict[str, tuple[int, int]]


def count(emulator: list[str], python: str, packages: list[str]) -> Counts:
    """Run the calls under an emulator."""
    with tempfile.TemporaryDirectory() as folder:
        plugin, output = build_plugin(Path(folder)), Path(folder) / "counts"
        variables = os.environ | {"PYTHONPATH": os.pathsep.join(packages), "OMP_NUM_THREADS": "1"}
        run = subprocess.run(
            [*emulator, "-plugin", f"{plugin},out={output}", python, str(CHILD)],
            env=variables,
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode:
            raise SystemExit(run.stderr)
        told = json.loads(run.stdout.splitlines()[-1])
        marks = [tuple(map(int, line.split())) for line in output.read_text().splitlines()]
    counts = {}
    for index, name in enumerate(told["names"]):
        before, after = marks[2 * index : 2 * index + 2]
        all_, native = (
            round((end - begin) / told["calls"]) for begin, end in zip(before, after, strict=True)
        )
        counts[name] = (all_, native)
    return Counts(told["versions"], counts)


def main() -> int:
    """Count on both machines, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arm-root", default=".build/arm/root", help="of tools/arm/userland.sh")
    parser.add_argument("--arm-packages", nargs="+", required=True, help="folders with te_fast")
    parser.add_argument(
        "--packages", nargs="+", required=True, help="folders with te_fast and torch"
    )
    parser.add_argument("--python", default="/usr/bin/python3.11", help="of this machine's system")
    parser.add_argument("--out", type=Path, default=ROOT / "benches/results/instructions.json")
    arguments = parser.parse_args()
    arm_python = f"{arguments.arm_root}/usr/bin/python3.11"
    arm = count(["qemu-aarch64", "-L", arguments.arm_root], arm_python, arguments.arm_packages)
    x86 = count(["qemu-x86_64", "-cpu", "max"], arguments.python, arguments.packages)
    figures: dict[str, dict[str, float]] = {}
    for name in arm.counts:
        (all_arm, native_arm), (all_x86, native_x86) = arm.counts[name], x86.counts[name]
        figures[name] = {
            "aarch64": all_arm,
            "x86_64": all_x86,
            "ratio": round(all_arm / all_x86, 2),
            "aarch64, native": native_arm,
            "x86_64, native": native_x86,
        }
        print(f"{name:26}", *(f"{value:8}" for value in figures[name].values()))
    text = {
        "bench": "instructions",
        "environment": {
            "command": "make bench-instructions",
            "emulator": subprocess.run(
                ["qemu-aarch64", "--version"], capture_output=True, text=True, check=True
            ).stdout.splitlines()[0],
            **arm.versions,
        },
        "figures": figures,
    }
    arguments.out.write_text(json.dumps(text, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
