#!/usr/bin/env bash
# Installs Apptainer in a folder of its own, on a Debian release that has no package of it; changes nothing else.
#   scripts/install-apptainer.sh FOLDER
# It comes from Debian's unstable suite, with the C library that it was built for, through this machine's mirror and apt
# settings. The command is FOLDER/bin/apptainer.
set -euo pipefail

fail() {
    printf 'error: %s\n seen: %s\n  fix: %s\n' "$1" "$2" "$3" >&2
    exit 2
}

[ $# = 1 ] || fail "one folder is needed" "$*" "scripts/install-apptainer.sh FOLDER"
folder=$(realpath -m -- "$1")
for program in apt-get dpkg patchelf mksquashfs; do
    command -v "$program" > /dev/null || fail "Apptainer can't be installed here: $program is missing" "$program" \
        "install Apptainer by https://apptainer.org/docs/admin/latest/installation.html, or on Debian: sudo apt-get install patchelf squashfs-tools"
done

work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT
mkdir -p "$work"/{lists/partial,archives/partial,root}

# Package lists of its own, so that the machine's stay as they are. apt's settings for proxies and certificates apply.
# shellcheck disable=SC2016
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Origin: Debian' 2> /dev/null | grep -v security | sort -u | head -n 1)
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
[ -r "$keyring" ] || fail "the keys of Debian's packages are missing" "$keyring" "sudo apt-get install debian-archive-keyring"
printf 'deb [signed-by=%s] %s sid main\n' "$keyring" "${mirror:-http://deb.debian.org/debian/}" > "$work/sources.list"
apt=(apt-get --quiet --quiet -o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts=/dev/null
    -o Dir::State::Lists="$work/lists" -o Dir::Cache="$work" -o APT::Sandbox::User=)
"${apt[@]}" update
mapfile -t packages < <(apt-cache -o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts=/dev/null \
    -o Dir::State::Lists="$work/lists" -o Dir::Cache="$work" depends --no-recommends --no-suggests \
    --no-conflicts --no-breaks --no-replaces --no-enhances apptainer | sed -n 's/^ *Depends: \(lib[a-z0-9.+-]*\)$/\1/p')
(cd "$work/archives" && "${apt[@]}" download apptainer "${packages[@]}")
for package in "$work"/archives/*.deb; do
    dpkg -x "$package" "$work/root"
done

rm -rf -- "$folder"
mkdir -p "$(dirname "$folder")"
mv -- "$work/root" "$folder"
chmod 755 "$folder"
libraries=$(dirname "$(find "$folder/usr/lib" -name 'libseccomp.so.2' | head -n 1)")
loader=$(find "$libraries" -name 'ld-linux*.so.*' | head -n 1)
while IFS= read -r -d '' program; do
    if patchelf --print-interpreter "$program" > /dev/null 2>&1; then
        patchelf --set-interpreter "$loader" --force-rpath --set-rpath "$libraries" "$program"
    fi
done < <(find "$folder/usr/bin" "$libraries/apptainer" -type f -perm -u+x -print0)
# As it is not installed in /, Apptainer looks for etc and var beside itself: the command in usr/, the starter in usr/lib.
ln -s usr/bin "$folder/bin"
# The names that Debian's alternatives would make; a SIF that is executed as a program is run by the first.
ln -s run-singularity.apptainer "$folder/bin/run-singularity"
ln -s singularity.apptainer "$folder/bin/singularity"
ln -s ../etc "$folder/usr/etc"
ln -s ../var "$folder/usr/var"
ln -s ../../etc "$folder/usr/lib/etc"
ln -s ../../var "$folder/usr/lib/var"
mkdir -p "$folder/var/lib/apptainer/mnt/session"

# Root without CAP_SYS_RESOURCE (24), as in a sandbox, can't acquire all capabilities: Apptainer is set not to ask for it.
bounding=$(sed -n 's/^CapBnd:\t//p' /proc/self/status)
if [ "$(id -u)" = 0 ] && (((16#$bounding >> 24 & 1) == 0)); then
    sed -i 's/^root default capabilities = .*/root default capabilities = file/' "$folder/etc/apptainer/apptainer.conf"
    "$folder/bin/apptainer" capability add --user root all 2> /dev/null
    "$folder/bin/apptainer" capability drop --user root CAP_SYS_RESOURCE
fi
"$folder/bin/apptainer" --version
