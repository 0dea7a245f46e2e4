"""Values with tensors on their way from process to process."""
