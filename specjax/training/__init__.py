"""Training of draft heads: one trainer for all of them, exact under interruption."""
