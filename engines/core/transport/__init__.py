"""Values with tensors, sent from process to process."""
