#!/usr/bin/env bash
# The core lane: lint and the whole test suite on the CPU.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
make lint
make test
