"""Gemma 4 MTP (the assistant): a small network that asks the target's own keys and values."""
