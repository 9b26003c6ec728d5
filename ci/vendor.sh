#!/usr/bin/env bash
# The lane of one vendor's devices, on a machine that has them:
#
#   ci/vendor.sh NAME [--gpus N] [--weights FOLDER|ORG/NAME] [--steps tests,recipes] [--out FOLDER] [--no-setup]
#
# Sets up beside the torch that is already here, then runs ci/lane.py: the package's tests, conformance, its recipes,
# bench. Exit code 0: all of it passed. 1: something failed. 75: not run, since the devices are not here.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || { sed -n '2,9p' "$0" | sed 's/^# \{0,1\}//' >&2; exit 2; }
name="$1"; shift
python="${PYTHON:-python3}"
arguments=()
setup=1
for argument in "$@"; do
    if [ "$argument" = --no-setup ]; then setup=; else arguments+=("$argument"); fi
done
if [ -n "$setup" ]; then
    # The vendor's build of torch comes with the image and must stay: pip may not take another for it.
    torch="$("$python" -c 'import torch; print(torch.__version__.split("+")[0])')" || {
        echo "lane $name: not run: no torch that imports in $python. Use the image that ci/lanes.toml names."
        exit 75
    }
    "$python" -m venv --system-site-packages ".venv-$name"
    python=".venv-$name/bin/python"
    packages=(-e .)
    [ -d "backends/$name" ] && packages+=(-e "backends/$name")
    "$python" -m pip install -q --disable-pip-version-check -c <(echo "torch==$torch") \
        "${packages[@]}" pytest hypothesis pluggy
fi
exec "$python" ci/lane.py "$name" ${arguments[@]+"${arguments[@]}"}
