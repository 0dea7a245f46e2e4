"""How the ranks of a team exchange heads: through NCCL, or through memory that they write for one another."""
