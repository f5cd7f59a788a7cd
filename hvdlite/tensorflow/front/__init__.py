"""A folder for PYTHONPATH: Python runs its sitecustomize when it starts. `hvdlite-run --tf-strategy` puts it there."""
