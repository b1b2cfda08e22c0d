#!/usr/bin/env bash
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --exclusive
# Train Qwen3-30B-A3B on two nodes of 8 GPUs of 141 GB: node 0 trains, node 1 serves. --help says more, --dry-run
# starts nothing.
set -euo pipefail
folder="$(dirname "${BASH_SOURCE[0]}")"
# sbatch runs a copy of this file, without the folder it came from
[[ -f "$folder/common.sh" ]] || folder="${SLURM_SUBMIT_DIR:-.}/launch"
source "$folder/common.sh"
launch_recipe qwen3_30b_a3b_2x8 "$@"
