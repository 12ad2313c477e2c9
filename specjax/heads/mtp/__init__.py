"""Native MTP: modules that go on from the target's last state, one decoder layer each."""
