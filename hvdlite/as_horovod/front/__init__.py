"""A folder for PYTHONPATH: all that it shows is `horovod`. `hvdlite-run --as-horovod` puts it in front."""
