"""Open-loop load: requests arrive whether or not others were answered."""
