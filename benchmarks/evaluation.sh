#!/usr/bin/env bash
# The evaluation from nothing: starts the testbed's `evaluation` topology, makes the runs, and writes a page of
# benchmarks/results/. `make evaluation` runs it; started again it continues. PART=headline (the default) or four-nodes
# (its own page) take two hours at most, pairs and full some hours more.
set -euo pipefail
cd "$(dirname "$0")/.."
export HOLMES_TESTBED=${HOLMES_TESTBED:-/var/lib/holmes-evaluation}
holmes testbed up evaluation
trap 'holmes testbed down' EXIT
eval "$(holmes testbed env)"
page=evaluation-tables
[ "${PART:-}" = four-nodes ] && page=evaluation-four-nodes
python benchmarks/evaluation.py --part "${PART:-headline}" --page "benchmarks/results/$page.md"
