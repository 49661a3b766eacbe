#!/usr/bin/env bash
# Adapter tests on other versions of transformers, each in a virtual environment of its own.
# Usage: scripts/test_compat.sh PYTHON VERSION...      ("newest" takes whatever pip finds)
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
shift
# The pins of everything but what transformers brings with it.
pins=$(mktemp)
trap 'rm -f "$pins"' EXIT
grep -vE '^(transformers|tokenizers|safetensors|huggingface_hub)==' constraints.txt >"$pins"
failed=()
for version in "$@"; do
    venv=.venv-transformers-$version
    wanted=transformers
    [ "$version" = newest ] || wanted=transformers==$version
    echo "== $wanted"
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    pip=("$venv/bin/python" -m pip install -q -c "$pins")
    "${pip[@]}" pip
    "${pip[@]}" torch numpy
    "${pip[@]}" hatchling editables pytest pytest-timeout pytest-xdist hypothesis
    "${pip[@]}" --upgrade "$wanted"
    "${pip[@]}" --no-build-isolation -e '.[deepseek]'
    "$venv/bin/python" -c 'import transformers; print("transformers", transformers.__version__)'
    OMP_NUM_THREADS=1 "$venv/bin/python" -m pytest -n 2 -q tests/adapter || failed+=("$wanted")
done
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}" >&2; exit 1; }
