#!/bin/sh
# Coverage-guided fuzzing of the compiled decoders with libFuzzer, under the address and undefined-behaviour sanitizers
# (make fuzz; docs/fuzzing.md tells more).
#
# Usage: tools/fuzz/guided.sh [minutes, default 5] [target: frames, streams, writer, pickles or headers; default: all]
# CLANG names clang with its runtime libraries (19 or newer; Debian: clang-19 libclang-rt-19-dev); PYTHON has kvmnn and Cython.
# Everything stays in build/guided. Exit: 0 nothing found, 1 something found, 3 no clang, Cython or libpython.
set -eu
cd "$(dirname "$0")/../.."

MINUTES=${1:-5}
TARGETS=${2:-frames streams writer pickles headers}
PYTHON=${PYTHON:-python3}
CLANG=${CLANG:-$(command -v clang-19 || command -v clang || echo none)}
WORK=$PWD/build/guided
MODULES="_simd files/_file_mapping frames/_content_hashes frames/_decoder frames/_encoder frames/_fast_encoder frames/_fast_lane frames/_hashing frames/_output_buffer frames/_streams frames/_workspace frames/_zstdlib
    formats/_safetensors_header formats/torch/_opcodes formats/torch/_pickles packed/_layout"

config() { "$PYTHON" -c "import sysconfig; print(sysconfig.get_config_var('$1'))"; }
include=$("$PYTHON" -c "import sysconfig; print(sysconfig.get_paths()['include'])")
if ! command -v "$CLANG" >/dev/null || ! "$PYTHON" -c 'import Cython, numpy, zstandard' 2>/dev/null ||
    [ ! -e "$include/Python.h" ]; then
    echo "guided: clang, Cython, numpy, zstandard and Python's headers are needed" >&2
    exit 3
fi

# A copy of the package, into which the modules under test are compiled with counters; the others are those installed.
rm -rf "$WORK/src"
mkdir -p "$WORK/src" "$WORK/made"
cp -r kvmnn "$WORK/src/"
find "$WORK/src/kvmnn" -name '*.so' -delete
installed=$(cd / && "$PYTHON" -c 'import kvmnn; print(kvmnn.__path__[0])')
(cd "$installed" && find . -name '*.so' -exec cp --parents {} "$WORK/src/kvmnn" \;)
suffix=$(config EXT_SUFFIX)
counters=inline-8bit-counters,pc-table,indirect-calls,trace-cmp
for module in $MODULES; do
    name=$WORK/made/$(echo "$module" | tr / .)
    if [ ! -e "$name.so" ] || [ -n "$(find pyx tools/fuzz/guided.sh -newer "$name.so" -type f)" ]; then
        echo "guided: building kvmnn/$module"
        "$PYTHON" -m cython -3 -I pyx -X boundscheck=False,wraparound=False,initializedcheck=False,nonecheck=False \
            -X cdivision=True --module-name "kvmnn.$(echo "$module" | tr / .)" "pyx/kvmnn/$module.pyx" -o "$name.c"
        more= level=-O1
        checks="-fsanitize=address,undefined -fno-sanitize-recover=undefined -fsanitize-coverage=$counters"
        case $module in _simd | files/_file_mapping | frames/_encoder | frames/_hashing | packed/_layout) checks= ;; esac
        case $module in
        frames/_fast_lane)
            for part in zstd_writer huffman fse match_finder sample_stats; do more="$more pyx/kvmnn/frames/$part.c"; done
            level="-O2 -DKVMNN_ZSTD_BLOCK_BYTES=4608 -fno-sanitize-coverage=trace-cmp" # no value here is worth guessing
            ;;
        frames/_streams) more=pyx/kvmnn/frames/lanes.c ;;
        packed/_layout) more="pyx/kvmnn/packed/layout_kernels.c pyx/kvmnn/packed/quantize.c" ;;
        esac
        "$CLANG" $level -gline-tables-only -ffp-contract=off $checks -Wno-everything -fPIC -shared -I "$include" -I pyx -I "pyx/kvmnn/$(dirname "$module")" \
            "$name.c" $more -o "$name.so"
    fi
    rm -f "$WORK/src/kvmnn/$module".*.so
    cp "$name.so" "$WORK/src/kvmnn/$module$suffix"
done
"$CLANG" -O1 -g -fsanitize=address,undefined,fuzzer -Wl,--export-dynamic -I "$include" tools/fuzz/guided.c \
    -L "$(config LIBDIR)" -Wl,-rpath,"$(config LIBDIR)" "-lpython$(config LDVERSION)" -o "$WORK/fuzz"

path=$WORK/src:$PWD/tools/fuzz:$PWD/tests/support:$("$PYTHON" -c 'import sys; print(":".join(filter(None, sys.path)))')
home=$("$PYTHON" -c 'import sys; print(sys.base_prefix)')
export PYTHONDONTWRITEBYTECODE=1
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
seconds=$("$PYTHON" -c "print(max(1, int(60 * float('$MINUTES') / $(echo $TARGETS | wc -w))))")
for KVMNN_FUZZ in $TARGETS; do
    export KVMNN_FUZZ
    echo "guided: $KVMNN_FUZZ, $seconds seconds"
    "$PYTHON" tools/fuzz/fuzz_inputs.py unpack "$KVMNN_FUZZ" "$WORK/corpus/$KVMNN_FUZZ"
    PYTHONPATH=$path PYTHONHOME=$home "$WORK/fuzz" -max_total_time="$seconds" -max_len=600 -timeout=20 -rss_limit_mb=2000 -print_final_stats=1 \
        -artifact_prefix="$WORK/found-$KVMNN_FUZZ-" "$WORK/corpus/$KVMNN_FUZZ" 2>"$WORK/$KVMNN_FUZZ.log" || {
        tail -n 40 "$WORK/$KVMNN_FUZZ.log"
        exit 1
    }
    grep -E 'DONE|stat::number_of_executed_units' "$WORK/$KVMNN_FUZZ.log"
done
