#!/bin/bash
# train ddp on Flux: 2 nodes, one container each.
# Made by: muster job flux
# Submit: flux batch jobs/flux.flux --epochs 3
# What follows the script goes to the command below; options of flux batch win over these lines: --nodes=4 --time-limit=2h
# flux: --job-name=muster --output=muster-{{id}}.out
# flux: --nodes=2 --exclusive --time-limit=3600s

export MUSTER_MAX_REQUEUES="${MUSTER_MAX_REQUEUES:-10}"
left=$(timeout 60 flux job timeleft | grep -oE '^[0-9]{1,8}')
warning=$((${left:-3000} < 3000 ? left / 10 : 300)) # s before the end; one longer than the job would come at its start
MUSTER_JOB_LIMIT=$(date +%s)+$left
export MUSTER_JOB_LIMIT MUSTER_GRACE_S="${MUSTER_GRACE_S:-$warning}"
export MUSTER_RUN="${MUSTER_RUN:-muster-$(flux job id --to=dec "$(flux getattr jobid)")}"
nodes=$(flux getattr size) # this script is the first program of an instance of Flux on the job's nodes
trap : USR1 USR2; trap ended=yes ALRM HUP TERM # bash runs these after flux run: there is time to write a checkpoint

flux run --nodes="$nodes" --ntasks="$nodes" --exclusive --signal="USR1@${warning}s" \
  apptainer exec --nv --bind /:/host:ro \
  "${MUSTER_IMAGE:-muster.sif}" train ddp "$@"
code=$?

# 75: stopped early, with a checkpoint: submitted anew to the instance that this one is a job of.
if [ "$code" -eq 75 ] && [ -z "${ended:-}" ]; then
  again=(--nodes="$nodes" ${left:+--time-limit="${left}s"})
  for name in queue bank; do
    value=$(flux --parent jobs -no "{$name}" "$(flux getattr jobid)") && [ -n "$value" ] && again+=("--$name=$value")
  done
  flux --parent batch "${again[@]}" --env="MUSTER_RUN=$MUSTER_RUN" --env="MUSTER_ATTEMPT=$((${MUSTER_ATTEMPT:-0} + 1))" "$0" "$@"
fi
exit "$code"
