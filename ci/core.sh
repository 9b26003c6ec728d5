#!/usr/bin/env bash
# The core lane: lint and the whole test suite on the CPU, by the targets that a developer runs.
set -euo pipefail
cd "$(dirname "$0")/.."
make lint
make test
