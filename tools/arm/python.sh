#!/usr/bin/env bash
# Arm's Python under qemu-user, with the aarch64 wheel of `make test-arm`: tools/arm/python.sh -m pytest ...
set -euo pipefail
home=$(cd "$(dirname "$0")/../.." && pwd)/.build/arm
export PYTHONPATH=$home/aarch64${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1
exec qemu-aarch64 -L "$home/root" "$home/root/usr/bin/python3.11" "$@"
