#!/bin/sh
# Inside the image's build: the commands `train` and `muster`, what the image is made of, a folder to work in.
#   project.sh FOLDER VERSION REVISION LOCK BASE
set -eu

folder=$1
build=$(dirname "$0")
export SOURCE_DATE_EPOCH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

# A plain path file: what runs is what lies in the folder, where a clone of it can be mounted over.
"$folder/venv/bin/pip" install --quiet --no-cache-dir --no-compile --no-deps --no-build-isolation --no-index \
    --config-settings editable_mode=compat --editable "$folder"
rm -rf "$folder"/*.egg-info/SOURCES.txt
"$folder/venv/bin/python" -m compileall -q -f --invalidation-mode checked-hash \
    "$folder/entrypoint" "$folder/report" "$folder/train" "$folder/check"
"$folder/venv/bin/python" "$build/describe.py" "$@"
"$folder/venv/bin/python" -P -m entrypoint.fabric.inventory

install --directory --mode=1777 /workspace
