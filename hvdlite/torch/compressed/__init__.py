"""Gradients of a distributed optimizer that travel in fewer bytes: buckets that take several collectives each."""
