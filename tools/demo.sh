#!/bin/sh
# The main job on the real sample that ships with the project: what `make demo` runs.
set -eu
sample="$(cd "$(dirname "$0")/.." && pwd)/fixtures/kv_real"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
cp "$sample/k_fp16.npy" "$sample/v_fp16.npy" "$work"
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
run kvmnn bench k_fp16.npy v_fp16.npy --rounds 5
