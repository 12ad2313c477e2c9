"""Whether this machine computes what it should: `specjax doctor`."""
