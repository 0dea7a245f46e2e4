"""The toolkit of hand-ordered steps: matrix products, fused kernels, side streams."""
