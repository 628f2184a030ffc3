#!/bin/sh
# Inside the image's build: the commands `train` and `muster`, what the image is made of, a folder to work in.
#   project.sh FOLDER VERSION REVISION LOCK BASE
set -eu

folder=$1
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

# A plain path file: what runs is what lies in the folder, where a clone of it can be mounted over.
"$folder/venv/bin/pip" install --quiet --no-cache-dir --no-compile --no-deps --no-build-isolation --no-index \
    --config-settings editable_mode=compat --editable "$folder"
rm -rf "$folder"/*.egg-info/SOURCES.txt
"$folder/venv/bin/python" -m compileall -q -f --invalidation-mode checked-hash \
    "$folder/entrypoint" "$folder/muster" "$folder/train"
# For `muster version`. None of the words can hold a quote.
printf '{"version": "%s", "revision": "%s", "lock": "%s", "lock_sha256": "%s", "base": "%s", "created": "%s"}\n' \
    "$2" "$3" "$4" "$(sha256sum "$folder/requirements.lock" | cut -d ' ' -f 1)" "$5" \
    "$(date --utc --date="@$SOURCE_DATE_EPOCH" +%Y-%m-%dT%H:%M:%SZ)" > "$folder/image.json"

install --directory --mode=1777 /workspace
