"""The rules of CONTRIBUTING.md that a script can check. Prints every breach, and exits 1 if there is one."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from typing import TYPE_CHECKING

from source import code, functions, line_of, sources, text, tracked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# A longer file may hold two ideas. A longer file with one idea goes into LONG.
MAX_FILE = 800
MAX_FUNCTION = 60
MAX_PARAMETERS = 8
MAX_DUPLICATE = 12

# A file or function that is a table, with the reason why it may be longer.
LONG: dict[str, str] = {}
# Functions with more parameters than the bar, with the reason.
WIDE: dict[str, str] = {
    "python/te_fast/graphs/operators.py:_backward": "a torch.library schema is flat",
    "python/te_fast/moe/operators.py:_permute_cast": "the same",
    "python/te_fast/moe/operators.py:_permute_cast_fake": "the same",
    "python/te_fast/tensor/blockwise.py:_make_float8_blockwise_tensor_in_reduce_ex": "pickles name it so",
}
# Where the process environment may be read: one file a language, and the build script.
ENVIRONMENT_READERS = {
    "python/te_fast/_config.py",
    "rust/core/src/base/config.rs",
    "rust/kernels/build.rs",
}
NATIVE_IMPORTER = "python/te_fast/runtime/__init__.py"
# The folders that each folder of te_fast may import.
LAYERS: dict[str, set[str]] = {
    "recipe": set(),
    "runtime": {"recipe"},
    "state": {"recipe"},
    "dispatch": {"recipe", "runtime"},
    "tensor": {"recipe", "runtime"},
    "parallel": {"recipe", "runtime", "tensor"},
    "moe": {"runtime", "tensor"},
    "graphs": {"recipe", "runtime", "tensor"},
    "ops": {"dispatch", "graphs", "parallel", "recipe", "runtime", "state", "tensor"},
    "layers": {"graphs", "ops", "parallel", "recipe", "runtime", "state", "tensor"},
    "attention": {"graphs", "layers", "ops", "parallel", "recipe", "runtime", "state", "tensor"},
    "experts": {"graphs", "moe", "ops", "parallel", "runtime", "tensor"},
    "convert": {"attention", "experts", "layers", "losses", "ops", "runtime", "state"},
    "graphed": {"graphs", "recipe", "runtime", "state", "tensor"},
    "helpers": {"recipe", "runtime", "tensor"},
    "losses": {"runtime"},
    "offload": {"runtime", "tensor"},
    "optimizers": {"runtime", "tensor"},
    "convert_checkpoint": {"state", "tensor"},
    "tex": {"attention", "dispatch", "moe", "optimizers", "runtime", "tensor"},
    "common": {"recipe"},
    "pytorch": {
        "attention",
        "common",
        "experts",
        "graphed",
        "graphs",
        "helpers",
        "layers",
        "losses",
        "moe",
        "offload",
        "ops",
        "optimizers",
        "parallel",
        "recipe",
        "runtime",
        "tensor",
        "tex",
    },
    "profiling": {"common", "dispatch", "pytorch"},
    "doctor": {"convert", "profiling", "pytorch"},
}
# Signatures that are Transformer Engine's, not ours.
TE_SIGNATURES = re.compile(
    r"^python/te_fast/(attention|graphed|helpers|layers|losses|moe|offload|ops|optimizers|parallel|recipe|runtime|tensor|tex)/"
)


def check_lengths() -> Iterator[str]:
    """Find files and functions that are too long."""
    for path in sources(".rs", ".py", ".cu", ".cuh"):
        lines = text(path).count("\n")
        if lines > MAX_FILE and path not in LONG:
            yield f"{path}: {lines} lines, over {MAX_FILE}: does it hold two ideas?"
    for function in functions():
        name = f"{function.path}:{function.name}"
        if function.lines > MAX_FUNCTION and name not in LONG:
            yield (
                f"{function.path}:{function.line}: {function.name} has {function.lines} lines, "
                f"at most {MAX_FUNCTION}"
            )


def check_parameters() -> Iterator[str]:
    """Find functions with too many parameters; clippy checks Rust's."""
    for function in functions():
        if function.path.endswith(".rs"):
            continue
        public = not function.name.startswith("_") or function.name in ("__init__", "__new__")
        if TE_SIGNATURES.match(function.path) and public:
            continue
        name = f"{function.path}:{function.name}"
        if function.parameters > MAX_PARAMETERS and name not in WIDE:
            yield (
                f"{function.path}:{function.line}: {function.name} has {function.parameters} "
                f"parameters, at most {MAX_PARAMETERS}; group them in a struct"
            )


def check_unsafe() -> Iterator[str]:
    """Find ``unsafe`` outside the files that ARCHITECTURE.md names, and named files without ``unsafe``."""
    section = re.search(
        r"^## Where unsafe is\n(.*?)(?=^## |\Z)", text("ARCHITECTURE.md"), re.M | re.S
    )
    named = set(re.findall(r"`(rust/[\w/]+\.rs)`", section[1] if section else ""))
    found = {path for path in tracked(".rs") if re.search(r"\bunsafe\b(?!_)", code(path))}
    for path in sorted(found - named):
        yield f"{path}: unsafe code in a file that 'Where unsafe is' does not name"
    for path in sorted(named - found):
        yield f"ARCHITECTURE.md: 'Where unsafe is' names {path}, which has no unsafe code"


def check_environment() -> Iterator[str]:
    """Find reads of the environment outside the configuration, and undocumented variables."""
    python, rust = re.compile(r"\bos\.(environ|getenv)\b"), re.compile(r"\benv::var(_os)?\b")
    for path in sources(".py", ".rs"):
        if path.startswith("tools/") or path in ENVIRONMENT_READERS:
            continue
        pattern = python if path.endswith(".py") else rust
        for match in pattern.finditer(text(path) if path.endswith(".py") else code(path)):
            line = line_of(text(path), match.start())
            yield f"{path}:{line}: reads the environment; only the configuration may"
    documented = text("docs/reference/envvars.md")
    for path in sorted(ENVIRONMENT_READERS & set(tracked(".py", ".rs"))):
        for name in sorted(set(re.findall(r"\"((?:TE_FAST|NVTE)_[A-Z0-9_]+)\"", text(path)))):
            if f"`{name}`" not in documented:
                yield f"{path}: {name} is not in docs/reference/envvars.md"


def check_native_importers() -> Iterator[str]:
    """Find importers of ``te_fast._native`` other than the one module that may import it."""
    pattern = re.compile(
        r"^\s*(from te_fast\._native import|import te_fast\._native"
        r"|from te_fast import .*\b_native\b|from \.+ import .*\b_native\b|from \.+_native import)",
        re.M,
    )
    for path in sources(".py"):
        if path != NATIVE_IMPORTER and (match := pattern.search(text(path))):
            line = line_of(text(path), match.start(1))
            yield f"{path}:{line}: imports te_fast._native; only {NATIVE_IMPORTER} does"


def check_layers() -> Iterator[str]:
    """Find Python modules that import from folders which the table of layers does not allow."""
    imports = re.compile(r"^\s*(?:from|import) te_fast\.?([\w.]*)(?: import \(?([\w, ]+))?", re.M)
    for path in tracked(".py"):
        inside = re.match(r"python/te_fast/(\w+)/", path)
        if not inside:
            continue
        below = LAYERS[inside[1]] | {inside[1]}
        for match in imports.finditer(text(path)):
            names = [match[1].partition(".")[0]] if match[1] else (match[2] or "").split(", ")
            for name in set(names) & set(LAYERS) - below:
                line = line_of(text(path), match.start())
                yield f"{path}:{line}: {inside[1]} imports {name}, which stands above it"


def check_left_over() -> Iterator[str]:
    """Find ``TODO`` without an issue, ``FIXME``, and code that is commented out."""
    marker = re.compile(r"\b(FIXME|XXX)\b|\bTODO\b(?!\(#\d+\))|\btodo!\(|\bunimplemented!\(")
    statement = r"(let |return |if \(|for \(|[\w.:]+\([^.]*\);$|\w[\w.]* [-+*/|&]?= \S+;$)"
    dead_code = re.compile(rf"^\s*//\s*{statement}.*$", re.M)
    for path in tracked(".rs", ".py", ".cu", ".cuh"):
        if path.startswith("tools/"):
            continue
        for match in marker.finditer(text(path)):
            yield f"{path}:{line_of(text(path), match.start())}: {match[0]}; write TODO(#issue)"
        if not path.endswith(".py"):  # ruff ERA does that for Python
            for match in dead_code.finditer(text(path)):
                line = line_of(text(path), match.start())
                yield f"{path}:{line}: code in a comment: {match[0].strip()}"


def check_duplicates() -> Iterator[str]:
    """Find runs of lines that stand in two files."""
    # A parameter with its default does not count as code; Transformer Engine's signatures share many such lines.
    parameter = r"\w+: [^=]+ = [^=]+,$"
    skip = re.compile(
        rf"^(//|#|\"\"\"|\*|use |import |from |[\[\](){{}},;]*$|#\[|pub use |{parameter})"
    )
    windows: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for path in sources(".rs", ".py", ".cu", ".cuh"):
        lines = [
            (number, line.strip())
            for number, line in enumerate(text(path).splitlines(), 1)
            if not skip.match(line.strip())
        ]
        for start in range(len(lines) - MAX_DUPLICATE):
            window = lines[start : start + MAX_DUPLICATE + 1]
            windows[tuple(line for _, line in window)].append((path, window[0][0]))
    seen: set[tuple[str, ...]] = set()
    for places in windows.values():
        files = tuple(sorted({path for path, _ in places}))
        if len(files) > 1 and files not in seen:
            seen.add(files)
            where = " and ".join(f"{path}:{line}" for path, line in places)
            yield f"more than {MAX_DUPLICATE} equal lines from {where}"


def check_dynamic_shared() -> Iterator[str]:
    """Find dynamic shared memory that does not begin on a line, where copies would fetch sectors twice."""
    pattern = re.compile(
        r"extern __shared__ (?!__align__\(ptx::kCopyAlign\) )[^;\n]*\bdynamic\[\];"
    )
    for path in sources(".cu", ".cuh"):
        for match in pattern.finditer(code(path)):
            line = line_of(code(path), match.start())
            yield f"{path}:{line}: dynamic shared memory without __align__(ptx::kCopyAlign)"


CHECKS: list[Callable[[], Iterator[str]]] = [
    check_lengths,
    check_parameters,
    check_unsafe,
    check_environment,
    check_native_importers,
    check_layers,
    check_left_over,
    check_duplicates,
    check_dynamic_shared,
]


def main() -> int:
    """Run every check."""
    problems = [problem for check in CHECKS for problem in check()]
    print("\n".join(problems) or f"rules: {len(CHECKS)} checks, nothing found")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
