"""Low-rank products added to weights: once when they are loaded, or in place from job to job."""
