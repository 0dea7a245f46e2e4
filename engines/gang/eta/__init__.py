"""What steps are predicted to take: measured ones, kept on the disk, and estimates until then."""
