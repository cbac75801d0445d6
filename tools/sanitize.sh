#!/bin/sh
# Tests of the compiled modules and some minutes of fuzzing under the address and undefined-behaviour
# sanitizers (make sanitize; docs/fuzzing.md tells more).
#
# Usage: tools/sanitize.sh [--selftest-only] [minutes of fuzzing, default 5] [seed]
# PYTHON makes the virtual environment; CC must be GCC (its libasan is loaded before Python's own libraries).
# Everything stays in build/sanitize. Exit: 0 nothing found, 1 something found, 3 no sanitizer library.
set -eu
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
CC=${CC:-gcc}
selftest_only=no
if [ "${1:-}" = --selftest-only ]; then
    selftest_only=yes
    shift
fi
MINUTES=${1:-5}
SEED=${2:-$(date +%s)}
WORK=$PWD/build/sanitize

asan=$($CC -print-file-name=libasan.so)
ubsan=$($CC -print-file-name=libubsan.so)
if [ ! -e "$asan" ] || [ ! -e "$ubsan" ]; then
    echo "sanitize: $CC has no libasan and libubsan" >&2
    exit 3
fi

mkdir -p "$WORK"
echo "sanitize: native self-tests"
for room in frames/lanes packed/layout_kernels; do
    name=${room#*/}
    $CC -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined -std=c11 -Wall -Wextra -Werror \
        -I pyx pyx/kvmnn/$room.c pyx/selftest/$name.c -o "$WORK/selftest_$name"
    "$WORK/selftest_$name"
done
$CC -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined -std=c11 -ffp-contract=off -Wall -Wextra \
    -Werror -I pyx pyx/kvmnn/dense/*.c pyx/selftest/dense.c -o "$WORK/selftest_dense"
"$WORK/selftest_dense"
[ $selftest_only = no ] || exit 0

# A copy of the tree, so that no object file with sanitizers stays where an ordinary build would take it up.
rm -rf "$WORK/src"
mkdir "$WORK/src"
for part in kvmnn pyx tests tools fixtures docs setup.py pyproject.toml MANIFEST.in README.md LICENSE CHANGELOG.md; do
    [ ! -e $part ] || cp -r $part "$WORK/src/"
done
find "$WORK/src/kvmnn" -name '*.so' -delete
[ -e "$WORK/venv/bin/python" ] || "$PYTHON" -m venv "$WORK/venv"
export KVMNN_SANITIZE=1 CC
"$WORK/venv/bin/python" -m pip install -q --disable-pip-version-check --force-reinstall --no-deps "$WORK/src"
"$WORK/venv/bin/python" -m pip install -q --disable-pip-version-check "$WORK/src[test]"

# The sanitizers need their own allocator to see Python's buffers; what CPython never frees is no leak of ours.
export LD_PRELOAD="$asan $ubsan"
export PYTHONMALLOC=malloc
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:detect_stack_use_after_return=1
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1

cd "$WORK/src"
echo "sanitize: tests of the compiled modules"
"$WORK/venv/bin/python" -P -m pytest -s -p no:cacheprovider tests/dense tests/frames tests/linear tests/transform \
    tests/attacks/test_frame_damage.py tests/packed \
    tests/policies tests/_util tests/analysis/test_stream_sizes.py tests/lm/test_model_cache.py \
    tests/attacks/test_fuzz_corpus.py tests/attacks/test_checkpoints.py tests/formats/test_safetensors_header.py \
    tests/formats/llama tests/formats/mlx \
    tests/files tests/runtime/test_asynchronous.py -k "not selftest and not memory_is_bounded"

echo "sanitize: $MINUTES minutes of fuzzing"
"$WORK/venv/bin/python" -P tools/fuzz/run.py --minutes "$MINUTES" --seed "$SEED" --out "$WORK/found"
