#!/usr/bin/env bash
# The evaluation from nothing: the testbed's `evaluation` topology, the runs, benchmarks/results/evaluation-tables.md. `make evaluation`
# runs it; started again it goes on where it was. PART=headline or four-nodes (its own page; two hours at most either),
# pairs or full (some hours more).
set -euo pipefail
cd "$(dirname "$0")/.."
export HOLMES_TESTBED=${HOLMES_TESTBED:-/var/lib/holmes-evaluation}
holmes testbed up evaluation
trap 'holmes testbed down' EXIT
eval "$(holmes testbed env)"
page=evaluation-tables
[ "${PART:-}" = four-nodes ] && page=evaluation-four-nodes
python benchmarks/evaluation.py --part "${PART:-headline}" --page "benchmarks/results/$page.md"
