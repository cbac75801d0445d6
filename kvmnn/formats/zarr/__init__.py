"""Zarr stores on disk: a directory with a document for each array and a file for each chunk (docs/zarr.md).

Read and written without the package zarr; what is written, zarr, xarray and dask read by the codec in `kvmnn.codecs`.
"""

from ...files.names import is_named_zarr
from .inspecting import inspect_store
from .lost_group import lost_group
from .reading import is_store, read
from .restoring import restore_store, verify_store
from .writing import encode_store

__all__ = [
    "encode_store",
    "inspect_store",
    "is_named_zarr",
    "is_store",
    "lost_group",
    "read",
    "restore_store",
    "verify_store",
]
