"""Engine files on GPUs: preflight checks, runtime, steps."""
