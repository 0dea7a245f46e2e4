"""Load as it comes from outside: requests arrive when they will, whether or not others have been answered."""
