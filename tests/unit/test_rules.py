"""The checks of tools/ find the faults that they look for."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import check_rules
import source


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Make the checks read a source tree of the given files."""

    def make(**files):
        for name, content in files.items():
            path = tmp_path / name.replace("__", "/").replace("_dot_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        names = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
        monkeypatch.setattr(source, "ROOT", tmp_path)

        def listed(*endings):
            return tuple(sorted(name for name in names if name.endswith(endings)))

        monkeypatch.setattr(source, "tracked", listed)
        monkeypatch.setattr(check_rules, "tracked", listed)
        source.text.cache_clear()
        source.code.cache_clear()

    yield make
    source.text.cache_clear()
    source.code.cache_clear()


RUST = """\
/// Not `unsafe`, and no fn here( either.
pub fn short<T: Into<u8>>(&self, a: Vec<(u8, u8)>, b: &str) -> Result<(), u8> {
    let text = "fn inside(a, b) {";
    Ok(())
}
#[cfg(test)]
mod tests {
    fn long_test(a: u8, b: u8, c: u8) {
        unimportant();
    }
}
"""


def test_rust_functions_are_read_without_strings_comments_and_tests(tree):
    tree(a_dot_rs=RUST)
    functions = list(source.rust_functions("a.rs"))
    assert [(f.name, f.line, f.lines, f.parameters) for f in functions] == [("short", 2, 4, 2)]


def test_cuda_functions_are_read(tree):
    tree(a_dot_cu="__global__ void go(const __grid_constant__ P p, int n) {\n  if (n) {\n  }\n}\n")
    functions = list(source.cuda_functions("a.cu"))
    assert [(f.name, f.lines, f.parameters) for f in functions] == [("go", 4, 2)]


def test_long_functions_and_many_parameters_are_found(tree):
    body = "    x = 1\n" * 61
    tree(a_dot_py=f"def long():\n{body}\ndef wide(a, b, c, d, e, f, g, h, i, *, j):\n    pass\n")
    assert ["long has 61 lines" in line for line in check_rules.check_lengths()] == [True]
    assert ["wide has 9 parameters" in line for line in check_rules.check_parameters()] == [True]


def test_unsafe_outside_the_named_files_is_found(tree):
    page = "# A\n## Where unsafe is\n- `rust/x.rs`\n- `rust/gone.rs`\n## Next\n`rust/y.rs`\n"
    tree(
        ARCHITECTURE_dot_md=page,
        rust__x_dot_rs="fn a() { unsafe { b() } }",
        rust__y_dot_rs="unsafe fn c() {}",
        rust__gone_dot_rs="// unsafe\n#![deny(unsafe_code)]",
    )
    problems = list(check_rules.check_unsafe())
    assert len(problems) == 2
    assert problems[0].startswith("rust/y.rs")
    assert "rust/gone.rs" in problems[1]


def test_environment_reads_are_found(tree):
    tree(docs__reference__envvars_dot_md="", a_dot_py="import os\nx = os.environ['A']\n")
    assert list(check_rules.check_environment()) == [
        "a.py:2: reads the environment; only the configuration may"
    ]


def test_second_door_to_the_native_module_is_found(tree):
    tree(a_dot_py="from te_fast import _native\n", b_dot_py="from te_fast._native import x\n")
    assert len(list(check_rules.check_native_importers())) == 2


def test_imports_of_what_stands_above_are_found(tree):
    below = "from te_fast.runtime import native\nfrom te_fast import errors\n"
    above = "def f():\n    from te_fast.layers.base import x\n    from te_fast import pytorch\n"
    tree(python__te_fast__ops__a_dot_py=below + above)
    assert sorted(check_rules.check_layers()) == [
        "python/te_fast/ops/a.py:4: ops imports layers, which stands above it",
        "python/te_fast/ops/a.py:5: ops imports pytorch, which stands above it",
    ]


def test_left_overs_are_found(tree):
    markers = "x = 1  # TO" + "DO later\n# TO" + "DO(#3): fine\n"
    tree(a_dot_py=markers, b_dot_rs="// let x = 1;\n// prose that ends; so\n/// let doc = 1;\n")
    problems = list(check_rules.check_left_over())
    assert [problem.split(":")[0] for problem in problems] == ["a.py", "b.rs"]


def test_equal_runs_of_lines_are_found(tree):
    run = "".join(f"value_{number} = {number}\n" for number in range(13))
    tree(a_dot_py=run, b_dot_py="first = 0\n" + run)
    assert len(list(check_rules.check_duplicates())) == 1


def test_dynamic_shared_memory_off_a_line_is_found(tree):
    tree(
        a_dot_cu="extern __shared__ uint4 dynamic[];\n",
        b_dot_cu="extern __shared__ __align__(ptx::kCopyAlign) uint4 dynamic[];\n",
    )
    problems = list(check_rules.check_dynamic_shared())
    assert [problem.split(":")[0] for problem in problems] == ["a.cu"]
