"""Needs of a model on a machine: memory of its parts, seconds of a request, savings that make it fit."""
