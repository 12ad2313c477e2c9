"""Measuring a target with and without a draft head. Modules are imported by name."""
