"""A denoising step of full-size models: its time on every number of ranks, where that goes, and how exact it is."""
