#!/bin/bash
#SBATCH --job-name=demo
#SBATCH --chdir=/home/me/project
#SBATCH --output="/home/me/project/my runs/demo.launch/slurm-%j.log"
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --no-kill
#SBATCH --gpus-per-node=2
#SBATCH --partition=gpu
#SBATCH --time=12:00:00

# The first node runs the controller. Every node, also the first, runs an agent that calls it over mutual TLS; the job
# continues when a node is lost, except the first. 120 s before the time limit the run ends and the job is queued again.
set -euo pipefail

address_of() { # of a node, as Slurm knows it
  local name
  name=$(scontrol show node -o "$1" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
  getent ahostsv4 "${name:-$1}" | { read -r address _ && echo "$address"; } \
    || { echo "no IPv4 address of node $1 is known" >&2; exit 1; }
}

nodes_of() { # of a component of the job, by its number
  local list=SLURM_JOB_NODELIST_HET_GROUP_$1
  scontrol show hostnames "${!list:-$SLURM_JOB_NODELIST}"
}

export LLAMARL_PKI='/home/me/project/my runs/demo.launch'/pki-$SLURM_JOB_ID LLAMARL_HOSTS="" LLAMARL_CONTROLLER
components=${SLURM_HET_SIZE:-1} num_hosts=0 places=()
for ((component = 0; component < components; component++)); do
  names=""
  for node in $(nodes_of "$component"); do
    address=$(address_of "$node")
    LLAMARL_HOSTS+=",$node=$address" names+=",'$node'" num_hosts=$((num_hosts + 1))
  done
  places+=("[${names#,}]")
done
here=${LLAMARL_HOSTS##*,"$SLURMD_NODENAME"=}
here=${here%%,*}
# Below the ephemeral ports, which begin at 32768.
LLAMARL_CONTROLLER=$here:$((20000 + SLURM_JOB_ID % 12000))
rm -rf "$LLAMARL_PKI" # of this job before it was queued again
trap 'rm -rf "$LLAMARL_PKI"' EXIT
'/opt/my env/bin/python' -m llamarl certs "$LLAMARL_PKI" --hosts "${LLAMARL_HOSTS#,}" --controller "$SLURMD_NODENAME=$here"

# An agent that dies starts again. It ends with the run (0), or when the controller refuses it (2).
for ((component = 0; component < components; component++)); do
  srun ${SLURM_HET_SIZE:+"--het-group=$component"} --overlap --no-kill --kill-on-bad-exit=0 --wait=0 \
    --ntasks-per-node=1 --cpu-bind=none --label bash -c '
    own=${LLAMARL_HOSTS##*,"$SLURMD_NODENAME"=}
    while :; do
      code=0
      "$0" -m llamarl host "$LLAMARL_CONTROLLER" --pki "$LLAMARL_PKI" --once \
        --name "$SLURMD_NODENAME" --address "${own%%,*}" || code=$?
      if [ "$code" -eq 0 ] || [ "$code" -eq 2 ]; then exit "$code"; fi
      echo "llamarl host ended with exit code $code and starts again" >&2
      sleep 2
    done
  ' '/opt/my env/bin/python' &
done

set --
if [ -e '/home/me/project/my runs/demo'/config.toml ]; then set -- --resume; fi
'/opt/my env/bin/python' -m llamarl train /home/me/llamarl/configs/demo.toml \
  --cluster.num_hosts \
  3 \
  --trainer.device=cuda \
  --generator.device=cuda \
  --trainer.parallelism.fsdp=4 \
  --generator.tensor_parallel=2 \
  --launch.slurm.partition \
  gpu \
  --launch.slurm.time \
  12:00:00 \
  --output \
  'my runs' \
  --steps=7 \
  --cluster.kind hosts --cluster.listen "$LLAMARL_CONTROLLER" --cluster.pki "$LLAMARL_PKI" \
  --cluster.num_hosts "$num_hosts" "$@" &
controller=$! queue_again=
trap 'queue_again=1; kill "$controller"' USR1 # the time limit is near
trap 'kill "$controller"' TERM

set +e
while kill -0 "$controller" 2>/dev/null; do wait "$controller"; done
wait "$controller"
code=$?
if [ "$queue_again" ] && [ "$code" -ne 0 ]; then
  rm -rf "$LLAMARL_PKI"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
