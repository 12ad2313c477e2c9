"""Reading and writing published checkpoint layouts."""
