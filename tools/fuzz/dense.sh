#!/bin/sh
# Coverage-guided fuzzing of dense streams with libFuzzer, under the address and undefined-behaviour sanitizers: their
# decoder on anything, and their encoder on words that must come back (docs/fuzzing.md).
#
# Usage: tools/fuzz/dense.sh [minutes, default 5]
# CLANG names clang with its runtime libraries (19 or newer; Debian: clang-19 libclang-rt-19-dev); PYTHON has kvmnn.
# Everything stays in build/fuzz_dense. Exit: 0 nothing found, 1 something found, 3 no clang.
set -eu
cd "$(dirname "$0")/../.."

MINUTES=${1:-5}
PYTHON=${PYTHON:-python3}
CLANG=${CLANG:-$(command -v clang-19 || command -v clang || echo none)}
WORK=$PWD/build/fuzz_dense
if ! command -v "$CLANG" >/dev/null; then
    echo "fuzz dense: clang is needed" >&2
    exit 3
fi
mkdir -p "$WORK/corpus"
"$CLANG" -O1 -g -fsanitize=address,undefined,fuzzer -fno-sanitize-recover=undefined -ffp-contract=off -I pyx \
    pyx/kvmnn/dense/*.c tools/fuzz/dense.c -o "$WORK/fuzz"
PYTHONPATH=tests/support "$PYTHON" tools/fuzz/dense_inputs.py "$WORK/corpus"
seconds=$("$PYTHON" -c "print(max(1, int(60 * float('$MINUTES'))))")
ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 "$WORK/fuzz" -max_total_time="$seconds" -max_len=2500 \
    -timeout=20 -rss_limit_mb=2000 -print_final_stats=1 -artifact_prefix="$WORK/found-" "$WORK/corpus" 2>"$WORK/log" || {
    tail -n 40 "$WORK/log"
    exit 1
}
grep -E 'DONE|stat::number_of_executed_units' "$WORK/log"
