#!/usr/bin/env bash
# Launch train_ddp.py on several nodes: one torchrun per node, all given the same rendezvous.
#
#   ./launch_multinode_ddp.sh --epochs 3                        two "nodes" on this machine
#   HOSTS="gpu1 gpu2" ./launch_multinode_ddp.sh --epochs 3      one torchrun per host, over ssh
#
# The arguments go to train_ddp.py. More by environment variables:
#   NPROC_PER_NODE   workers per node (default 1)
#   MASTER_PORT      the rendezvous port, on the first host (default 29500)
#   REMOTE_DIR       where this folder is on the hosts (default: the same path as here)
#   TORCHRUN         torchrun's path on the hosts (default: that of the repository's .venv, or
#                    else of the PATH)
#   GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME   the network interface by which hosts reach each
#                    other, such as eth0: needed where a host's own name means 127.0.0.1
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

read -r -a hosts <<<"${HOSTS:-}"
nproc=${NPROC_PER_NODE:-1}
port=${MASTER_PORT:-29500}
torchrun=${TORCHRUN:-torchrun}
nodes=${#hosts[@]}
master=${hosts[0]:-127.0.0.1}
master=${master#*@} # user@host: torchrun wants the host
if [ "$nodes" -eq 0 ]; then
  nodes=2
  there=$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd,) || true
  IFS=, read -r -a gpus <<<"${CUDA_VISIBLE_DEVICES-$there}"
  if (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
    echo "Port $port is in use: set MASTER_PORT to a free one." >&2
    exit 1
  fi
fi

launch() { # node_rank: become torchrun there, so that a signal to this job reaches it
  local command=("$torchrun" --nnodes="$nodes" --node_rank="$1" --nproc_per_node="$nproc"
    --master_addr="$master" --master_port="$port" train_ddp.py "${arguments[@]}")
  if [ "${#hosts[@]}" -eq 0 ]; then
    # Two "nodes" on one machine must not take the same GPUs: NCCL refuses that.
    local IFS=,
    if [ "${#gpus[@]}" -ge $((nodes * nproc)) ]; then
      export CUDA_VISIBLE_DEVICES="${gpus[*]:$1*nproc:nproc}"
    elif [ "${#gpus[@]}" -gt 0 ]; then
      export WORKSHOP_MODE=smoke
    fi
    exec "${command[@]}"
  else
    # %q quotes each word for the other shell; with -tt, what runs there ends with ssh.
    exec ssh -ttn -o BatchMode=yes "${hosts[$1]}" \
      "cd $(printf '%q' "${REMOTE_DIR:-$PWD}") && PATH=\"\$PWD/../.venv/bin:\$PATH\" env $(printf '%q ' "${passed_on[@]}" "${command[@]}")"
  fi
}

arguments=("$@")
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
passed_on=() # ssh itself passes no variable on
for name in OMP_NUM_THREADS TORCH_DISABLE_SHARE_RDZV_TCP_STORE GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME WORKSHOP_MODE WORKSHOP_STORAGE; do
  [ -z "${!name:-}" ] || passed_on+=("$name=${!name}")
done
pids=()
for ((node = 0; node < nodes; node++)); do
  launch "$node" &
  pids+=($!)
done
trap 'kill "${pids[@]}" 2>/dev/null' INT TERM

# A node that fails leaves the others waiting for it: end them with it.
status=0
for ((node = 0; node < nodes; node++)); do
  wait -n || { status=$?; kill "${pids[@]}" 2>/dev/null || true; }
done
exit "$status"
