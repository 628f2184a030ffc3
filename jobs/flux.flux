#!/bin/bash
# train ddp on Flux: 2 nodes, one container each.
# Made by: muster job flux
# Submit: flux batch jobs/flux.flux --epochs 3
# Arguments after the script go to the command below; options of flux batch override these lines: --nodes=4 --time-limit=2h
# flux: --job-name=muster --output=muster-{{id}}.out
# flux: --nodes=2 --exclusive --time-limit=3600s

export MUSTER_MAX_REQUEUES="${MUSTER_MAX_REQUEUES:-10}"
left=$(timeout 60 flux job timeleft | grep -oE '^[0-9]{1,8}')
warning=$((${left:-3000} < 3000 ? left / 10 : 300)) # seconds before the end: at most a tenth of the job, or short jobs are warned at once
MUSTER_JOB_LIMIT=$(date +%s)+$left
export MUSTER_JOB_LIMIT MUSTER_GRACE_S="${MUSTER_GRACE_S:-$warning}"
export MUSTER_RUN="${MUSTER_RUN:-muster-$(flux job id --to=dec "$(flux getattr jobid)")}"
nodes=$(flux getattr size) # this script is the initial program of a Flux instance on the job's nodes
trap : USR1 USR2; trap ended=yes ALRM HUP TERM # bash runs these when flux run has ended: there is time for a checkpoint

flux run --nodes="$nodes" --ntasks="$nodes" --exclusive --signal="USR1@${warning}s" \
  apptainer exec --nv --bind /:/host:ro \
  "${MUSTER_IMAGE:-muster.sif}" train ddp "$@"
code=$?

# 75: stopped early, with a checkpoint: the job is submitted again, to the parent Flux instance.
if [ "$code" -eq 75 ] && [ -z "${ended:-}" ]; then
  again=(--nodes="$nodes" ${left:+--time-limit="${left}s"})
  for name in queue bank; do
    value=$(flux --parent jobs -no "{$name}" "$(flux getattr jobid)") && [ -n "$value" ] && again+=("--$name=$value")
  done
  flux --parent batch "${again[@]}" --env="MUSTER_RUN=$MUSTER_RUN" --env="MUSTER_ATTEMPT=$((${MUSTER_ATTEMPT:-0} + 1))" "$0" "$@"
fi
exit "$code"
