"""Instructions of the host per call, on emulated Arm and x86-64 with one instrument: the stand-in for Grace.

    make bench-instructions

qemu-user runs the wheel of either machine, with the same torch, and a plugin (tools/arm/count.c) counts the guest's
instructions. Launches are recorded instead of made, so that a call is its bookkeeping. Instructions are no
cycles: nothing here speaks of caches, of branches, or of the driver's launches.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

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


def count(emulator: list[str], python: str, packages: list[str]) -> dict[str, dict[str, int]]:
    """Run the calls under an emulator; instructions per call by name, in all and of te_fast's native module."""
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
    result = {"versions": told["versions"]}
    for index, name in enumerate(told["names"]):
        (all_before, native_before), (all_after, native_after) = marks[2 * index : 2 * index + 2]
        result[name] = {
            "all": round((all_after - all_before) / told["calls"]),
            "native": round((native_after - native_before) / told["calls"]),
        }
    return result


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
    figures = {
        name: {"aarch64": arm[name], "x86_64": x86[name]} for name in arm if name != "versions"
    }
    for name, counts in figures.items():
        a, x = counts["aarch64"], counts["x86_64"]
        print(
            f"{name:26}{a['all']:8}{x['all']:8}  {a['all'] / x['all']:.2f}   {a['native']}/{x['native']}"
        )
    text = {
        "bench": "instructions",
        "environment": {
            "command": "make bench-instructions",
            "emulator": subprocess.run(
                ["qemu-aarch64", "--version"], capture_output=True, text=True, check=True
            ).stdout.splitlines()[0],
            "aarch64": arm["versions"],
            "x86_64": x86["versions"],
        },
        "figures": figures,
    }
    arguments.out.write_text(json.dumps(text, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
