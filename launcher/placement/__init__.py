"""From flags to hosts and slots: where the ranks run, and who starts the agents there."""
