#!/bin/sh
# The codec's tests and some minutes of fuzzing with the compiled modules under the address and undefined-behaviour
# sanitizers (make sanitize; docs/fuzzing.md tells more).
#
# Usage: tools/sanitize.sh [minutes of fuzzing, default 5] [seed]
# PYTHON makes the virtual environment; CC must be GCC (its libasan is loaded before Python's own libraries).
# Everything stays in build/sanitize. Exit: 0 nothing found, 1 something found, 3 no sanitizer library.
set -eu
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
CC=${CC:-gcc}
MINUTES=${1:-5}
SEED=${2:-$(date +%s)}
WORK=$PWD/build/sanitize

asan=$($CC -print-file-name=libasan.so)
ubsan=$($CC -print-file-name=libubsan.so)
if [ ! -e "$asan" ] || [ ! -e "$ubsan" ]; then
    echo "sanitize: $CC has no libasan and libubsan" >&2
    exit 3
fi

# A copy of the tree, so that no object file with sanitizers stays where an ordinary build would take it up.
mkdir -p "$WORK"
rm -rf "$WORK/src"
mkdir "$WORK/src"
for part in kvmnn pyx tests tools fixtures docs setup.py pyproject.toml MANIFEST.in README.md LICENSE CHANGELOG.md; do
    [ ! -e $part ] || cp -r $part "$WORK/src/"
done
rm -f "$WORK"/src/kvmnn/*.so "$WORK"/src/pyx/*.c
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
echo "sanitize: native self-test"
LD_PRELOAD='' $CC -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined -std=c11 -Wall -Wextra -Werror \
    pyx/native/lanes.c pyx/native/selftest.c -o "$WORK/selftest"
LD_PRELOAD='' "$WORK/selftest"
LD_PRELOAD='' $CC -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined -std=c11 -Wall -Wextra -Werror \
    pyx/native/packing.c pyx/native/selftest_packing.c -o "$WORK/selftest_packing"
LD_PRELOAD='' "$WORK/selftest_packing"

echo "sanitize: tests of the compiled modules"
tests=
for name in block damage frame frame_values hash inspect layout many packed_cache policies policies_ranking predictors rle simd threads zstd; do
    [ ! -e tests/test_$name.py ] || tests="$tests tests/test_$name.py"
done
"$WORK/venv/bin/python" -P -m pytest -s -p no:cacheprovider $tests tests/lm/test_model_cache.py -k "not selftest"

echo "sanitize: $MINUTES minutes of fuzzing"
"$WORK/venv/bin/python" -P tools/fuzz.py --minutes "$MINUTES" --seed "$SEED" --out "$WORK/found"
