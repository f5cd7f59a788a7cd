"""hvdlite's own plans, one file each, whose docstring names the source. registry.py imports all that lie here."""
