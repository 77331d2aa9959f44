"""Reading the source tree: which files count, and code without its comments and strings."""

from __future__ import annotations

import ast
import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
TEST_PATH = re.compile(
    r"(^|/)(tests?|benches|docs|examples)/|(^|_|/)tests?\.rs$|(^|/)conftest\.py$"
)
COMMENT_OR_STRING = re.compile(
    r"""
    //[^\n]* | /\*.*?\*/                 # comments
    | r(?P<hashes>\#*)".*?"(?P=hashes)   # Rust raw strings
    | "(?:\\.|[^"\\])*"                  # strings
    | '(?:\\.[^']*|[^'\\\n])'            # characters, but no lifetimes
    """,
    re.VERBOSE | re.DOTALL,
)
CUDA_NO_FUNCTION = {"if", "for", "while", "switch", "return", "sizeof", "alignas", "asm", "defined"}


@dataclass(frozen=True)
class Function:
    """A function definition: where it is, how long, how many parameters."""

    path: str
    line: int
    name: str
    lines: int
    parameters: int


@cache
def tracked(*endings: str) -> tuple[str, ...]:
    """Existing paths with such endings that git tracks, or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    names = sorted(set(listed.splitlines()))
    return tuple(name for name in names if name.endswith(endings) and (ROOT / name).is_file())


def sources(*endings: str) -> Iterator[str]:
    """Tracked source files that are no tests, benches, examples or docs."""
    return (name for name in tracked(*endings) if not TEST_PATH.search(name))


@cache
def text(path: str) -> str:
    """Return the text of a file, given relative to the root."""
    return (ROOT / path).read_text(encoding="utf-8")


@cache
def code(path: str) -> str:
    """Return Rust or CUDA text with comments and strings blanked out, lines and columns kept."""
    return COMMENT_OR_STRING.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text(path))


def line_of(body: str, position: int) -> int:
    """Line number, from one, of a position."""
    return body.count("\n", 0, position) + 1


def closing(body: str, start: int) -> int:
    """Position of the bracket that closes the one at ``start``."""
    pairs = {"(": ")", "{": "}", "[": "]", "<": ">"}
    opening, depth = body[start], 0
    for position in range(start, len(body)):
        if body[position] == opening:
            depth += 1
        elif body[position] == pairs[opening]:
            # The arrow of a return type closes no generic list.
            if opening == "<" and body[position - 1] == "-":
                continue
            depth -= 1
            if depth == 0:
                return position
    return len(body) - 1


def count_arguments(inside: str) -> int:
    """Count the commas of a parameter list that are in no inner bracket, as parameters."""
    depth, parts, current = 0, [], ""
    for character in inside:
        depth += character in "([{<"
        depth -= character in ")]}>"
        if character == "," and depth <= 0:
            parts.append(current)
            current = ""
        else:
            current += character
    parts.append(current)
    receiver = re.compile(r"^\s*(&\s*('\w+\s+)?)?(mut\s+)?self\b")
    return sum(1 for part in parts if part.strip() and not receiver.match(part))


def test_modules(body: str) -> list[tuple[int, int]]:
    """Spans of ``#[cfg(test)]`` modules."""
    modules = re.finditer(r"#\[cfg\(test\)\]\s*mod\s+\w+\s*\{", body)
    return [(match.start(), closing(body, match.end() - 1)) for match in modules]


def rust_functions(path: str) -> Iterator[Function]:
    """Functions with a body, except those of test modules."""
    body = code(path)
    tests = test_modules(body)
    for match in re.finditer(r"\bfn\s+(\w+)\s*(?=[<(])", body):
        if any(start <= match.start() <= end for start, end in tests):
            continue
        position = match.end()
        if body[position] == "<":
            position = body.index("(", closing(body, position))
        end_of_parameters = closing(body, position)
        brace = re.compile(r"[{;]").search(body, end_of_parameters)
        if brace is None or brace[0] == ";":
            continue
        end = closing(body, brace.start())
        start_line = line_of(body, match.start())
        inside = body[position + 1 : end_of_parameters]
        length = line_of(body, end) - start_line + 1
        yield Function(path, start_line, match[1], length, count_arguments(inside))


def cuda_functions(path: str) -> Iterator[Function]:
    """Device functions and kernels with a body."""
    body = code(path)
    pattern = re.compile(r"\b(\w+)\s*(\((?:[^(){};]|\([^()]*\))*\))\s*(?:const\s*)?\{")
    for match in pattern.finditer(body):
        if match[1] in CUDA_NO_FUNCTION:
            continue
        start_line = line_of(body, match.start())
        length = line_of(body, closing(body, match.end() - 1)) - start_line + 1
        yield Function(path, start_line, match[1], length, count_arguments(match[2][1:-1]))


def python_functions(path: str) -> Iterator[Function]:
    """All functions and methods.

    The signature and the docstring do not count as length. Keyword-only parameters do not count as parameters.
    """
    for node in ast.walk(ast.parse(text(path))):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        arguments = node.args.posonlyargs + node.args.args
        names = [argument.arg for argument in arguments if argument.arg not in {"self", "cls"}]
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        length = (node.end_lineno or node.lineno) - body[0].lineno + 1 if body else 0
        yield Function(path, node.lineno, node.name, length, len(names))


def functions() -> Iterator[Function]:
    """Every function of the product."""
    for path in sources(".rs"):
        yield from rust_functions(path)
    for path in sources(".cu", ".cuh"):
        yield from cuda_functions(path)
    for path in sources(".py"):
        yield from python_functions(path)
