"""Codecs for Zarr and numcodecs, registered through entry points: chunks of arrays as frames.

This package imports nothing: zarr and numcodecs are optional, and each loads only the module that it needs.
"""
