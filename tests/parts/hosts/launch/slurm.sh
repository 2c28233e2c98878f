#!/bin/bash
#SBATCH --job-name=demo
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --chdir=/home/me/project
#SBATCH --output="/home/me/project/my runs/demo.launch/slurm-%j.log"
#SBATCH --open-mode=append
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --partition=gpu
#SBATCH --time=12:00:00
#SBATCH --gpus-per-node=2

# The first node runs the controller. Every node, the first too, runs an agent that calls it over mutual TLS; the job
# goes on when a node is lost, except the first. 120 s before the time limit the run is ended and the job queued again.
set -euo pipefail

address_of() { # of a node, as Slurm knows it
  local name
  name=$(scontrol show node -o "$1" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
  getent ahostsv4 "${name:-$1}" | { read -r address _ && echo "$address"; } \
    || { echo "no IPv4 address of node $1 is known" >&2; exit 1; }
}

export LLAMARL_PKI='/home/me/project/my runs/demo.launch'/pki-$SLURM_JOB_ID LLAMARL_HOSTS="" LLAMARL_CONTROLLER
for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
  address=$(address_of "$node")
  LLAMARL_HOSTS+=",$node=$address"
done
here=${LLAMARL_HOSTS##*,"$SLURMD_NODENAME"=}
here=${here%%,*}
LLAMARL_CONTROLLER=$here:$((20000 + SLURM_JOB_ID % 20000))
rm -rf "$LLAMARL_PKI" # of this job before it was queued again
trap 'rm -rf "$LLAMARL_PKI"' EXIT
'/opt/my env/bin/python' -m llamarl certs "$LLAMARL_PKI" --hosts "${LLAMARL_HOSTS#,}" --controller "$SLURMD_NODENAME=$here"

srun --overlap --no-kill --kill-on-bad-exit=0 --wait=0 --ntasks-per-node=1 --cpu-bind=none --label bash -c '
  own=${LLAMARL_HOSTS##*,"$SLURMD_NODENAME"=}
  exec "$0" -m llamarl host "$LLAMARL_CONTROLLER" --pki "$LLAMARL_PKI" --once \
    --name "$SLURMD_NODENAME" --address "${own%%,*}"
' '/opt/my env/bin/python' &

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
  --cluster.num_hosts "$SLURM_JOB_NUM_NODES" "$@" &
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
