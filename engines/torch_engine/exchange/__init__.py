"""Exchange of heads between the ranks of a team: through NCCL, or through peer memory."""
