#!/usr/bin/env bash
# Installs the Debian packages that the given lists name. If it can't, it prints which of them are missing.
#   scripts/install-packages.sh LIST...
set -euo pipefail

mapfile -t wanted < <(cat -- "$@" | sort -u)

is_installed() {
    [ "$(dpkg-query --show --showformat '${db:Status-Status}' "$1" 2> /dev/null)" = installed ]
}

missing=()
if command -v dpkg-query > /dev/null; then
    for package in "${wanted[@]}"; do
        is_installed "$package" || missing+=("$package")
    done
else
    missing=("${wanted[@]}")
fi
[ ${#missing[@]} -gt 0 ] || exit 0

refuse() {
    printf '%s: %s\n' "$1" "${missing[*]}" >&2
    printf 'The tests that need them are skipped. To run them: sudo apt-get install --no-install-recommends %s\n' \
        "${missing[*]}" >&2
    # In CI a missing package is a failure, never a skip.
    [ "${CI:-}" != true ]
    exit
}

command -v apt-get > /dev/null || refuse "This system has no apt-get; these Debian packages are missing"
become=()
if [ "$(id -u)" != 0 ]; then
    sudo -n true 2> /dev/null || refuse "apt-get needs root, and sudo a password; these packages are missing"
    become=(sudo -n)
fi

# The packages' daemons must not run on this machine: the tests start daemons themselves, inside namespaces.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    "${become[@]}" install -m 755 /dev/stdin "$policy" <<< $'#!/bin/sh\nexit 101'
    trap '"${become[@]}" rm -f "$policy"' EXIT
fi

echo "Installing ${missing[*]}"
log=$(mktemp)
run() {
    "${become[@]}" env DEBIAN_FRONTEND=noninteractive "$@" >> "$log" 2>&1
}
if ! { run apt-get update --quiet && run apt-get install --quiet --yes --no-install-recommends "${missing[@]}"; }; then
    tail -n 20 "$log" >&2
    rm -f "$log"
    refuse "apt-get failed; these packages are missing"
fi
rm -f "$log"
