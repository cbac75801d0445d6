#!/bin/sh
# The compiled code on ARM, under qemu-user (make test-aarch64):
#   1. the C files: cross-compiled with all warnings as errors, and its self-tests run;
#   2. every Cython module: cross-compiled, and the codec's tests and vectors run by an aarch64 Python.
#
# Usage: tools/test_aarch64.sh [--selftest-only] [folders with vectors for tools/conformance.py ...]
# PYTHON (3.11 or newer, with pip; Cython and setuptools come into build/aarch64 where it lacks them) writes the C files
# and fetches wheels; what is downloaded stays in build/aarch64. DEBIAN_MIRROR names another mirror.
# Exit: 0 all passed, 1 something failed, 3 tools are missing.
set -eu
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
WORK=$PWD/build/aarch64
ROOT=$WORK/root
SITE=$WORK/site
CC=aarch64-linux-gnu-gcc
PACKAGES="gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"
ARM=3.11 # the Python of Debian 12

selftest_only=no
if [ "${1:-}" = --selftest-only ]; then
    selftest_only=yes
    shift
fi

vectors=
for folder in "$@"; do
    vectors="$vectors $(realpath "$folder")"
done

# -- tools ----------------------------------------------------------------------------------------------------------

missing() {
    for tool in $CC qemu-aarch64; do
        command -v $tool >/dev/null || return 0
    done
    [ ! -e /usr/aarch64-linux-gnu/lib/libc.so.6 ]
}

if missing && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing $PACKAGES"
    { apt-get update && apt-get install -y --no-install-recommends $PACKAGES; } >/dev/null 2>&1 || true
fi
if missing; then
    echo "test_aarch64: needs the packages $PACKAGES (Debian's names); install them and run this again" >&2
    exit 3
fi
mkdir -p "$WORK"

# -- 1. the native loops --------------------------------------------------------------------------------------------

for room in frames/lanes packed/layout_kernels; do
    name=${room#*/}
    $CC -O3 -std=c11 -Wall -Wextra -Werror -I pyx pyx/kvmnn/$room.c pyx/selftest/$name.c -o "$WORK/selftest_$name"
    qemu-aarch64 -L /usr/aarch64-linux-gnu "$WORK/selftest_$name"
done
# Dense streams must have the same bytes here and there: the self-test's line has a hash of all of them.
flags="-O3 -std=c11 -ffp-contract=off -Wall -Wextra -Werror -I pyx pyx/kvmnn/dense/*.c pyx/selftest/dense.c"
$CC $flags -o "$WORK/selftest_dense"
${HOST_CC:-cc} $flags -o "$WORK/selftest_dense_here"
there=$(qemu-aarch64 -L /usr/aarch64-linux-gnu "$WORK/selftest_dense")
echo "$there"
here=$("$WORK/selftest_dense_here")
if [ "$there" != "$here" ]; then
    echo "test_aarch64: other dense streams on this machine: $here" >&2
    exit 1
fi
# So must linear and transform streams, of all SIMD levels here, and verdicts on damaged ones.
flags="-O3 -std=gnu11 -ffp-contract=off -DKVMNN_PRINT_HASH -I pyx pyx/kvmnn/linear/model.c pyx/kvmnn/transform/transform.c
    tools/fuzz/profile_streams.c -lm"
$CC $flags -o "$WORK/profile_streams"
${HOST_CC:-cc} $flags -o "$WORK/profile_streams_here"
for target in linear transform; do
    there=$(KVMNN_FUZZ=$target qemu-aarch64 -L /usr/aarch64-linux-gnu "$WORK/profile_streams" 2>/dev/null)
    echo "$there"
    here=$(KVMNN_FUZZ=$target "$WORK/profile_streams_here" 2>/dev/null)
    if [ "$there" != "$here" ]; then
        echo "test_aarch64: others on this machine: $here" >&2
        exit 1
    fi
done
[ $selftest_only = no ] || exit 0

# -- 2. an aarch64 Python in a folder of its own ----------------------------------------------------------------------

private_apt() {
    apt-get -q -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State="$WORK/apt/state" \
        -o Dir::State::status="$WORK/apt/status" -o Dir::Cache="$WORK/apt/cache" -o APT::Sandbox::User=root \
        -o Dir::Etc::sourcelist="$WORK/apt/sources.list" -o Dir::Etc::sourceparts=/dev/null "$@"
}

if [ ! -e "$ROOT/.complete" ]; then
    echo "fetching an aarch64 Python $ARM (Debian 12 packages, unpacked into build/aarch64)"
    rm -rf "$ROOT" "$WORK/apt"
    mkdir -p "$ROOT" "$WORK/apt/state/lists/partial" "$WORK/apt/cache/archives/partial" "$WORK/apt/debs"
    : >"$WORK/apt/status"
    mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror bookworm main" >"$WORK/apt/sources.list"
    private_apt update >"$WORK/apt/log" 2>&1
    (cd "$WORK/apt/debs" && private_apt download python$ARM-minimal libpython$ARM-minimal libpython$ARM-stdlib \
        libpython$ARM-dev libc6 libgcc-s1 libstdc++6 zlib1g libexpat1 libffi8 libbz2-1.0 liblzma5 libssl3 libuuid1 \
        libsqlite3-0 >>"$WORK/apt/log" 2>&1)
    for deb in "$WORK"/apt/debs/*.deb; do
        dpkg-deb -x "$deb" "$ROOT"
    done
    touch "$ROOT/.complete"
fi

if [ ! -e "$SITE/.complete" ]; then
    echo "fetching aarch64 wheels"
    rm -rf "$SITE"
    "$PYTHON" -m pip install -q --disable-pip-version-check --target "$SITE" --only-binary=:all: \
        --python-version $ARM --implementation cp --platform manylinux2014_aarch64 --platform manylinux_2_28_aarch64 \
        "numpy<2.4" "zstandard>=0.22,<0.24" "tqdm>=4.60" "pytest>=8" "hypothesis>=6.100"
    touch "$SITE/.complete"
fi

if ! "$PYTHON" -c "import Cython, setuptools" 2>/dev/null; then
    [ -e "$WORK/venv/bin/python" ] || "$PYTHON" -m venv "$WORK/venv"
    PYTHON=$WORK/venv/bin/python
    "$PYTHON" -m pip install -q --disable-pip-version-check "Cython>=3.3,<4" "setuptools>=77"
fi

# -- 3. kvmnn for it --------------------------------------------------------------------------------------------------

echo "cross-compiling the Cython modules"
"$PYTHON" -c "
import runpy, setuptools
def note(ext_modules, **_):  # setup.py then stops at writing the C files
    with open('$WORK/modules', 'w') as file:
        for module in ext_modules:
            print(module.name, *module.sources, file=file)
setuptools.setup = note
runpy.run_path('setup.py')
" >"$WORK/cython.log" 2>&1 || { cat "$WORK/cython.log"; exit 1; }
rm -rf "$SITE/kvmnn" "$SITE"/kvmnn-*.dist-info
cp -r kvmnn "$SITE/kvmnn"
find "$SITE/kvmnn" -name '*.so' -delete
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
mkdir "$SITE/kvmnn-$version.dist-info"
printf 'Metadata-Version: 2.1\nName: kvmnn\nVersion: %s\n' "$version" >"$SITE/kvmnn-$version.dist-info/METADATA"
while read -r name sources; do
    target=$SITE/$(echo "$name" | tr . /).abi3.so
    $CC -shared -fPIC -O3 -ffp-contract=off -fvisibility=hidden -Wall -Wno-unused-function -Wno-discarded-qualifiers \
        -DPy_LIMITED_API=0x030B0000 -I pyx -isystem "$ROOT/usr/include/python$ARM" -isystem "$ROOT/usr/include" \
        $sources -o "$target"
done <"$WORK/modules"

# Beside the x86 package in the working directory Python would take that one, so the rest happens elsewhere.
rm -rf "$WORK/run"
mkdir "$WORK/run"
cp -r tests tools fixtures docs pyproject.toml "$WORK/run"
cd "$WORK/run"

# Without SVE: under that of qemu 7.2 numpy's products of float32 matrices (OpenBLAS) are wrong or NaN.
arm_python() {
    PYTHONPATH="$SITE" PYTHONDONTWRITEBYTECODE=1 QEMU_LD_PREFIX="$ROOT" qemu-aarch64 -cpu max,sve=off "$ROOT/usr/bin/python$ARM" "$@"
}

arm_python -c "
import platform, numpy, kvmnn
from kvmnn import _simd
from kvmnn.frames import zstd
print('aarch64 Python:', platform.machine(), platform.python_version(), 'numpy', numpy.__version__,
      'libzstd', zstd.get_version(), zstd.get_binding(), 'lanes', *_simd.simd_levels())
assert platform.machine() == 'aarch64'"

# What starts other processes is left out: they would be aarch64 programs that only qemu can start.
arm_python -m pytest -q -p no:cacheprovider tests/frames tests/attacks/test_frame_damage.py \
    tests/dense/test_tables.py tests/linear tests/transform tests/packed/test_layout.py tests/packed/test_cache.py tests/policies/test_topk.py tests/policies/test_rules.py \
    -k "not binding and not alone_is_bound and not same_frames and not environment and not selftest and not native"
[ -n "$vectors" ] || vectors="fixtures/dense fixtures/frames fixtures/layout fixtures/profiles fixtures/real_kv"
arm_python tools/conformance.py $vectors
