#!/usr/bin/env bash
# The core lane: lint and the whole test suite on the CPU, by the targets that a developer runs.
set -euo pipefail
cd "$(dirname "$0")/.."
# The tests of the web page skip where there is no browser; CI brings one where it may install packages.
if [ "${CI:-}" = true ] && [ "$(id -u)" = 0 ] && ! command -v chromium >/dev/null && command -v apt-get >/dev/null; then
    (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium) >/dev/null 2>&1 ||
        echo "no browser could be installed; the tests of the web page are skipped"
fi
make lint
make test
