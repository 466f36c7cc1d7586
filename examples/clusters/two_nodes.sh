#!/usr/bin/env bash
# Two machines with 8 GPUs each, NCCL. Run this on both, with the same address and the machine's number:
#   bash two_nodes.sh 10.0.0.1 0      on the machine that has that address
#   bash two_nodes.sh 10.0.0.1 1      on the other
set -euo pipefail

first_machine=$1
node_rank=$2

export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-eth0} # the interface between the machines
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}

exec paceline run \
  --nnodes 2 --node-rank "$node_rank" --nproc-per-node 8 \
  --master-addr "$first_machine" --master-port 29500 \
  train.py --backend nccl
