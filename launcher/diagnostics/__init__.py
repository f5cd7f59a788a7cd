"""The checks of `hvdlite-run doctor`: whether a job will run, and what to do if not."""
