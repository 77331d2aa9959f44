#!/usr/bin/env bash
# Every check of `make lint`. All checks run even after one has failed, so that one run shows all faults.
# PY is the Python that has te_fast and the lint group installed; its tools are first on PATH.
set -uo pipefail
cd "$(dirname "$0")/.."
failed=()

check() {
    local name=$1 begin=$SECONDS output
    shift
    if output=$("$@" 2>&1); then
        printf '%-14s ok %4d s\n' "$name" $((SECONDS - begin))
    else
        printf '%-14s FAILED\n%s\n' "$name" "$output"
        failed+=("$name")
    fi
}

mapfile -t device_code < <(git ls-files 'cuda/*.cu' 'cuda/*.cuh' 'tools/*.c')

check rustfmt cargo fmt --all -- --check
check clang-format clang-format --dry-run --Werror "${device_code[@]}"
check ruff-format ruff format --check .
check ruff ruff check .
check typos typos
check clippy cargo clippy --workspace --all-targets --quiet -- -D warnings
check cargo-doc env RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --quiet
if cargo deny --version >/dev/null 2>&1; then
    check cargo-deny cargo deny --offline check bans licenses sources
fi
check mypy "$PY" -m mypy
check stub test -f python/te_fast/_native.pyi
check stubtest env MYPYPATH=python "$PY" -m mypy.stubtest te_fast._native --allowlist tools/stubtest_allow.txt \
    --mypy-config-file tools/stubtest.ini
check rules "$PY" tools/check_rules.py
check version "$PY" tools/check_version.py
check tables "$PY" benches/tables.py --check

if ((${#failed[@]})); then
    echo "lint: ${#failed[@]} failed: ${failed[*]}"
    exit 1
fi
echo "lint: all passed"
