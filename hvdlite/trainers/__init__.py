"""Callbacks for trainers of other libraries, `lightning.py` and `transformers.py`. Guide: docs/guides/trainers.md."""
