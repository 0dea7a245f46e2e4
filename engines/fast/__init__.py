"""The toolkit of hand-ordered steps: GEMMs, fused kernels, side streams, blocks, captured steps."""
