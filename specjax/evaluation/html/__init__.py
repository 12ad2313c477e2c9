"""Pages that open anywhere: one file each, no script, nothing loaded from elsewhere."""
