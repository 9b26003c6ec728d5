#!/usr/bin/env bash
# Optional: our calls before the checks of the real torch_npu, over empty driver libraries. No NPU and no CANN are
# needed, but its wheel (45 MB) for this torch, gcc and binutils. Exit code 75: not run, since one of these is missing.
#
#   ci/torch_npu.sh [FOLDER WITH THE WHEEL]
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
version="$("$python" -c 'import torch; print(torch.__version__.split("+")[0])')"
folder="${1:-}"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
for tool in gcc nm readelf; do
    command -v "$tool" > /dev/null || { echo "torch_npu: not run: $tool is not installed"; exit 75; }
done
if [ -z "$folder" ]; then
    folder="$work"
    "$python" -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: -d "$folder" \
        "torch-npu==$version" 2> "$work/log" || { echo "torch_npu: not run: no wheel for torch $version here"; exit 75; }
fi
wheel="$(find "$folder" -name "torch_npu-$version-*.whl" | sort | tail -1)"
[ -n "$wheel" ] || { echo "torch_npu: not run: no wheel for torch $version in $folder"; exit 75; }
"$python" -m zipfile -e "$wheel" "$work/unpacked"
PORTABLE_DIT_TORCH_NPU="$work/unpacked" "$python" -m pytest -q backends/ascend/tests/test_ascend_vendor_checks.py
