"""Heads written with other frameworks' modules, and ours as such modules."""
