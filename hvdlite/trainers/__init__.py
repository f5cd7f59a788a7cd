"""Callbacks for trainers of other libraries, `lightning.py` and `transformers.py`: docs/trainers.md is the guide."""
