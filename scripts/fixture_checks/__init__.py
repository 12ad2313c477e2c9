"""What `scripts/check_fixture.py` knows to compute, a file per kind of fixture."""
