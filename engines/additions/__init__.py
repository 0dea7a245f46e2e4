"""Low-rank products added to weights: once at load, or in place from job to job."""
