"""Build of the compiled modules: pyx/ is a source root, so pyx/kvmnn/frames/_streams.pyx becomes kvmnn.frames._streams.

What Cython puts into every module that has memoryviews is compiled once, as kvmnn._shared: it was two thirds of the
time and of the bytes.

Environment: KVMNN_DEBUG=1 turns Cython's bounds and overflow checks on; KVMNN_SANITIZE=1 builds with the address and
undefined-behaviour sanitizers (see docs/fuzzing.md).
"""

import multiprocessing
import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# The compiled modules keep to the limited API, so that one wheel serves every CPython from 3.11 on. It costs nothing:
# they work on buffers without Python objects, and bytes objects are made when their length is known. Cython's support
# for memoryviews is one module of its own, `kvmnn._shared`.

DEBUG = os.environ.get("KVMNN_DEBUG") == "1"
SANITIZE = os.environ.get("KVMNN_SANITIZE") == "1"

DIRECTIVES = {
    "language_level": 3,
    "boundscheck": DEBUG,
    "wraparound": False,
    "initializedcheck": DEBUG,
    "nonecheck": DEBUG,
    "cdivision": True,
    "embedsignature": True,
    "freethreading_compatible": True,
}

if sys.platform == "win32":
    COMPILE, LINK = ["/O2", "/fp:precise"], []
else:
    COMPILE = ["-O3", "-g0", "-ffp-contract=off", "-fvisibility=hidden", "-Wno-unused-function"]
    LINK = ["-Wl,-s"] if sys.platform == "linux" else []
if SANITIZE:
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g"]
    COMPILE, LINK = COMPILE + flags, flags

LIMITED_API = sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
"""One build for CPython 3.11 and all that come after it (abi3); a free-threaded Python has no such API yet."""

CORES = os.cpu_count() or 1
ROOT = Path("pyx")
NATIVE = {
    "kvmnn.dense._stream": [
        *("context_clusters.c", "decoder.c", "encoder.c", "frequency_tables.c", "header_fields.c", "rans.c"),
        *("reference_search.c", "residuals.c", "row_match.c", "shared_tables.c", "stream.c", "xxh64.c"),
    ],
    "kvmnn.formats.llama._blocks": ["blocks.c"],
    "kvmnn.formats.mlx._groups": ["groups.c"],
    "kvmnn.frames._fast_lane": ["zstd_writer.c", "huffman.c", "fse.c", "match_finder.c", "sample_stats.c"],
    "kvmnn.frames._streams": ["lanes.c"],
    "kvmnn.linear._coder": ["model.c"],
    "kvmnn.policies.h2o._scores": ["scores.c"],
    "kvmnn.analysis._stream_meter": ["token_predictors.c"],
    "kvmnn.packed._layout": ["layout_kernels.c", "quantize.c"],
    "kvmnn.policies._norms": ["norms.c"],
    "kvmnn.transform._codec": ["transform.c"],
}
"""C files of a module, in the folder of its .pyx."""
HEADERS = list(ROOT.glob("kvmnn/*.h"))


def extension(source: Path) -> Extension:
    name, folder = ".".join(source.relative_to(ROOT).with_suffix("").parts), source.parent
    return Extension(
        name,
        [str(source), *(str(folder / entry) for entry in NATIVE.get(name, []))],
        include_dirs=[str(ROOT)],
        define_macros=[("Py_LIMITED_API", "0x030B0000")] if LIMITED_API else [],
        py_limited_api=LIMITED_API,
        depends=sorted({str(path) for path in (*HEADERS, *folder.glob("*.h"), *folder.parent.glob("*.h"))}),
        extra_compile_args=COMPILE,
        extra_link_args=LINK,
    )


def require_compiler() -> None:
    """Stop with one line, before anything is compiled, where no C compiler or no Python.h is installed."""
    is_building = {"bdist_wheel", "build", "build_ext", "develop", "editable_wheel", "install"} & set(sys.argv)
    if not is_building or sys.platform == "win32":  # where setuptools itself asks for Visual C++
        return
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    problem = ""
    if shutil.which(compiler) is None:
        problem = f"no C compiler ({compiler!r} is not on PATH)"
    elif not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        problem = f"no Python.h in {sysconfig.get_paths()['include']}"
    if problem:
        sys.exit(
            f"error: kvmnn is compiled when it is installed from source, and there is {problem}: install one "
            "(Debian, Ubuntu: apt install gcc python3-dev; macOS: xcode-select --install), or install a wheel of kvmnn"
        )


class BuildExt(build_ext):
    """Builds in place leave no module of an earlier build beside the new one: Python may prefer the old one's name."""

    def copy_extensions_to_source(self) -> None:
        super().copy_extensions_to_source()
        for module in self.extensions:
            built = Path(self.get_ext_fullpath(module.name))
            for other in built.parent.glob(f"{built.name.partition('.')[0]}.*"):
                if other.suffix == built.suffix and other != built:
                    other.unlink()


require_compiler()
setup(
    cmdclass={"build_ext": BuildExt},
    ext_modules=cythonize(
        [extension(source) for source in (ROOT / "kvmnn" / "_shared.c", *sorted(ROOT.rglob("*.pyx")))],
        shared_utility_qualified_name="kvmnn._shared",  # Cython writes its C file
        build_dir="build/debug" if DEBUG else "build",  # C made without checks is not taken for C with them
        include_path=[str(ROOT)],
        compiler_directives=DIRECTIVES,
        nthreads=CORES if multiprocessing.get_start_method() == "fork" else 0,
    ),
    options={
        "build_ext": {"parallel": CORES},
        "bdist_wheel": {"py_limited_api": "cp311"} if LIMITED_API else {},
    },
)
