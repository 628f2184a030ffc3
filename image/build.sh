#!/usr/bin/env bash
# `make image`: builds the Containerfile with docker, podman or buildah.
#   ENGINE=NAME  VARIANT=cuda12  BASE_IMAGE=NAME  TAG=NAME  APT_SOURCES=FILE  image/build.sh [OPTION OF THE ENGINE]...
# The build gets this machine's settings for package indexes as secrets, so that no layer contains them.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "$0")/common.sh"

# setting NAME: prints this setting of pip; environment variables win over files. Prints nothing if it is not set.
setting() {
    local scope value
    for scope in :env: install global; do
        # Listed as  global.extra-index-url='https://one\nhttps://two'
        value=$(sed -n "s/^$scope\.$1=.\(.*\).\$/\1/p" <<< "$pip_config")
        if [ -n "$value" ]; then
            printf '%s\n' "${value//\\n/ }"
            return
        fi
    done
}

# Prints pip's settings for the build; folders of this machine that they name are added to `volumes`.
pip_conf() {
    local name index place folder places
    echo "[global]"
    for name in index-url extra-index-url find-links no-index trusted-host proxy; do
        read -r -a places <<< "$(setting "$name")"
        for index in "${!places[@]}"; do
            place=${places[index]#file://}
            folder=$(printf '%b' "${place//%/\\x}")
            [[ $name != no-index && -d $folder ]] || continue
            if [ "$engine" = docker ]; then
                echo "note: docker can't mount folders in a build: pip does not use $place" >&2
                unset "places[index]"
                continue
            fi
            # The pages of an index in FOLDER/simple link to files below FOLDER.
            place=/run/packages/$((${#volumes[@]} / 2))
            if [ "$(basename "$folder")" = simple ]; then
                volumes+=(--volume "$(dirname "$folder"):$place:ro")
                place+=/simple
            else
                volumes+=(--volume "$folder:$place:ro")
            fi
            places[index]=file://$place
        done
        [ ${#places[@]} = 0 ] || echo "$name = ${places[*]}"
    done
}

# Prints those of this machine's apt settings that say how to reach a mirror, and whether to check its dates.
apt_conf() {
    { apt-config dump 2> /dev/null || true; } | grep -E \
        '^Acquire::(https?::(Proxy|Pipeline-Depth|Verify-(Peer|Host))(::[^ ]+)?|Check-(Valid-Until|Date)|Retries) ".*";$' || true
}

# Prints the path of the file with the certificates that this machine trusts.
ca_bundle() {
    local file
    for file in "$(setting cert)" "${SSL_CERT_FILE:-}" "${REQUESTS_CA_BUNDLE:-}" \
        /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt; do
        if [ -f "$file" ]; then
            printf '%s\n' "$file"
            return
        fi
    done
}

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' "$root/pyproject.toml")
case ${VARIANT:-cuda13} in
    cuda13)
        lock=requirements.lock
        base_image=docker.io/nvidia/cuda:13.2.1-base-ubuntu24.04
        tags=(muster:latest "muster:$version")
        ;;
    cuda12)
        # For driver 525 or newer: torch 2.10.0 is the last on PyPI that was built for CUDA 12.
        [ "$(uname -m)" = x86_64 ] || fail "the variant for CUDA 12 is for x86_64 only: elsewhere its torch has no CUDA" \
            "VARIANT=cuda12 on $(uname -m)" "make image without VARIANT, which needs driver 580 or newer"
        lock=requirements-cuda12.lock
        base_image=docker.io/nvidia/cuda:12.8.1-base-ubuntu24.04
        tags=(muster:cuda12 "muster:$version-cuda12")
        ;;
    *) fail "there is no such variant" "VARIANT=$VARIANT" "VARIANT=cuda13 or VARIANT=cuda12" ;;
esac
[ -z "${APT_SOURCES:-}" ] || [ -f "$APT_SOURCES" ] || fail "there is no such file" "APT_SOURCES=$APT_SOURCES" "APT_SOURCES=FILE"
base_image=${BASE_IMAGE:-$base_image}
[ -z "${TAG:-}" ] || tags=("$TAG")
find_engine

if ! has_image "$base_image"; then
    echo "Pulling $base_image"
    said=$(timeout --foreground 1800 "$engine" pull --quiet "$base_image" 2>&1) || fail \
        "the base image can't be pulled" "$base_image: $(tail -n 1 <<< "$said")" \
        "check that the registry can be reached, or name another Debian or Ubuntu: make image BASE_IMAGE=NAME (docs/image.md)"
fi

# Only this user can read the secrets; they are removed after the build.
secrets=$(mktemp -d)
trap 'rm -rf -- "$secrets"' EXIT
pip_config=$({ python3 -m pip config list || pip config list || "$root/.venv/bin/pip" config list; } 2> /dev/null || true)
volumes=()
pip_conf > "$secrets/pip.conf"
apt_conf > "$secrets/apt.conf"
bundle=$(ca_bundle)
[ -z "$bundle" ] || cp -- "$bundle" "$secrets/ca.pem"
[ -z "${APT_SOURCES:-}" ] || cp -- "$APT_SOURCES" "$secrets/apt.sources"

words=(build --file "$root/Containerfile" "$@")
for tag in "${tags[@]}"; do
    words+=(--tag "$tag")
done
for file in "$secrets"/*; do
    words+=(--secret "id=$(basename "$file"),src=$file")
done
revision=$(git -C "$root" rev-parse HEAD 2> /dev/null || echo unknown)
[ -z "$(git -C "$root" status --porcelain --untracked-files=no 2> /dev/null)" ] || revision+=-dirty
epoch=$(source_date_epoch)
words+=(
    --build-arg "BASE_IMAGE=$base_image" --build-arg "LOCK=$lock"
    --build-arg "LOCK_SHA256=$(sha256sum < "$root/$lock" | cut -d ' ' -f 1)"
    --build-arg "VERSION=$version" --build-arg "REVISION=$revision" --build-arg "SOURCE_DATE_EPOCH=$epoch"
)
if [ "$engine" = docker ]; then
    export DOCKER_BUILDKIT=1
    words+=(--network host)
    for name in HTTP_PROXY HTTPS_PROXY NO_PROXY http_proxy https_proxy no_proxy; do
        [ -z "${!name:-}" ] || words+=(--build-arg "$name")
    done
else
    # chroot also works inside containers and sandboxes, and isolates enough, because the recipe is our own.
    export BUILDAH_ISOLATION=${BUILDAH_ISOLATION:-chroot}
    words+=(--timestamp "$epoch" --pull=missing --layers "${volumes[@]}")
fi

echo "Building ${tags[0]} with $engine from $base_image, $lock"
"$engine" "${words[@]}" "$root" || fail "the image was not built" "$engine build ended with code $?" \
    "solve the problem that its messages above name, then run make image again"
# buildah and podman share their images: podman can run what buildah has built.
printf '\n%s is ready: %s run --rm %s train ddp\n' "${tags[0]}" "${engine/buildah/podman}" "${tags[0]}"
