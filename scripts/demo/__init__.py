"""The stages of `scripts/train_demo.py`."""
