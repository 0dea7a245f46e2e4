"""Policies of a gang's scheduler, compared by going through its plans without ranks."""
