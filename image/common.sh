# shellcheck shell=bash
# Shared by build.sh and sif.sh: errors, the container engine, the time of the commit.

# Ctrl-C ends the script at once; otherwise the interrupted program would be reported as failed.
trap 'exit 130' INT

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# fail WRONG SEEN FIX: prints the three lines of an error, and ends with exit code 2.
fail() {
    printf 'error: %s\n seen: %s\n  fix: %s\n' "${1//[[:cntrl:]]/?}" "${2//[[:cntrl:]]/?}" "$3" >&2
    exit 2
}

# Sets `engine`: ENGINE, or the first of docker, podman and buildah that works.
find_engine() {
    local name dead=""
    case ${ENGINE:-} in
        "" | docker | podman | buildah) ;;
        *) fail "there is no such engine" "ENGINE=$ENGINE" "one of docker, podman, buildah" ;;
    esac
    for name in ${ENGINE:-docker podman buildah}; do
        command -v "$name" > /dev/null || continue
        # The command docker may be installed while its daemon does not run.
        if timeout 60 "$name" info > /dev/null 2>&1; then
            engine=$name
            return
        fi
        dead+="\`$name info\` fails; "
    done
    fail "${ENGINE:-a container engine} is needed" "${dead:-no ${ENGINE:-docker, podman or buildah} on PATH}" \
        "sudo apt-get install --no-install-recommends podman buildah runc, or start docker's daemon"
}

has_image() {
    "$engine" inspect --type=image "$1" > /dev/null 2>&1
}

# Prints the time of the commit, in seconds since 1970: the time of all files that are built from it.
source_date_epoch() {
    printf '%s\n' "${SOURCE_DATE_EPOCH:-$(git -C "$root" log -1 --format=%ct 2> /dev/null || echo 0)}"
}
