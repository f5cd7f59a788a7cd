"""Callbacks for trainers of other libraries, `lightning.py` and `transformers.py`: guide: docs/guides/trainers.md."""
