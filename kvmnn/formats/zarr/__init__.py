"""Zarr stores on disk: a directory with a document for each array and a file for each chunk (docs/zarr.md).

Reading and writing do not need the package zarr; zarr, xarray and dask read kvmnn's stores with the codec in
`kvmnn.integrations`.
"""

from ...files.file_names import has_zarr_suffix
from .inspection import inspect_store
from .reader import ORPHANED_ARRAYS, ZARR, find_orphaned_arrays, read
from .restorer import restore_store, verify_store
from .writer import encode_store

__all__ = [
    "ORPHANED_ARRAYS",
    "ZARR",
    "encode_store",
    "find_orphaned_arrays",
    "has_zarr_suffix",
    "inspect_store",
    "read",
    "restore_store",
    "verify_store",
]
