#!/bin/sh
# Inside the image's build: the virtual environment of a lock, every file of it checked against its hash.
#   python.sh VENV LOCK
set -eu

venv=$1
lock=$2
# Large wheels, from an index that may be busy.
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

# What only a compiler's linker, or the packages' own developers, would read.
find "$venv/lib" -name '*.a' -type f -delete
find "$venv/lib" -path '*/site-packages/*/tests' -type d -prune -exec rm -rf {} +

# Compiled by content, not by time: the files' times are whatever the engine makes of them. What lies in the image does
# not change: nothing needs to look at the sources again. Some are for other Pythons and can't be compiled.
"$venv/bin/python" -m compileall -qq -f -j 0 --invalidation-mode unchecked-hash "$venv/lib" || true

# Plugins of NCCL look for the CUDA runtime on the loader's path: some by its bare name, and those that link it by the
# versioned one, which only a process with torch in it would have loaded from the wheel's folder.
runtime=$(find "$venv" -name 'libcudart.so.*' | sort | head -n 1)
if [ -n "$runtime" ]; then
    ln -s "$runtime" /usr/local/lib/libcudart.so
    ln -s "$runtime" "/usr/local/lib/$(basename "$runtime")"
    ldconfig
    rm -f /var/cache/ldconfig/aux-cache
fi
