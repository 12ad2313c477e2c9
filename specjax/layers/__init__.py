"""Building blocks shared by targets and heads: pure functions, one idea a file."""
