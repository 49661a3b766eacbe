#!/usr/bin/env bash
# Everything that needs a GPU, in one run: the tests marked `gpu`, then, with --all, the whole suite
# on this machine's versions.  Writes the machine, the versions and the counts to
# benchmarks/results/gpu.json, or to the file named by GPU_JSON.
#
#   scripts/gpu.sh [--all] [pytest arguments]
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${GPU_JSON:-benchmarks/results/gpu.json}
select=(-m gpu)
if [ "${1:-}" = --all ]; then select=(-m "not slow") && shift; fi
log=$(mktemp)
"$python" -m pytest -q -p no:cacheprovider "${select[@]}" "$@" | tee "$log"
status=${PIPESTATUS[0]}
"$python" - "$log" "$status" "$out" <<'PY'
import datetime, json, platform, re, subprocess, sys
import torch

log, status, out = open(sys.argv[1]).read(), int(sys.argv[2]), sys.argv[3]
versions = {"python": platform.python_version(), "torch": torch.__version__}
for name in ("triton", "transformers", "numpy", "lmdb"):
    try:
        versions[name] = __import__(name).__version__
    except (ImportError, AttributeError):
        versions[name] = None
git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|error)", log)}
meta = {
    "git": git.stdout.strip() or None,
    "date": datetime.date.today().isoformat(),
    "device": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    "versions": versions,
}
failed = re.findall(r"^(?:FAILED|ERROR) (.+)$", log, re.M)
with open(out, "w") as file:
    json.dump({"meta": meta, "status": status, "counts": counts, "failed": failed}, file, indent=1)
    file.write("\n")
print(json.dumps({"meta": meta, "counts": counts}))
PY
exit "$status"
