"""From flags to hosts and slots: where the ranks run, and what starts the agents there."""
