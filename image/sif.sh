#!/usr/bin/env bash
# `make sif`: makes muster.sif, for Apptainer, from the image that `make image` built.
#   ENGINE=NAME  VARIANT=cuda12  IMAGE=NAME  SOURCE=oci:FOLDER  SIF=FILE  image/sif.sh
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "$0")/common.sh"

sif=${SIF:-muster.sif}
folder=$(dirname -- "$sif")
[ -d "$folder" ] || fail "there is no such folder" "SIF=$sif" "create the folder, or set SIF=OTHER.sif"

apptainer=apptainer
command -v apptainer > /dev/null || apptainer=singularity
if ! command -v "$apptainer" > /dev/null; then
    apptainer=$root/.apptainer/bin/apptainer
    if [ ! -x "$apptainer" ]; then
        echo "Installing Apptainer in .apptainer/, as there is none on PATH"
        said=$("$root/scripts/install-apptainer.sh" "$root/.apptainer" 2>&1) || fail \
            "there is no Apptainer on PATH, and none could be installed for this clone" \
            "$(tail -n 3 <<< "$said" | tr '\n' ' ')" \
            "install it: https://apptainer.org/docs/admin/latest/installation.html; then run make sif again"
    fi
fi

# Temporary files lie beside the SIF, because /tmp may be too small.
scratch=$(mktemp -d -p "$folder" .muster-sif-XXXXXX)
trap 'rm -rf -- "$scratch"' EXIT
source=${SOURCE:-}
if [ -z "$source" ]; then
    find_engine
    case ${VARIANT:-cuda13} in
        cuda13) image=${IMAGE:-muster:latest} ;;
        cuda12) image=${IMAGE:-muster:cuda12} ;;
        *) fail "there is no such variant" "VARIANT=$VARIANT" "VARIANT=cuda13 or VARIANT=cuda12" ;;
    esac
    has_image "$image" || fail "$engine has no image of that name" "$image" "make image first"
    echo "Saving $image from $engine"
    # buildah and podman share their images. Only buildah leaves the layers uncompressed: compression would waste time.
    if [ "$engine" = docker ]; then
        source=docker-archive:$scratch/image.tar
        docker save --output "$scratch/image.tar" "$image"
    else
        source=oci:$scratch/oci
        if command -v buildah > /dev/null; then
            buildah push --quiet --disable-compression "$image" "$source"
        else
            podman save --quiet --format=oci-dir --output "$scratch/oci" "$image"
        fi
    fi || fail "the image was not saved" "$image by $engine, in $scratch" "free 6 GB on that disk, then run make sif again"
fi

echo "Building $sif"
SOURCE_DATE_EPOCH=$(source_date_epoch)
export SOURCE_DATE_EPOCH APPTAINER_TMPDIR=${APPTAINER_TMPDIR:-$scratch}
# Root without CAP_SYS_RESOURCE (24), as in a sandbox, could not acquire it for the %test of apptainer.def.
capabilities=$(sed -n 's/^CapBnd:\t//p' /proc/self/status)
if [ "$(id -u)" = 0 ] && (((16#$capabilities >> 24 & 1) == 0)); then
    export APPTAINER_DROP_CAPS=${APPTAINER_DROP_CAPS:-CAP_SYS_RESOURCE}
fi
place=${source#*:}
# On two cores zstd at level 3 compresses 5.5 GB in 8 s, and gzip in 169 s, to the same size.
"$apptainer" --quiet build --force --disable-cache --mksquashfs-args "-comp zstd -Xcompression-level 3" \
    --build-arg "BOOTSTRAP=${source%%:*}" --build-arg "FROM=${place#//}" "$sif" "$root/apptainer.def" ||
    fail "the SIF was not built" "apptainer build ended with code $?" "solve the problem named above, then run make sif again"

printf '\n%s is ready, %s: %s exec --nv %s train ddp\n' \
    "$sif" "$(stat --format=%s "$sif" | numfmt --to=si --round=nearest --format=%.2f --suffix=B)" "${apptainer#"$PWD/"}" "$sif"
