#!/bin/sh
# Coverage-guided fuzzing of linear and transform streams with libFuzzer, under the address and undefined-behaviour
# sanitizers: their decoders on anything and on damaged streams, their encoders on anything (docs/fuzzing.md).
#
# Usage: tools/fuzz/profile_streams.sh [minutes, default 5] [target: linear or transform; default: both]
# CLANG names clang with its runtime libraries (Debian: clang libclang-rt-14-dev). Everything stays in
# build/fuzz_profile_streams. Exit: 0 nothing found, 1 something found, 3 no clang.
set -eu
cd "$(dirname "$0")/../.."

MINUTES=${1:-5}
TARGETS=${2:-linear transform}
PYTHON=${PYTHON:-python3}
CLANG=${CLANG:-$(command -v clang-19 || command -v clang || echo none)}
WORK=$PWD/build/fuzz_profile_streams
if ! command -v "$CLANG" >/dev/null; then
    echo "fuzz profile streams: clang is needed" >&2
    exit 3
fi
mkdir -p "$WORK"
"$CLANG" -O2 -gline-tables-only -fsanitize=address,undefined,fuzzer -fno-sanitize-recover=undefined \
    -fno-sanitize-coverage=trace-cmp -ffp-contract=off -I pyx pyx/kvmnn/linear/model.c pyx/kvmnn/transform/transform.c \
    tools/fuzz/profile_streams.c -lm -o "$WORK/fuzz"
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
seconds=$("$PYTHON" -c "print(max(1, int(60 * float('$MINUTES') / $(echo $TARGETS | wc -w))))")
for KVMNN_FUZZ in $TARGETS; do
    export KVMNN_FUZZ
    echo "fuzz profile streams: $KVMNN_FUZZ, $seconds seconds"
    mkdir -p "$WORK/corpus/$KVMNN_FUZZ"
    for length in 30 60 200 400; do
        head -c "$length" /dev/urandom >"$WORK/corpus/$KVMNN_FUZZ/random$length"
    done
    "$WORK/fuzz" -max_total_time="$seconds" -max_len=400 -timeout=20 -rss_limit_mb=2000 -entropic=0 \
        -print_final_stats=1 -artifact_prefix="$WORK/found-$KVMNN_FUZZ-" "$WORK/corpus/$KVMNN_FUZZ" 2>"$WORK/$KVMNN_FUZZ.log" || {
        tail -n 40 "$WORK/$KVMNN_FUZZ.log"
        exit 1
    }
    grep -E 'DONE|stat::number_of_executed_units|stat::decoded_streams' "$WORK/$KVMNN_FUZZ.log"
done
