#!/usr/bin/env bash
# Resolves the lock files from pyproject.toml (names, versions, hashes), each for all supported Pythons and machines.
set -euo pipefail

resolve() {
    uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
        --custom-compile-command "make lock" "$@" pyproject.toml
}

resolve --output-file requirements.lock
resolve --extra dev --constraint requirements.lock --output-file requirements-dev.lock
resolve --extra cuda12 --output-file requirements-cuda12.lock
resolve --extra cuda12 --extra test --constraint requirements-cuda12.lock --output-file requirements-cuda12-test.lock
