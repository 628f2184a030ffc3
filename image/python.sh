#!/bin/sh
# Runs inside the image build: makes the virtual environment of a lock file, each download checked against its hash.
#   python.sh VENV LOCK
set -eu

venv=$1
lock=$2
# The wheels are large, and the index may be busy.
export PIP_RETRIES=10 PIP_TIMEOUT=180
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
if [ -s /run/secrets/pip.conf ]; then
    export PIP_CONFIG_FILE=/run/secrets/pip.conf
fi
if [ -s /run/secrets/ca.pem ]; then
    export PIP_CERT=/run/secrets/ca.pem
fi
python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --quiet --no-compile --require-hashes --requirement "$lock"

# Static libraries, which nothing links here, and the packages' own tests.
find "$venv/lib" -name '*.a' -type f -delete
find "$venv/lib" -path '*/site-packages/*/tests' -type d -prune -exec rm -rf {} +

# Compiled with hashes in place of times, because container engines change the files' times. The hashes are not checked:
# the packages in the image do not change. Some files are for other Python versions and can't be compiled.
"$venv/bin/python" -m compileall -qq -f -j 0 --invalidation-mode unchecked-hash "$venv/lib" || true

# NCCL plugins look for the CUDA runtime on the loader's path: some by the name without a version, those linked with it
# by the name with its version. Only a process that has loaded torch already has it, from the wheel's folder.
runtime=$(find "$venv" -name 'libcudart.so.*' | sort | head -n 1)
if [ -n "$runtime" ]; then
    ln -s "$runtime" /usr/local/lib/libcudart.so
    ln -s "$runtime" "/usr/local/lib/$(basename "$runtime")"
    ldconfig
    rm -f /var/cache/ldconfig/aux-cache
fi
