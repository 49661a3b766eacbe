#!/usr/bin/env bash
# compute-sanitizer over the kernels in triton and gluon: reads and writes out of bounds (memcheck),
# hazards in shared memory (racecheck), barriers that some threads miss (synccheck), reads of what
# nothing has written (initcheck).  All tools at once, each over a part of the GPU tests, for at most
# SECONDS; first the tests alone, so that what is timed is not the compiler.
#
# racecheck is for triton's kernels alone: where a group of warps meets and one thread then arrives
# at an mbarrier for all of them, as all of gluon's kernels do, it takes what they hand over for
# hazards.
#
#     scripts/sanitize.sh [SECONDS] [OUT.json]
#
# Kernels that write out of bounds on purpose must be told, or nothing was looked at.  Exit status 1
# if a tool tells an error, misses one of those, or runs past its time; 0 if all is quiet.
set -u
cd "$(dirname "$0")/.."
seconds=${1:-90}
out=${2:-benchmarks/results/sanitizer.json}
python=${PYTHON:-python3}
[ -x .venv/bin/python ] && python=${PYTHON:-.venv/bin/python}
sanitizer=${SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}
[ -x "$sanitizer" ] || { echo "no compute-sanitizer: set SANITIZER"; exit 2; }
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

conformance=tests/unit/test_kernels_conformance.py
pack=tests/unit/test_triton_pack.py
every='(triton or gluon) and bfloat16-cuda'
shared='bfloat16-cuda and (mla or sparse or index_topk or compress)'
small='one_launch'

test_command() { # files... -- expression
    local files=()
    while [ "$1" != -- ]; do files+=("$1"); shift; done
    echo "$python" -m pytest -q -x -m gpu -p no:cacheprovider -p no:xdist -p no:randomly \
        --timeout=0 -o faulthandler_timeout=0 "${files[@]}" -k
}

"$sanitizer" --version | tail -n 2
$(test_command "$conformance" "$pack" --) "($every) or $small" > "$logs/alone" 2>&1
tail -n 1 "$logs/alone"
grep -Eq '^[0-9]+ passed|[^0-9][0-9]+ passed' "$logs/alone" || { tail -n 40 "$logs/alone"; exit 1; }

sanitized() { # tool, name, command...
    local tool=$1 name=$2 start=$SECONDS
    shift 2
    # Without torch's own allocator every tensor ends where its allocation ends; and what lies
    # behind is not the next one.
    local options=()
    [ "$tool" = memcheck ] && options=(--padding 4096)
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout -k 5 "$seconds" "$sanitizer" --tool "$tool" \
        "${options[@]}" --target-processes all --print-limit 20 --error-exitcode 0 "$@" > "$logs/$name" 2>&1
    echo "$name $tool $? $((SECONDS - start))" >> "$logs/index"
}

sanitized memcheck planted_near "$python" tests/device/planted_fault.py 1 &
sanitized memcheck planted_far "$python" tests/device/planted_fault.py 4000000000 &
sanitized memcheck memcheck $(test_command "$conformance" --) "$every" &
sanitized memcheck memcheck_pack $(test_command "$pack" --) "$small" &
sanitized racecheck racecheck $(test_command "$conformance" --) "triton and $shared" &
sanitized synccheck synccheck $(test_command "$conformance" --) "(triton or gluon) and $shared" &
sanitized initcheck initcheck_pack $(test_command "$pack" --) "$small" &
wait

"$python" - "$logs" "$out" "$sanitizer" <<'PYTHON'
import json, re, subprocess, sys
from pathlib import Path

sys.path.insert(0, ".")
import torch  # so that the device is named

from benchmarks import harness

logs, out, sanitizer = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
version = subprocess.run([sanitizer, "--version"], capture_output=True, text=True).stdout
version = re.search(r"Version (\S+)", version)
runs, bad = [], False
for line in sorted((logs / "index").read_text().splitlines()):
    name, tool, status, seconds = line.split()
    text = (logs / name).read_text(errors="replace")
    found = re.findall(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard", text)
    errors = sum(int(a or b) for a, b in found) if found else None
    passed = re.search(r"(\d+) passed", text)
    run = {
        "name": name,
        "tool": tool,
        "errors": errors,
        "tests": int(passed[1]) if passed else 0,
        "status": int(status),
        "seconds": int(seconds),
    }
    if name.startswith("planted"):
        fine = bool(errors)
    else:
        fine = errors == 0 and status == "0" and passed is not None
    runs.append({**run, "fine": fine})
    bad = bad or not fine
    print(runs[-1])
    if not fine:
        print("\n".join(text.splitlines()[:60]), "...", "\n".join(text.splitlines()[-25:]), sep="\n")
document = {
    "meta": harness.meta(),
    "compute_sanitizer": version[1] if version else "unknown",
    "runs": runs,
    "results": [
        {"name": r["name"], "params": {"tool": r["tool"], "tests": r["tests"]}, "unit": "errors",
         "median": r["errors"], "p10": r["errors"], "p90": r["errors"], "n": 1,
         "baseline": None, "ratio": None}
        for r in runs if r["errors"] is not None
    ],
}
out.parent.mkdir(parents=True, exist_ok=True)
out.write_text(json.dumps(document, indent=1) + "\n")
sys.exit(bad)
PYTHON
