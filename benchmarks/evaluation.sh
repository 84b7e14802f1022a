#!/usr/bin/env bash
# Run the evaluation (`make evaluation`): start the testbed's `evaluation` topology, run the jobs, and write a page of
# benchmarks/results/. A restart continues. PART=headline (the default) and four-nodes (a page of its own) take two
# hours at most, pairs and full some hours more.
set -euo pipefail
cd "$(dirname "$0")/.."
export HOLMES_TESTBED=${HOLMES_TESTBED:-/var/lib/holmes-evaluation}
holmes testbed up evaluation
trap 'holmes testbed down' EXIT
eval "$(holmes testbed env)"
page=evaluation-tables
[ "${PART:-}" = four-nodes ] && page=evaluation-four-nodes
python benchmarks/evaluation.py --part "${PART:-headline}" --page "benchmarks/results/$page.md"
