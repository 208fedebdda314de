#!/usr/bin/env bash
#SBATCH --job-name=thinwire
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
# One torchrun agent per node; torchrun does the rendezvous, thinwire only uses the process group.
set -euo pipefail
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun \
  --nnodes "$SLURM_NNODES" --nproc-per-node 1 \
  --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$head_node:29400" \
  examples/plain_module.py --compress auto
