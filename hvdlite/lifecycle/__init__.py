"""From a process to a rank and back: init, shutdown, and what happens to an uncaught exception."""
