"""What a model needs on a machine: memory of its parts, seconds of a request, and savings that make it fit."""
