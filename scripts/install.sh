#!/usr/bin/env bash
# Installs the packages of a lock file and this project into a virtual environment; changes nothing outside it.
#   scripts/install.sh VENV LOCK [PYTHON]
set -euo pipefail

venv=$1
lock=$2
wanted=${3:-}

fail() {
    printf 'error: %s\n seen: %s\n  fix: %s\n' "$1" "$2" "$3" >&2
    exit 2
}

# Whether the interpreter has a version for which the lock files were made.
fits() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2> /dev/null
}

find_python() {
    local candidate
    for candidate in ${wanted:+"$wanted"} python3 python3.13 python3.12 python3.11; do
        if fits "$candidate"; then
            command -v "$candidate"
            return
        fi
        if [ -n "$wanted" ]; then
            break
        fi
    done
    fail "Python 3.11, 3.12 or 3.13 is needed" \
        "${wanted:-$(python3 --version 2>&1 || true)}" \
        "sudo apt-get install python3 python3-venv, or make PYTHON=/path/to/python3.12 train"
}

if [ ! -x "$venv/bin/pip" ]; then
    python=$(find_python)
    echo "Making the virtual environment $venv with $("$python" --version)"
    if ! said=$("$python" -m venv "$venv" 2>&1); then
        rm -rf "$venv"
        # Debian's Python prints many lines; their first sentence says what is wrong.
        said=$(tr -s '[:space:]' ' ' <<< "$said" | sed 's/ $//; s/\. .*/./' | cut -c 1-200)
        fail "$python can't make a virtual environment" "$said" "sudo apt-get install python3-venv"
    fi
fi

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore
# Compiling all modules takes longer than installing them. Python itself compiles the few that are imported.
export PIP_NO_COMPILE=1
echo "Installing $lock (5.5 GB with torch; the first time takes minutes)"
"$venv/bin/pip" install --quiet --require-hashes --requirement "$lock"
# `compat` makes a plain .pth file; the default, an import finder, would run at every start of the interpreter.
"$venv/bin/pip" install --quiet --no-deps --no-build-isolation --config-settings editable_mode=compat --editable .
