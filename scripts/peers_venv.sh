#!/usr/bin/env bash
# Build a virtual environment in which the peers' control planes import on a machine without a GPU.
# Usage: scripts/peers_venv.sh DIRECTORY      then: make bench ARGS="core --peers DIRECTORY/bin/python"
#
# Their wheels pin CUDA builds of half the ecosystem, so they go in without dependencies, followed
# by the pure-Python packages that the modules used here import.
set -euo pipefail
[ $# -eq 1 ] || { echo "usage: $0 DIRECTORY" >&2; exit 2; }
venv=$1
python=${PYTHON:-$(command -v python3.11 || command -v python3)}
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip install -q)
"${pip[@]}" torch==2.13.0 numpy
"${pip[@]}" --no-deps sglang==0.5.23 vllm==0.33.0 transformers==5.24.0 torchvision==0.28.0 \
    compressed_tensors openai_harmony xgrammar llguidance
# pip reports the dependencies left out above as conflicts; they are meant.
"${pip[@]}" orjson numba psutil pyzmq requests tqdm ipython pydantic aiohttp regex huggingface_hub \
    safetensors tokenizers typer dill apache-tvm-ffi==0.1.11 sentencepiece gguf openai \
    partial_json_parser msgspec pillow pybase64 setproctitle cachetools blake3 prometheus_client \
    py-cpuinfo einops python-multipart uvicorn uvloop fastapi cbor2 cloudpickle xxhash triton loguru
cd "$(dirname "$0")/.."
for peer in sglang_tree vllm_pool; do
    if "$venv/bin/python" -c "import benchmarks.peers.$peer"; then
        echo "$peer: ready"
    else
        echo "$peer: does not import here" >&2
    fi
done
