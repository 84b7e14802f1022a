#!/bin/sh
# Fetches what the image lacks beside its torch, as wheels, and builds this project's own: into build/container-wheels.
# PYTHON_IMAGE: the Python of the base image (3.12). TORCH=1: torch itself as well (for a base without it).
set -eu
cd "$(dirname "$0")/.."
to=build/container-wheels python=${PYTHON:-python3}
pinned() { sed -n "s/^$1==/$1==/p" constraints.txt; }
fetch() {
  "$python" -m pip download -q -d "$to" --find-links "$to" --python-version "${PYTHON_IMAGE:-3.12}" \
    --only-binary=:all: "$@"
}
rm -rf "$to" && mkdir -p "$to"
"$python" -m pip wheel -q --no-deps -w "$to" .
"$python" -m pip wheel -q --no-deps -w "$to" 'antlr4-python3-runtime==4.9.*'  # has no wheel; plain Python
fetch "$(pinned hydra-core)" "$(pinned hydra-submitit-launcher)" "$(pinned submitit)" \
  msgspec numpy psutil pyyaml rich typer
fetch --no-deps "$(pinned megatron-core)" einops
if [ "${TORCH:-}" ]; then fetch "$(pinned torch)"; fi
du -sh "$to"
