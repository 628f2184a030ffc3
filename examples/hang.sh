#!/bin/bash
# A deliberate hang: a training whose data worker stops, as on a file system that does not answer. The exit code is 0
# if the training detected the hang and ended with exit code 1.
set -euo pipefail

OMP_NUM_THREADS=1 train single --data fake --num-samples 100000 --image-size 8 --batch-size 4 --train-num-workers 1 \
  --name hang --hang-timeout 20 &
training=$!

# The first metrics are written after some steps.
until grep -qs '"step"' runs/hang/metrics.jsonl; do
  if ! kill -0 "$training"; then
    echo "the training ended before it could be made to hang" >&2
    exit 1
  fi
  sleep 0.2
done

# Prints the processes below $1 that have no children: the data workers of the rank, which may run below an agent.
leaves() {
  local child children
  children=$(pgrep -P "$1" || true)
  if [ -z "$children" ]; then echo "$1"; fi
  for child in $children; do leaves "$child"; done
}
mapfile -t stopped < <(leaves "$training")
kill -STOP "${stopped[@]}"
trap 'kill -KILL "${stopped[@]}" 2> /dev/null || true' EXIT

code=0
wait "$training" || code=$?
echo "the training ended with exit code $code"
[ "$code" -eq 1 ]
