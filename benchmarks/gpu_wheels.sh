#!/usr/bin/env bash
# Download the packages that `make gpu-proof` needs besides torch, in the versions of .venv, as wheels for a Python
# version (argument, default 3.12), into build/wheels.
set -euo pipefail
cd "$(dirname "$0")/.."
version=${1:-3.12}
packages=(megatron-core hydra-core omegaconf antlr4-python3-runtime submitit hydra-submitit-launcher cloudpickle msgspec
          pyyaml einops safetensors psutil rich markdown-it-py mdurl pygments typer annotated-doc click shellingham jinja2 markupsafe packaging
          typing-extensions pytest pytest-timeout iniconfig pluggy hypothesis sortedcontainers)
mkdir -p build/wheels
for package in "${packages[@]}"; do
  pinned=$package==$(.venv/bin/python -c 'import sys; from importlib.metadata import version as v; print(v(sys.argv[1]))' "$package")
  echo "$pinned"
  "${PYTHON:-python3}" -m pip download -q --no-deps --only-binary=:all: --python-version "$version" \
      --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --platform any -d build/wheels "$pinned" ||
    "${PYTHON:-python3}" -m pip wheel -q --no-deps -w build/wheels "$pinned"  # build the wheel if there is none
done
du -sh build/wheels
