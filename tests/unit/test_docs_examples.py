"""The Python examples of README.md and docs/ run."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from te_fast.runtime.compiling import CAN_COMPILE

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples():
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = path.read_text()
        if path.parent.name == "tutorials":  # the blocks of a tutorial are one program
            code = "\n".join(match[1] for match in BLOCK.finditer(text))
            marks = [pytest.mark.slow] if path.stem in {"hugging-face", "profile-a-script"} else []
            yield pytest.param(code, 1, id=str(path.relative_to(ROOT)), marks=marks)
            continue
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start(1)) + 1
            yield pytest.param(match[1], line, id=f"{path.relative_to(ROOT)}:{line}")


@pytest.mark.parametrize(("code", "line"), list(examples()))
def test_example_runs(code, line, monkeypatch, tmp_path):
    if re.search(r"torch\.(compile|export)\b", code) and not CAN_COMPILE:
        pytest.skip("torch 2.8 or later")
    monkeypatch.chdir(tmp_path)
    # torch.compile looks the module up, and old releases remember a module by its name: each example has its own.
    module = ModuleType(f"example_{abs(hash(code))}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile("\n" * (line - 1) + code, module.__name__, "exec"), module.__dict__)


@pytest.mark.parametrize(
    "page",
    [path for path in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in path.parts],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_every_page_has_an_example(page):
    assert re.search(r"^```(python|console)$", page.read_text(), re.MULTILINE)
