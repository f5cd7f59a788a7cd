"""Jobs that are started from Python: hvdlite.run, and the workers of Ray, Spark and Dask."""
