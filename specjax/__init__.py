"""SpecJAX: lossless speculative decoding, and the training of draft heads, in JAX."""

__version__ = "0.1.0"
