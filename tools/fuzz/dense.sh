#!/bin/sh
# Coverage-guided fuzzing of dense streams with libFuzzer, under the address and undefined-behaviour sanitizers: their
# decoder on anything, table sets, and their encoder on words that must come back (docs/fuzzing.md).
#
# Usage: tools/fuzz/dense.sh [minutes, default 5] [target: streams, sets or words; default: all]
# CLANG names clang with its runtime libraries (19 or newer; Debian: clang-19 libclang-rt-19-dev); PYTHON has kvmnn.
# Everything stays in build/fuzz_dense. Exit: 0 nothing found, 1 something found, 3 no clang.
set -eu
cd "$(dirname "$0")/../.."

MINUTES=${1:-5}
TARGETS=${2:-streams sets words}
PYTHON=${PYTHON:-python3}
CLANG=${CLANG:-$(command -v clang-19 || command -v clang || echo none)}
WORK=$PWD/build/fuzz_dense
if ! command -v "$CLANG" >/dev/null; then
    echo "fuzz dense: clang is needed" >&2
    exit 3
fi
mkdir -p "$WORK"
# Without trace-cmp: no value here is worth guessing, and it takes two thirds of the time.
"$CLANG" -O2 -gline-tables-only -fsanitize=address,undefined,fuzzer -fno-sanitize-recover=undefined \
    -fno-sanitize-coverage=trace-cmp -ffp-contract=off -I pyx pyx/kvmnn/dense/*.c tools/fuzz/dense.c -o "$WORK/fuzz"
PYTHONPATH=tests/support "$PYTHON" tools/fuzz/dense_inputs.py "$WORK/corpus"
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
seconds=$("$PYTHON" -c "print(max(1, int(60 * float('$MINUTES') / $(echo $TARGETS | wc -w))))")
for KVMNN_FUZZ in $TARGETS; do
    export KVMNN_FUZZ
    echo "fuzz dense: $KVMNN_FUZZ, $seconds seconds"
    "$WORK/fuzz" -max_total_time="$seconds" -max_len=2500 -timeout=20 -rss_limit_mb=2000 -print_final_stats=1 \
        -artifact_prefix="$WORK/found-$KVMNN_FUZZ-" "$WORK/corpus/$KVMNN_FUZZ" 2>"$WORK/$KVMNN_FUZZ.log" || {
        tail -n 40 "$WORK/$KVMNN_FUZZ.log"
        exit 1
    }
    grep -E 'DONE|stat::number_of_executed_units' "$WORK/$KVMNN_FUZZ.log"
done
