"""Every published model once on this machine, through the whole application where its encoders are known."""
