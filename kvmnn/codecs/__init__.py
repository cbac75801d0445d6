"""The codec for stores of others, found by their entry points: chunks of Zarr arrays as frames.

Nothing is imported here: zarr and numcodecs are optional, and each loads the one module that it needs.
"""
