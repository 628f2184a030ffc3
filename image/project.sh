#!/bin/sh
# Runs inside the image build: installs the commands `train` and `muster`, writes image.json, makes /workspace.
#   project.sh FOLDER VERSION REVISION LOCK BASE
set -eu

folder=$1
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

# A plain .pth file: Python imports the code from this folder, so a clone mounted over the folder takes effect.
"$folder/venv/bin/pip" install --quiet --no-cache-dir --no-compile --no-deps --no-build-isolation --no-index \
    --config-settings editable_mode=compat --editable "$folder"
rm -rf "$folder"/*.egg-info/SOURCES.txt
"$folder/venv/bin/python" -m compileall -q -f --invalidation-mode checked-hash \
    "$folder/entrypoint" "$folder/muster" "$folder/train"
# For `muster version`. The values are not escaped: none can contain a quote.
printf '{"version": "%s", "revision": "%s", "lock": "%s", "lock_sha256": "%s", "base": "%s", "created": "%s"}\n' \
    "$2" "$3" "$4" "$(sha256sum "$folder/requirements.lock" | cut -d ' ' -f 1)" "$5" \
    "$(date --utc --date="@$SOURCE_DATE_EPOCH" +%Y-%m-%dT%H:%M:%SZ)" > "$folder/image.json"

install --directory --mode=1777 /workspace
