"""DFlash and DSpark: heads that draft a block of tokens in one pass."""
