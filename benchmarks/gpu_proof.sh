#!/usr/bin/env bash
# Run gpu_proof.py with .venv, or else with a new venv over the machine's torch and build/wheels.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
if [ ! -x "$python" ]; then
  "${PYTHON:-python3}" -c 'import torch' || { echo "gpu-proof: neither .venv nor torch found; run make install" >&2; exit 2; }
  "${PYTHON:-python3}" -m venv --system-site-packages build/gpu-venv
  python=build/gpu-venv/bin/python
  "$python" -m pip install -q --no-index --no-deps --find-links build/wheels build/wheels/*.whl
  "$python" -c 'import torch, megatron.core' || { echo "gpu-proof: torch itself is in a venv, or build/wheels lacks packages; run make install" >&2; exit 2; }
fi
export PYTHONPATH="$PWD:$PWD/tests/support:$PWD/benchmarks"
exec "$python" benchmarks/gpu_proof.py "$@"
