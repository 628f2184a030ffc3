#!/bin/bash
# train ddp on Flux: 2 nodes, one container each.
#
# Submit:   flux batch jobs/flux.flux --epochs 3
#           What follows the script goes to `train ddp`. Options of flux batch win over these lines:
#           --nodes=4, --time-limit=2h, --queue=NAME.
# Image:    muster.sif in the folder that the job is submitted from; another one: MUSTER_IMAGE=/path/to/muster.sif
# Made by:  muster job flux
# Profile:  jobs/sites/flux.toml, documented
# Read:     https://flux-framework.readthedocs.io/projects/flux-core/en/latest/man1/flux-batch.html
# Unknown:  GPUs a node, cores a node, container's command, queue, folder for caches, network: left out here, and found on the spot as far as it can be
# Ends with the exit code of the training: 0 done, 1 failed, 2 to be mended by you, 75 stopped early with a checkpoint.
#
# flux: --job-name=muster
# flux: --nodes=2
# flux: --exclusive
# flux: --time-limit=3600s
# flux: --output=muster-{{id}}.out

set -euo pipefail

if [ -z "${MUSTER_IMAGE:-}" ]; then MUSTER_IMAGE=muster.sif; fi
if [[ $MUSTER_IMAGE != /* && $MUSTER_IMAGE != *://* ]]; then MUSTER_IMAGE=$PWD/$MUSTER_IMAGE; fi
if [[ $MUSTER_IMAGE != *://* && ! -e $MUSTER_IMAGE ]]; then
  {
    echo "error: the container image is not there"
    echo " seen: MUSTER_IMAGE=$MUSTER_IMAGE on $(uname -n)"
    echo '  fix: MUSTER_IMAGE=/path/to/muster.sif flux batch jobs/flux.flux'
  } >&2
  exit 2
fi
engine=apptainer
if ! command -v apptainer > /dev/null && command -v singularity > /dev/null; then engine=singularity; fi
if ! command -v "$engine" > /dev/null; then
  {
    echo "error: $engine is not there"
    echo " seen: PATH=$PATH on $(uname -n)"
    echo "  fix: put it on PATH, by its module or otherwise, before the job is submitted or in this script"
  } >&2
  exit 2
fi

# The host's files at /host: of these `train` and `muster run` take the network's libraries by themselves.
container=("$engine" exec --bind /:/host:ro)
if [ -e /dev/nvidiactl ]; then container+=(--nv); fi

# Flux knows what is left, also where --time-limit has changed it.
# `--save-before` counts back from the end; a time of yours wins.
if [ -z "${MUSTER_JOB_END_TIME:-}" ]; then
  limit=$(left=$(timeout 60 flux job timeleft) && [[ $left =~ ^[1-9][0-9]{0,7}([.][0-9]*)?$ ]] && echo "$((${left%.*} + SECONDS))") || limit=
  if [[ $limit =~ ^[1-9][0-9]{0,7}$ ]]; then
    MUSTER_JOB_START_TIME=$(($(date +%s) - SECONDS))
    MUSTER_JOB_END_TIME=$((MUSTER_JOB_START_TIME + limit))
    export MUSTER_JOB_START_TIME MUSTER_JOB_END_TIME
  fi
fi
# flux run --signal warns so long before the end: a tenth of the limit at most. A warning longer than the job would come
# at its start, and end the containers before anything in them hears it.
warning=300
if [ -n "${limit:-}" ] && [ "$limit" -lt $((10 * warning)) ]; then warning=$((limit / 10)); fi
export MUSTER_GRACE_S=${MUSTER_GRACE_S:-$warning}

export MUSTER_ATTEMPT=${MUSTER_ATTEMPT:-0}
MUSTER_RUN=${MUSTER_RUN:-muster-$(flux job id --to=dec "$(flux getattr jobid)")}
# What runs on each node. The arguments of the job come last: of two that say the same, the last one counts.
command=(train ddp "$@")

# The run is named after the job, so that a later attempt goes on where an earlier one was stopped.
is_named=false
is_resumed=false
for word in "${command[@]}"; do
  case $word in
    --name | --name=*) is_named=true ;;
    --resume | --resume=*) is_resumed=true ;;
  esac
done
if ! "$is_resumed"; then
  if ! "$is_named"; then
    command+=("--name=$MUSTER_RUN" --resume auto)
  elif [ "$MUSTER_ATTEMPT" -gt 0 ]; then
    command+=(--resume auto)
  fi
fi

# The script is the first program of an instance of Flux that has the job's nodes, and starts one container on each.
nodes=$(flux getattr size)
is_ended=false
trap 'is_signalled=true' USR1 USR2
trap 'is_signalled=true; is_ended=true' ALRM HUP TERM
flux run --nodes="$nodes" --ntasks="$nodes" --exclusive --signal="USR1@${warning}s" \
  "${container[@]}" "$MUSTER_IMAGE" "${command[@]}" &
launch=$!
# A signal ends `wait` early: then it waits on, for the exit code.
code=0
is_signalled=true
while "$is_signalled"; do
  is_signalled=false
  code=0
  wait "$launch" || code=$?
done

# 75: stopped early, and a checkpoint was written. Flux does not requeue: the script is submitted anew to the instance
# that this one is a job of, so many times at most.
if [ "$code" -eq 75 ] && ! "$is_ended"; then
  most=${MUSTER_MAX_REQUEUES:-10}
  if [ "$MUSTER_ATTEMPT" -lt "$most" ]; then
    echo "muster: submitted again, for attempt $((MUSTER_ATTEMPT + 2)) of $((most + 1))" >&2
    unset MUSTER_JOB_START_TIME MUSTER_JOB_END_TIME # the next job has times of its own
    flux --parent batch --nodes="$nodes" --env="MUSTER_RUN=$MUSTER_RUN" --env="MUSTER_ATTEMPT=$((MUSTER_ATTEMPT + 1))" "$0" "$@" \
      || echo "muster: Flux did not take the script again" >&2
  else
    echo "muster: not submitted again: MUSTER_MAX_REQUEUES=$most" >&2
  fi
fi
exit "$code"
