"""Jobs and plans: what is to be done, which ranks do what next, and a rank's part of it."""
