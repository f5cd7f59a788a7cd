"""The agent of one host: it starts ranks, passes on their output and leaves nothing behind."""
