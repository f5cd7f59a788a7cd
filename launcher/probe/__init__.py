"""What one host has: frameworks and libraries (--check-build), limits, addresses."""
