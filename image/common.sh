# shellcheck shell=bash
# For build.sh and sif.sh: errors, the container engine, the time of the commit.

# Ctrl-C is not the failure of a program that it ended.
trap 'exit 130' INT

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# fail WRONG SEEN FIX: ends with the three lines of an error and exit code 2.
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
        # docker's command may be there without its daemon.
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

# The time of the commit, in seconds: that of all that is built from it.
source_date_epoch() {
    printf '%s\n' "${SOURCE_DATE_EPOCH:-$(git -C "$root" log -1 --format=%ct 2> /dev/null || echo 0)}"
}
