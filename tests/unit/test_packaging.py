"""The installed extension, and the checks that ``make wheel`` applies to each wheel."""

import importlib.metadata
import struct
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import te_fast

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import check_wheel  # noqa: E402 - tools/ is no package


def extension():
    (path,) = Path(te_fast.__file__).parent.glob("_native*.so")
    return path.read_bytes()


def test_extension_links_no_cuda_and_no_torch():
    assert set(check_wheel.needed_libraries(extension())) <= check_wheel.SYSTEM_LIBRARIES


def test_extension_holds_machine_code_and_ptx():
    entries = check_wheel.fatbin_entries(extension())
    if not entries:
        pytest.skip("built with TE_FAST_SKIP_CUDA=1")
    code = {arch for kind, arch in entries if kind == check_wheel.MACHINE_CODE}
    ptx = {arch for kind, arch in entries if kind == check_wheel.PTX}
    assert ptx == check_wheel.expected_ptx(code)
    assert code <= {int(arch) for arch in check_wheel.RELEASE_ARCHS.split(",")}


@pytest.mark.skipif(
    not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this interpreter always has its lock"
)
def test_an_interpreter_without_its_lock_takes_it_back():
    script = "import sys, te_fast._native; sys.exit(0 if sys._is_gil_enabled() else 1)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_torch_is_the_one_requirement():
    requirements = importlib.metadata.requires("te_fast")
    assert [line.split(">")[0].strip() for line in requirements] == ["torch"]


def fatbin(*entries):
    body = b"".join(
        struct.pack("<HHIQIIHHI", kind, 1, 64, 8, 0, 0, 0, 0, arch).ljust(64, b"\0") + b"content!"
        for kind, arch in entries
    )
    return check_wheel.FATBIN_MAGIC + struct.pack("<HQ", 16, len(body)) + body


def test_fatbin_entries_are_read_wherever_the_fatbin_lies():
    image = b"junk" + fatbin((2, 80), (2, 90)) + b"\0" * 5 + fatbin((1, 90)) + b"tail"
    assert check_wheel.fatbin_entries(image) == {(2, 80), (2, 90), (1, 90)}


def test_needed_libraries_rejects_what_is_no_elf_file():
    with pytest.raises(ValueError, match="not a 64-bit little-endian ELF file"):
        check_wheel.needed_libraries(b"MZ" + b"\0" * 100)


@pytest.mark.parametrize(
    ("name", "problems"),
    [
        ("te_fast-0.1.0-cp311-cp311-manylinux_2_28_aarch64.whl", 0),
        ("te_fast-0.1.0-cp311-cp311-manylinux_2_34_x86_64.whl", 1),
        ("te_fast-0.1.0-cp311-cp311-manylinux_2_28_riscv64.whl", 1),
        ("te_fast-0.1.0-cp311-cp311-linux_x86_64.whl", 1),
        ("te_fast-0.1.0-cp311-abi3-manylinux_2_28_x86_64.whl", 1),
    ],
)
def test_tags_of_a_release_wheel(name, problems):
    assert len(check_wheel.tag_problems(Path(name))) == problems


def test_ptx_lies_beside_the_last_architecture():
    assert check_wheel.expected_ptx({80, 89, 90, 100, 120}) == {90, 120}
    assert check_wheel.expected_ptx({80, 89}) == {89}
    assert check_wheel.expected_ptx({90}) == {90}


def test_the_newest_glibc_is_found():
    image = b"\0GLIBC_2.17\0GLIBC_2.4\0GLIBC_2.28\0GLIBC_PRIVATE\0"
    assert check_wheel.newest_glibc(image) == (2, 28)
    assert check_wheel.newest_glibc(b"") == (0, 0)
