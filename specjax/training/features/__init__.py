"""Target features kept on disk, so that training runs no target."""
