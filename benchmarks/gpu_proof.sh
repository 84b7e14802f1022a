#!/usr/bin/env bash
# Run gpu_proof.py with .venv, or else with the machine's torch and the packages of build/wheels.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
export PYTHONPATH="$PWD:$PWD/tests/support:$PWD/benchmarks"
if [ ! -x "$python" ]; then
  python=${PYTHON:-python3}
  "$python" -c 'import torch' || { echo "gpu-proof: neither .venv nor torch found; run make install" >&2; exit 2; }
  "$python" -m pip install -q --no-index --no-deps --upgrade --target build/gpu-packages build/wheels/*.whl
  PYTHONPATH="$PYTHONPATH:$PWD/build/gpu-packages"
  "$python" -c 'import megatron.core' || { echo "gpu-proof: build/wheels lacks packages; run make gpu-wheels" >&2; exit 2; }
fi
exec "$python" benchmarks/gpu_proof.py "$@"
