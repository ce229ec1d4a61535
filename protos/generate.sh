#!/usr/bin/env bash
# Generates the Python stubs: generate.sh VENV_BIN GRPC_TOOLS [--check] OUT_DIR. With --check, fails when they are stale.
# GRPC_TOOLS is a folder with grpcio-tools: stubs refuse an older grpcio and protobuf than those of their generator.
set -euo pipefail
bin=$(cd "$1" && pwd); shift
tools=$(cd "$1" && pwd); shift
check=0; if [ "$1" = --check ]; then check=1; shift; fi
out=$(cd "$1" && pwd)
cd "$(dirname "$0")"
target=$out
if [ $check = 1 ]; then target=$(mktemp -d); trap 'rm -rf "$target"' EXIT; fi
mapfile -t files < <(find kvsidecar -name '*.proto' | sort)
PATH="$bin:$PATH" PYTHONPATH="$tools" "$bin/python" -m grpc_tools.protoc -I. \
  --python_out="$target" --grpc_python_out="$target" --mypy_out=quiet:"$target" --mypy_grpc_out=quiet:"$target" \
  "${files[@]}"
# A service-less file yields an empty stub; drop it.
find "$target" -name '*_pb2_grpc.py*' | while read -r f; do grep -q 'Stub' "$f" || rm "$f"; done
find "$target/kvsidecar" -type d \( -path '*/cache*' -o -path '*/inference*' \) -not -name __pycache__ -exec touch {}/__init__.py \;
if [ $check = 1 ]; then
  for f in $(cd "$target" && find . -name '*_pb2*'); do
    cmp -s "$target/$f" "$out/$f" || { echo "stale stub: $f (run 'make protos')" >&2; exit 1; }
  done
  echo "stubs are current"
fi
