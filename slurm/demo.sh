#!/usr/bin/env bash
# The main job from nothing: a real Slurm with shaped NICs on this machine, one GPT over two and then three NIC kinds in
# one heterogeneous job each, and the report. `make demo` runs it; every line is a command that works by hand as well.
set -euo pipefail
cd "$(dirname "$0")/.."
RUNS=${HOLMES_RUNS:-runs}
DATA=runs/demo-data/stdlib
TRAIN=(train.steps=20 train.pace_layer_ms=10 data=indexed data.prefix="$DATA" plan.schedule=1f1b)

say() { printf '\n== %s\n' "$*"; }

say "data: the Python standard library's own source files, as bytes"
[ -e "$DATA.idx" ] || holmes data prepare --stdlib -o "$DATA"

say "testbed: 4 InfiniBand, 4 RoCE and 2 Ethernet-only nodes"
was_up=$(holmes testbed status >/dev/null 2>&1 && echo yes || echo no)
trap '[ "$was_up" = yes ] || holmes testbed down' EXIT
if ! holmes testbed up; then
  trap - EXIT
  echo "So this is not shown: Slurm, heterogeneous jobs, NICs and what they carry. The same training as local processes:"
  holmes run launcher=local name="demo-local-$$" plan.pp=2 plan.dp=2 "${TRAIN[@]}"
  exit
fi
eval "$(holmes testbed env)"
holmes nodes

say "2 InfiniBand + 2 RoCE nodes: two stages, one heterogeneous job of two components"
holmes run name="demo-two-$$" "plan.nodes={ib-a: 2, roce-a: 2}" plan.pp=2 "${TRAIN[@]}"

say "2 InfiniBand + 2 RoCE + 2 Ethernet-only nodes: three stages, three components"
holmes run name="demo-three-$$" "plan.nodes={ib-a: 2, roce-a: 2, eth-a: 2}" plan.pp=3 "${TRAIN[@]}"

say "both side by side"
holmes report "$RUNS/demo-two-$$" "$RUNS/demo-three-$$"
