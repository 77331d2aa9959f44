"""Run the Python blocks of tutorials while the pages are built, and show their output.

The blocks of a page are one program. A block that fails ends the build.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


@contextlib.contextmanager
def _elsewhere() -> Iterator[None]:
    """Work in a temporary folder: a tutorial may write files."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(here)


def with_outputs(text: str, name: str) -> str:
    """Insert the output of each block behind it."""
    module = ModuleType(name)
    sys.modules[name] = module  # torch.compile looks for it

    def run(match: re.Match[str]) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            line = text.count("\n", 0, match.start(1))
            exec(compile("\n" * line + match[1], name, "exec"), module.__dict__)
        shown = printed.getvalue().rstrip()
        return match[0] + (f"\n```text\n{shown}\n```\n" if shown else "")

    with _elsewhere():
        return BLOCK.sub(run, text)


def _read(_: Any, name: str, source: list[str]) -> None:
    if name.startswith("tutorials/"):
        source[0] = with_outputs(source[0], name.replace("/", "_").replace("-", "_"))


def setup(app: Any) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("source-read", _read)
    return {"parallel_read_safe": True}
