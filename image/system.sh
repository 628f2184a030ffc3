#!/bin/sh
# Inside the image's build: installs the distribution's packages that a list names, and leaves nothing of getting them.
#   system.sh LIST
# How this machine reaches its package indexes comes as secrets of the build in /run/secrets; each may be missing.
set -eu

list=$1
export DEBIAN_FRONTEND=noninteractive
# They are temporary files, which are removed below.
export APT_CONFIG=/tmp/apt.conf
{
    cat /run/secrets/apt.conf 2> /dev/null || true
    if [ -s /run/secrets/ca.pem ]; then
        echo 'Acquire::https::CAInfo "/run/secrets/ca.pem";'
    fi
    if [ -s /run/secrets/apt.sources ]; then
        # apt tells its two forms of sources by the file's name.
        sources=/tmp/apt.list
        if grep -q '^Types:' /run/secrets/apt.sources; then
            sources=/tmp/apt.sources
        fi
        cp /run/secrets/apt.sources "$sources"
        echo "Dir::Etc::SourceList \"$sources\"; Dir::Etc::SourceParts \"/dev/null\";"
    fi
    # Its own user may not read secrets.
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

# What is another in each build, or serves nobody here. Licences stay.
rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/debconf/*-old /var/cache/ldconfig/aux-cache \
    /var/log/apt /var/log/*.log /var/lib/dpkg/*-old /run/adduser /usr/share/man/* /usr/share/locale/*
# Of the compiler, what torch's own compiler does not ask for: optimising at link time, sanitizers, coverage, archives
# of Python itself.
find /usr/lib /usr/libexec \( -name lto1 -o -name 'lib[atl]san*' -o -name 'libhwasan*' -o -name 'libubsan*' \
    -o -path '*/config-3*/*.a' -o -name 'libpython3*.a' -o -name 'libstdc++*.a' \) -delete
find /usr/bin \( -name '*lto-dump*' -o -name '*gcov*' -o -name '*gprofng*' -o -name '*gp-display*' -o -name '*-dwp' \
    -o -name '*gold' \) -delete
find /usr/share/doc -type f ! -name copyright -delete
find /usr/share/doc -depth -type d -empty -delete

# Compiled by content, as engines change the files' times: else Python would compile its library anew at every start.
find / -xdev -name __pycache__ -type d -prune -exec rm -rf {} +
python3 -m compileall -qq -f --invalidation-mode unchecked-hash /usr/lib/python3*
