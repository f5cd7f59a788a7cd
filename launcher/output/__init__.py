"""What the user sees: lines of ranks, JSON, files, the dashboard."""
