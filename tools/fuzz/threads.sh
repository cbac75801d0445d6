#!/bin/sh
# The frame codec's modules under GCC's thread sanitizer, with many threads at work, those of the lossless runtime too
# (docs/fuzzing.md).
#
# Usage: tools/fuzz/threads.sh
# PYTHON has kvmnn, Cython and numpy; CC must be GCC. Everything stays in build/threads.
# Exit: 0 nothing found, 1 a race, or the race that is made on purpose went unseen, 3 no sanitizer library.
set -eu
cd "$(dirname "$0")/../.."

PYTHON=${PYTHON:-python3}
CC=${CC:-gcc}
WORK=$PWD/build/threads
tsan=$($CC -print-file-name=libtsan.so)
if [ ! -e "$tsan" ]; then
    echo "threads: $CC has no libtsan" >&2
    exit 3
fi
include=$("$PYTHON" -c "import sysconfig; print(sysconfig.get_paths()['include'])")
suffix=$("$PYTHON" -c "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))")
installed=$(cd / && "$PYTHON" -c "import os, kvmnn; print(os.path.dirname(kvmnn.__file__))")
rm -rf "$WORK"
mkdir -p "$WORK/src"
cp -r "$installed" "$WORK/src/kvmnn"
for name in _simd frames._content_hashes frames._decoder frames._encoder frames._fast_encoder frames._fast_lane frames._hashing \
    frames._output_buffer frames._streams frames._workspace frames._zstdlib; do
    module=$(echo "$name" | tr . /)
    echo "threads: building kvmnn/$module"
    rm -f "$WORK/src/kvmnn/$module".*.so
    "$PYTHON" -m cython -3 -I pyx -X boundscheck=False,wraparound=False,initializedcheck=False,nonecheck=False \
        -X cdivision=True --module-name "kvmnn.$name" "pyx/kvmnn/$module.pyx" -o "$WORK/$name.c"
    more=
    case $name in
    frames._streams) more=pyx/kvmnn/frames/lanes.c ;;
    frames._fast_lane) for part in zstd_writer huffman fse match_finder sample_stats; do more="$more pyx/kvmnn/frames/$part.c"; done ;;
    esac
    $CC -O1 -g1 -fsanitize=thread -ffp-contract=off -w -fPIC -shared -I "$include" -I pyx "$WORK/$name.c" $more \
        -o "$WORK/src/kvmnn/$module$suffix"
done

export PYTHONPATH="$WORK/src" PYTHONMALLOC=malloc PYTHONDONTWRITEBYTECODE=1
export TSAN_OPTIONS="exitcode=66 report_signal_unsafe=0"
LD_PRELOAD=$tsan "$PYTHON" -P tools/fuzz/threads.py || exit 1
LD_PRELOAD=$tsan "$PYTHON" -P tools/fuzz/threads.py --race 2>"$WORK/race.log" && exit 1
grep -q "ThreadSanitizer: data race" "$WORK/race.log" || exit 1
echo "threads: no race, but the one made on purpose"
