"""Predicted finish of jobs: measured times in files, predictions from them, a simulation, and admission."""
