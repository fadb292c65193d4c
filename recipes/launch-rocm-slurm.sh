#!/usr/bin/env bash
# Several nodes of 8 AMD GPUs under Slurm: one launcher a node, which starts its 8 ranks.
# Not run by us: no ROCm cluster was at hand.
#
#   DRAFTSMITH_FABRIC=roce sbatch --nodes 4 recipes/launch-rocm-slurm.sh qwen3-8b-dspark --out runs/big
#
# The arguments are those of `draftsmith train`. LAUNCH=FILE chooses another launch file. With a container, put its
# command (apptainer exec --rocm IMAGE, or the docker line of recipes/launch-rocm-env.sh) into CONTAINER.
# The checkout, cache/ and runs/ must be on a disk that all nodes see. Queued again, the job goes on from its last step.

#SBATCH --job-name draftsmith
#SBATCH --nodes 2
#SBATCH --ntasks-per-node 1
#SBATCH --gpus-per-node 8
#SBATCH --cpus-per-task 64
#SBATCH --exclusive
#SBATCH --signal TERM@120
# --signal TERM@120: two minutes before the time limit every rank finishes its step, saves and ends.

set -euo pipefail
LAUNCH=${LAUNCH:-recipes/launch-rocm-2node.yaml}
export DRAFTSMITH_FABRIC=${DRAFTSMITH_FABRIC:-roce}
# Slurm may set ROCR_VISIBLE_DEVICES; with HIP_VISIBLE_DEVICES beside it GPUs would be hidden twice
unset ROCR_VISIBLE_DEVICES
# shellcheck source=recipes/launch-rocm-env.sh
source recipes/launch-rocm-env.sh

nodes=${SLURM_NNODES:?start this with sbatch}
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))   # two jobs on one node must not meet

# SLURM_NODEID is the rank of a node, known only inside srun
# shellcheck disable=SC2016,SC2086
exec srun --kill-on-bad-exit=1 ${CONTAINER:-} bash -c '
  exec accelerate launch --config_file "$1" --num_machines "$2" --num_processes "$(($2 * 8))" \
    --machine_rank "$SLURM_NODEID" --main_process_ip "$3" --main_process_port "$4" -m draftsmith.train "${@:5}"
' launch "$LAUNCH" "$nodes" "$host" "$port" "$@"
