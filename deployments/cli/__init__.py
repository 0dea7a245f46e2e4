"""The command line: ``troupe generate | serve | models | doctor | build-engine | calibrate | estimate | demo``."""
