"""Engine files on GPUs: checks before the first step, bindings, steps."""
