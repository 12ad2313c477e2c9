"""EAGLE-3: a chain of recycled states over fused taps of the target."""
