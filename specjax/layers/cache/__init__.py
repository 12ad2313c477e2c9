"""Caches, one file per kind of layer: what a layer reads, and the only functions that write."""
