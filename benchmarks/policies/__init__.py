"""Simulation of a gang's policies without ranks."""
