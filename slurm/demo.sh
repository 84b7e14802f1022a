#!/usr/bin/env bash
# What the project is for, from nothing, on one machine: a real Slurm with shaped NICs; one GPT over three NIC types in one
# heterogeneous job; then the same model on InfiniBand and RoCE together, on either alone, and by plain Megatron-LM over
# both, in turn. `make demo` runs it; every line is a command that works by hand as well.
set -euo pipefail
cd "$(dirname "$0")/.."
RUNS=${HOLMES_RUNS:-runs}
DATA=runs/demo-data/stdlib
SIDE_BY_SIDE="$RUNS/demo-$$"
TEXT=(data=indexed data.prefix="$DATA" model.vocab=257)
MODEL=(model.layers=18 model.hidden=48 model.ffn=192 model.heads=2 model.kv_heads=2 model.swiglu=false
       model.max_positions=16 batch.sequence_length=16 train.pace_layer_ms=9)

say() { printf '\n== %s\n' "$*"; }

say "data: the Python standard library's own source files, as bytes"
[ -e "$DATA.idx" ] || holmes data prepare --stdlib -o "$DATA"

say "testbed: 4 InfiniBand, 4 RoCE and 2 Ethernet-only nodes"
was_up=$(holmes testbed status >/dev/null 2>&1 && echo yes || echo no)
trap '[ "$was_up" = yes ] || holmes testbed down' EXIT
if ! holmes testbed up demo; then
  trap - EXIT
  echo "So this is not shown: Slurm, heterogeneous jobs, NICs and what they carry. The same training as local processes:"
  holmes run launcher=local name="demo-local-$$" plan.pp=2 plan.dp=2 "${MODEL[@]}" "${TEXT[@]}" train.steps=20
  exit
fi
eval "$(holmes testbed env)"
holmes nodes

say "2 InfiniBand + 2 RoCE + 2 Ethernet-only nodes: three stages, one heterogeneous job of three components"
holmes run name="demo-three-$$" "plan.nodes={ib-a: 2, roce-a: 2, eth-a: 2}" plan.pp=3 "${MODEL[@]}" "${TEXT[@]}" \
  batch.micro_size=7 batch.global_size=168 train.steps=8

say "4 nodes each, in turn: 2 InfiniBand + 2 RoCE; InfiniBand; RoCE; 2 + 2 by plain Megatron-LM"
python benchmarks/evaluation.py --part demo --runs "$SIDE_BY_SIDE" "${TEXT[@]}" train.steps=8 train.lr=0.01

say "side by side"
holmes report "$SIDE_BY_SIDE" --html "$SIDE_BY_SIDE/report.html"
