"""What ranks talk over: their teams, the process groups of these, and collectives."""
