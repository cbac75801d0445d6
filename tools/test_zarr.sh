#!/bin/sh
# Tests of Zarr stores and codecs under the newest zarr, which wants a newer Python than kvmnn does (make test-zarr):
# make test has the zarr that pip finds for its own Python.
#
# Usage: tools/test_zarr.sh [PYTHON ...]    default: those of python3.12, python3.13 and python3.14 that run
# A virtual environment for each in build/zarr. Exit: 0 all passed, 1 something failed, 3 no such Python.
set -eu
cd "$(dirname "$0")/.."

WORK=$PWD/build/zarr
if [ $# = 0 ]; then
    for name in python3.12 python3.13 python3.14; do
        ! "$name" -c 'import sys, venv' 2>/dev/null || set -- "$@" "$name"
    done
fi
if [ $# = 0 ]; then
    echo "test-zarr: none of python3.12 to python3.14 is there: name one" >&2
    exit 3
fi

for python in "$@"; do
    venv=$WORK/$(basename "$python")
    [ -e "$venv/bin/python" ] || "$python" -m venv "$venv"
    echo "test-zarr: building kvmnn for $("$venv/bin/python" --version), about a minute"
    rm -rf build/lib* build/bdist*
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade '.[zarr]' pytest hypothesis xarray \
        'dask[array]'
    "$venv/bin/python" -P -c 'import numcodecs, zarr; print(f"test-zarr: zarr {zarr.__version__}, numcodecs {numcodecs.__version__}")'
    # The script, not `python -m pytest`: that would import the checkout's kvmnn/, which has no compiled modules.
    "$venv/bin/pytest" -p no:cacheprovider tests/integrations tests/formats/zarr
    "$venv/bin/pytest" -p no:cacheprovider tests/cli/test_measure.py tests/attacks/test_damaged_files.py -k zarr
done
