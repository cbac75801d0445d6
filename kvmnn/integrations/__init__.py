"""Codecs for Zarr and numcodecs, registered through entry points: chunks of arrays as frames.

Nothing is imported here: zarr and numcodecs are optional, and each loads the one module that it needs.
"""
