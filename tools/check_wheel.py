"""Check wheels: tags, size, linked libraries, symbols of glibc, machine code, metadata, import.

python tools/check_wheel.py dist/te_fast-*.whl [--archs 80,89,90,100,120] [--of-this-machine]

A wheel for another Python or another machine than the ones that run this is not imported.
"""

from __future__ import annotations

import argparse
import compileall
import platform
import re
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

MAX_BYTES = 20 * 1000 * 1000
RELEASE_ARCHS = "80,89,90,100,120"
# PTX beside the last listed architecture's: architectures between the listed ones can run it (rust/kernels/build.rs).
PTX_ARCH = 90
# The oldest glibc of torch's own wheels.
GLIBC = (2, 28)
ELF_MACHINES = {"x86_64": 62, "aarch64": 183}
# System libraries that a wheel may need; CUDA and torch are resolved at run time.
SYSTEM_LIBRARIES = {
    "libc.so.6",
    "libdl.so.2",
    "libgcc_s.so.1",
    "libm.so.6",
    "libpthread.so.0",
    "librt.so.1",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
}
FATBIN_MAGIC = struct.pack("<IH", 0xBA55ED50, 1)
PTX, MACHINE_CODE = 1, 2
DT_NEEDED, DT_STRTAB, PT_LOAD, PT_DYNAMIC = 1, 5, 1, 2
IMPORT_SCRIPT = """
import sys, time
import torch
begin = time.perf_counter()
import te_fast.pytorch
seconds = time.perf_counter() - begin
assert not torch.cuda.is_initialized(), "importing te_fast initialised CUDA"
print(f"import te_fast.pytorch: {seconds * 1e3:.1f} ms beyond import torch")
"""


def needed_libraries(image: bytes) -> list[str]:
    """``DT_NEEDED`` entries of a 64-bit little-endian ELF file."""
    if image[:6] != b"\x7fELF\x02\x01":
        message = "not a 64-bit little-endian ELF file"
        raise ValueError(message)
    header_offset = struct.unpack_from("<Q", image, 32)[0]
    entry_size, entries = struct.unpack_from("<HH", image, 54)
    segments = [
        struct.unpack_from("<IIQQQQ", image, header_offset + index * entry_size)
        for index in range(entries)
    ]
    loads = [
        (address, offset, size) for kind, _, offset, address, _, size in segments if kind == PT_LOAD
    ]
    dynamic = next((offset, size) for kind, _, offset, _, _, size in segments if kind == PT_DYNAMIC)
    tags = list(struct.iter_unpack("<QQ", image[dynamic[0] : dynamic[0] + dynamic[1] // 16 * 16]))
    table = next(value for tag, value in tags if tag == DT_STRTAB)
    strings = next(table - a + o for a, o, size in loads if a <= table < a + size)
    starts = [strings + value for tag, value in tags if tag == DT_NEEDED]
    return [image[start : image.index(b"\0", start)].decode() for start in starts]


def newest_glibc(image: bytes) -> tuple[int, int]:
    """Return the newest version of glibc whose symbols ``image`` asks for."""
    found = re.findall(rb"\0GLIBC_(\d+)\.(\d+)", image)
    return max(((int(major), int(minor)) for major, minor in found), default=(0, 0))


def expected_ptx(archs: set[int]) -> set[int]:
    """Architectures whose PTX a build for ``archs`` holds."""
    return {max(archs)} | (archs & {PTX_ARCH})


def fatbin_entries(image: bytes) -> set[tuple[int, int]]:
    """Pairs of kind and architecture of every entry of every fatbin inside ``image``."""
    found = set()
    position = image.find(FATBIN_MAGIC)
    while position >= 0:
        header_size, size = struct.unpack_from("<HQ", image, position + 6)
        entry, end = position + header_size, position + header_size + size
        while entry < end <= len(image):
            kind, _, entry_header, entry_size = struct.unpack_from("<HHIQ", image, entry)
            if kind not in (PTX, MACHINE_CODE) or not entry_header:
                break
            found.add((kind, struct.unpack_from("<I", image, entry + 28)[0]))
            entry += entry_header + entry_size
        position = image.find(FATBIN_MAGIC, position + 1)
    return found


def tag_problems(wheel: Path) -> list[str]:
    """Yield the faults in the name of a wheel for release."""
    python, abi, platforms = wheel.stem.split("-")[-3:]
    machine = platforms.rpartition("2_28_")[2]
    expected = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{machine}"
    problems = []
    if platforms != expected or machine not in ELF_MACHINES:
        problems.append(f"platform {platforms}, expected manylinux_2_28 of {list(ELF_MACHINES)}")
    if python != abi or not python.startswith("cp3"):
        problems.append(f"tags {python}-{abi}, expected one CPython twice")
    return problems


def metadata_problems(archive: zipfile.ZipFile) -> list[str]:
    """Yield the faults of the files beside the extension module."""
    names = archive.namelist()
    problems = [
        f"{name} is missing"
        for name in ("te_fast/py.typed", "te_fast/_native.pyi")
        if name not in names
    ]
    licences = [name for name in names if name.endswith("LICENSE")]
    if len(licences) != 1 or ".dist-info/licenses/" not in licences[0]:
        problems.append(f"licences {licences}, expected one in dist-info")
    metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
    requires = [
        line.split(": ")[1]
        for line in archive.read(metadata).decode().splitlines()
        if line.startswith("Requires-Dist")
    ]
    if [line for line in requires if not line.startswith("torch")]:
        problems.append(f"requirements {requires}, expected torch alone")
    return problems


def extension_problems(
    name: str, image: bytes, archs: set[int], *, of_this_machine: bool
) -> list[str]:
    """Yield the faults of the extension module."""
    problems = []
    needed = set(needed_libraries(image))
    glibc = newest_glibc(image)
    print(f"{name}: needs {', '.join(sorted(needed))}, glibc {glibc[0]}.{glibc[1]}")
    if needed - SYSTEM_LIBRARIES:
        problems.append(f"{name} links {sorted(needed - SYSTEM_LIBRARIES)}")
    if glibc > GLIBC and not of_this_machine:
        problems.append(f"{name} needs glibc {glibc}, expected at most {GLIBC}")
    machine = struct.unpack_from("<H", image, 18)[0]
    if machine != next((ELF_MACHINES[key] for key in ELF_MACHINES if key in name), None):
        problems.append(f"{name} is code for ELF machine {machine}")
    entries = fatbin_entries(image)
    code = {arch for kind, arch in entries if kind == MACHINE_CODE}
    ptx = {arch for kind, arch in entries if kind == PTX}
    print(f"{name}: machine code for {sorted(code)}, PTX for {sorted(ptx)}")
    if code != archs or ptx != expected_ptx(archs):
        problems.append(
            f"expected machine code for {sorted(archs)} and PTX for {sorted(expected_ptx(archs))}"
        )
    return problems


def problems_of(wheel: Path, archs: set[int], *, of_this_machine: bool = False) -> list[str]:
    """Yield the faults of a wheel, without importing it."""
    size = wheel.stat().st_size
    print(f"{wheel.name}: {size / 1e6:.2f} MB")
    problems = [] if of_this_machine else tag_problems(wheel)
    if size > MAX_BYTES:
        problems.append(f"{size} bytes, at most {MAX_BYTES}")
    with zipfile.ZipFile(wheel) as archive:
        problems += metadata_problems(archive)
        extensions = [name for name in archive.namelist() if name.endswith(".so")]
        if len(extensions) != 1:
            problems.append(f"extension modules {extensions}, expected one")
        for name in extensions:
            image = archive.read(name)
            problems += extension_problems(name, image, archs, of_this_machine=of_this_machine)
    return problems


def runs_here(wheel: Path) -> bool:
    """Whether the wheel is for this interpreter and this machine."""
    python = f"-cp{sys.version_info.major}{sys.version_info.minor}-"
    return python in wheel.name and wheel.stem.endswith(platform.machine())


def import_alone(wheel: Path) -> list[str]:
    """Import the wheel from a folder of its own, with the torch of this interpreter."""
    if not runs_here(wheel):
        return []
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extractall(folder)
        compileall.compile_dir(folder, quiet=1)  # as an installer does
        script = f"import sys; sys.path.insert(0, {folder!r})\n{IMPORT_SCRIPT}"
        result = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=False
        )
    print(result.stdout.strip())
    return [f"import failed: {result.stderr.strip()}"] if result.returncode else []


def main() -> int:
    """Check the wheels named on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--archs", default=RELEASE_ARCHS)
    parser.add_argument(
        "--of-this-machine", action="store_true", help="built for this machine's own glibc"
    )
    arguments = parser.parse_args()
    archs = {int(arch) for arch in arguments.archs.split(",")}
    problems = [
        f"{wheel.name}: {problem}"
        for wheel in arguments.wheels
        for problem in (
            *problems_of(wheel, archs, of_this_machine=arguments.of_this_machine),
            *import_alone(wheel),
        )
    ]
    print("\n".join(problems) or "wheel: all passed")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
