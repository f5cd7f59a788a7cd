"""What hosts of a job import first, by this name in every version: see starters/remote_agent.py."""

from .starters.remote_agent import main as main
