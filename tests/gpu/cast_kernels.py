"""Launches the cast kernels straight from their images, without the dispatcher: for kernel tests and timings."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import struct
import subprocess
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
IMAGES = Path(os.environ.get("TE_FAST_CAST_IMAGES", ROOT / ".build" / "cast"))
FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
FP8_MAX = {"e4m3": 448.0, "e5m2": 57344.0}
#: The header that the kernels' build script makes from rust/kernels/src/constants.rs.
CONSTANTS = "**/out/include/common/constants.cuh"
CANARY = 256
POISON = 0xA5
#: CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
MAX_DYNAMIC_SHARED = 8


@functools.cache
def driver() -> ctypes.CDLL:
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    return ctypes.CDLL("libcuda.so.1")


def check(code: int, what: str) -> None:
    if code:
        message = f"{what} failed with CUresult {code}"
        raise RuntimeError(message)


def build(image: str) -> Path:
    """Compile an image unless it exists; this needs nvcc but no GPU."""
    path = IMAGES / f"{image}.fatbin"
    if path.exists():
        return path
    nvcc = os.environ.get("TE_FAST_NVCC") or shutil.which("nvcc")
    assert nvcc, f"{path} is missing and there is no nvcc to build it"
    made = sorted((ROOT / "target").glob(CONSTANTS), key=lambda header: header.stat().st_mtime)
    assert made, f"no {CONSTANTS} below target/: build te_fast with its kernels first"
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [
            *(nvcc, "-fatbin", "-std=c++20", "-O3", "-lineinfo"),
            "-gencode=arch=compute_90,code=sm_90",
            *("-I", str(ROOT / "cuda"), "-I", str(made[-1].parents[1])),
            *("-o", str(path), str(ROOT / "cuda" / "quantize" / f"{image}.cu")),
        ],
        check=True,
    )
    return path


@functools.cache
def module(image: str) -> ctypes.c_void_p:
    handle, content = ctypes.c_void_p(), build(image).read_bytes()
    check(driver().cuModuleLoadData(ctypes.byref(handle), content), "cuModuleLoadData")
    return handle


@functools.cache
def function(image: str, symbol: str) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    check(
        driver().cuModuleGetFunction(ctypes.byref(handle), module(image), symbol.encode()),
        f"loading {symbol}",
    )
    check(driver().cuFuncSetAttribute(handle, MAX_DYNAMIC_SHARED, 64 << 10), "cuFuncSetAttribute")
    return handle


class Kernel:
    """A launch with its parameter bytes made once, so that timing repeats only the launch."""

    def __init__(
        self,
        image: str,
        symbol: str,
        blocks: int,
        params: bytes,
        threads: int = 256,
        shared: int = 0,
    ) -> None:
        self.function = function(image, symbol)
        self.blocks, self.threads, self.shared = blocks, threads, shared
        self.params = ctypes.create_string_buffer(params, len(params))
        self.pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.params))

    def __call__(self) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        code = driver().cuLaunchKernel(
            self.function,
            *(self.blocks, 1, 1),
            *(self.threads, 1, 1),
            self.shared,
            stream,
            self.pointers,
            None,
        )
        check(code, "cuLaunchKernel")


class Guarded:
    """Device bytes, poisoned, between two canaries."""

    def __init__(self, size: int, fill: int = POISON) -> None:
        self.size = size
        self.whole = torch.full((size + 2 * CANARY,), POISON, dtype=torch.uint8, device="cuda")
        self.bytes = self.whole[CANARY : CANARY + size]
        self.bytes.fill_(fill)

    @property
    def pointer(self) -> int:
        return self.whole.data_ptr() + CANARY

    def read(self, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        edges = torch.cat([self.whole[:CANARY], self.whole[CANARY + self.size :]])
        assert (edges == POISON).all(), "a kernel wrote outside its buffer"
        return self.bytes.view(dtype)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def pointer(buffer: Guarded | torch.Tensor | None) -> int:
    if buffer is None:
        return 0
    return buffer.pointer if isinstance(buffer, Guarded) else buffer.data_ptr()


def cast(
    x, out, scale, fmt, *, name, scale_inv=None, amax=None, noop=None, reverse=False, image="cast"
):
    params = struct.pack(
        "6QQII", *map(pointer, (x, out, scale, scale_inv, amax, noop)), x.numel(), int(reverse), 0
    )
    return Kernel(image, f"cast_{name}_{fmt}", max(1, ceil_div(x.numel(), 8192)), params)


def cast_transpose(
    x, out, out_t, scale, fmt, *, name, ld_t=0, scale_inv=None, amax=None, noop=None, reverse=False,
    dbias=None, partial=None, counters=None, strip=1, image="cast_transpose",
):  # fmt: skip
    rows, cols = x.shape
    tiles_rows, tiles_cols = max(1, ceil_div(rows, 128)), max(1, ceil_div(cols, 128))
    strips = ceil_div(tiles_rows, strip)
    pointers = (x, out, out_t, scale, scale_inv, amax, noop, dbias, partial, counters)
    plan = (tiles_rows, tiles_cols, strips, strips, 0, 0, strip, 0, 0)
    params = struct.pack("10Q3Q10I", *map(pointer, pointers), rows, cols, ld_t, *plan, int(reverse))
    stem = "cast_transpose" if dbias is None else "cast_transpose_dbias"
    return Kernel(image, f"{stem}_{name}_{fmt}", tiles_cols * strips, params, shared=48 << 10)


def amax(
    x,
    workspace,
    fmt,
    *,
    name,
    amax=None,
    scale=None,
    scale_inv=None,
    noop=None,
    eps=0.0,
    pow2=False,
    blocks=0,
):
    blocks = blocks or max(1, min(ceil_div(x.numel(), 8192), 132 * 4))
    params = struct.pack(
        "6QQffII",
        *map(pointer, (x, workspace, amax, scale, scale_inv, noop)),
        x.numel(), FP8_MAX[fmt], eps, int(pow2), 0,
    )  # fmt: skip
    return Kernel("amax", f"amax_{name}", blocks, params)


def scale_from_amax(amax, scale, scale_inv, fmt, *, eps=0.0, pow2=False):
    params = struct.pack(
        "3QffII", *map(pointer, (amax, scale, scale_inv)), FP8_MAX[fmt], eps, int(pow2), 0
    )
    return Kernel("amax", "scale_from_amax", 1, params, threads=32)


def cast_block(
    x,
    out,
    out_t,
    scale_inv,
    scale_inv_t,
    fmt,
    *,
    name,
    dims,
    noop=None,
    eps=0.0,
    pow2=True,
    image="cast_block",
):
    rows, cols = x.shape
    up4 = lambda size: ceil_div(size, 4) * 4  # noqa: E731
    tiles_rows, tiles_cols = ceil_div(rows, 128), ceil_div(cols, 128)
    scale_ld, scale_ld_t = (
        (up4(rows), up4(cols)) if dims == 1 else (up4(tiles_cols), up4(tiles_rows))
    )
    params = struct.pack(
        "6Q8QIIf3I", *map(pointer, (x, out, out_t, scale_inv, scale_inv_t, noop)),
        rows, cols, ceil_div(rows, 16) * 16, scale_ld, scale_ld_t, 0, 0, 0,
        tiles_rows, tiles_cols, eps, int(pow2), 0, 0,
    )  # fmt: skip
    return Kernel(image, f"cast_block_{dims}d_{name}_{fmt}", tiles_rows * tiles_cols, params)


def scale_update(entries, *, length, most_recent=False, few=True):
    """`entries`: (history, scale, reduced or None, tensors, fp8_max * 2^-margin)."""
    params = struct.pack("QII", length, len(entries), int(most_recent))
    for history, scale, reduced, count, max_scaled in entries:
        params += struct.pack("3QIf", *map(pointer, (history, scale, reduced)), count, max_scaled)
    size = 2000 if few else 32656
    symbol = "scale_update_few" if few else "scale_update"
    return Kernel("scale_update", symbol, len(entries), params.ljust(size, b"\0"))


def amax_gather(entries, gathered, *, few=True):
    """`entries`: (live maxima or None, place of the first, tensors)."""
    params = struct.pack("QII", pointer(gathered), len(entries), 0)
    for live, first, count in entries:
        params += struct.pack("QII", pointer(live), first, count)
    symbol = "amax_gather_few" if few else "amax_gather"
    return Kernel(
        "scale_update",
        symbol,
        len(entries),
        params.ljust(1008 if few else 16336, b"\0"),
        threads=32,
    )


def dequantize(q, out, scale_inv, rows, cols, ld, fmt, *, name, dims=0, scale_ld=0):
    params = struct.pack("3Q4Q", *map(pointer, (q, out, scale_inv)), rows, cols, ld, scale_ld)
    suffix = f"_{dims}d" if dims else ""
    blocks = max(1, ceil_div(ceil_div(cols, 8) * rows, 1024))
    return Kernel("dequantize", f"dequantize{suffix}_{fmt}_{name}", blocks, params)
