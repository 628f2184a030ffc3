#!/bin/sh
# Runs inside the image build: installs the distribution's packages that LIST names, and removes apt's lists and caches.
#   system.sh LIST
# The settings for package indexes are secrets of the build, in /run/secrets; each may be missing.
set -eu

list=$1
export DEBIAN_FRONTEND=noninteractive
# A temporary file, which is removed below.
export APT_CONFIG=/tmp/apt.conf
{
    cat /run/secrets/apt.conf 2> /dev/null || true
    if [ -s /run/secrets/ca.pem ]; then
        echo 'Acquire::https::CAInfo "/run/secrets/ca.pem";'
    fi
    if [ -s /run/secrets/apt.sources ]; then
        # apt tells its two formats of sources apart by the file's name.
        sources=/tmp/apt.list
        if grep -q '^Types:' /run/secrets/apt.sources; then
            sources=/tmp/apt.sources
        fi
        cp /run/secrets/apt.sources "$sources"
        echo "Dir::Etc::SourceList \"$sources\"; Dir::Etc::SourceParts \"/dev/null\";"
    fi
    # apt's own user may not read the secrets.
    echo 'APT::Sandbox::User "root";'
} > "$APT_CONFIG"
log=$(mktemp)
if ! { apt-get -o Acquire::Retries=5 update --quiet && xargs --arg-file="$list" \
    apt-get -o Acquire::Retries=5 install --quiet --yes --no-install-recommends; } \
    > "$log" 2>&1; then
    tail -n 40 "$log" >&2
    exit 1
fi
rm -f "$log" /tmp/apt.*

# Remove files that differ from build to build, and files that nobody needs here. Licences stay.
rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/debconf/*-old /var/cache/ldconfig/aux-cache \
    /var/log/apt /var/log/*.log /var/lib/dpkg/*-old /run/adduser /usr/share/man/* /usr/share/locale/*
# Remove the parts of gcc that torch's own compiler does not need: link-time optimisation, sanitizers, coverage; and the
# static libraries of Python and C++.
find /usr/lib /usr/libexec \( -name lto1 -o -name 'lib[atl]san*' -o -name 'libhwasan*' -o -name 'libubsan*' \
    -o -path '*/config-3*/*.a' -o -name 'libpython3*.a' -o -name 'libstdc++*.a' \) -delete
find /usr/bin \( -name '*lto-dump*' -o -name '*gcov*' -o -name '*gprofng*' -o -name '*gp-display*' -o -name '*-dwp' \
    -o -name '*gold' \) -delete
find /usr/share/doc -type f ! -name copyright -delete
find /usr/share/doc -depth -type d -empty -delete

# Compiled with hashes in place of times, which engines change: Python would compile its library again at every start.
find / -xdev -name __pycache__ -type d -prune -exec rm -rf {} +
python3 -m compileall -qq -f --invalidation-mode unchecked-hash /usr/lib/python3*
